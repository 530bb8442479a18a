// What Python calls a Device, shared by the module's files.
#pragma once
#include <string>
#include <vector>

#include "dispatch.h"
#include "program.h"
#include "sample.h"

namespace headrace {

struct DeviceRef {
  Paths paths;
  Device device;
  std::vector<SampleScratch> samplers;  // one a thread
  DeviceRef(int threads, const std::string& cpu) : paths(choose_paths(cpu)), device(*paths.path, *paths.ops, threads) {}
};

}  // namespace headrace
