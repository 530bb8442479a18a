// Which kernels this CPU runs; decided once, when a Device is made.
#pragma once
#include <string>

#include "headrace.h"
#include "ops.h"

namespace headrace {

struct Paths {
  const Path* path;
  const VecOps* ops;
};

// name: "portable", "avx2", or "" for the best this CPU has. Throws std::invalid_argument for a name that is
// unknown, not in this build, or beyond this CPU.
Paths choose_paths(const std::string& name);

}  // namespace headrace
