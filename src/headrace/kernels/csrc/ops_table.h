// Fills the table named HEADRACE_OPS from the bodies compiled in this translation unit.
#include "attend_impl.h"
#include "draw_impl.h"
#include "ops_impl.h"

namespace headrace {
extern const VecOps HEADRACE_OPS;
const VecOps HEADRACE_OPS = {
    norm_impl,         activate_impl,    add_impl,    scale_impl, scaled_copy_impl, rope_impl,
    store_record_impl, load_record_call, attend_impl, fold_impl,  math_impl,        scan_impl,
    noise_impl,        weights_impl,     block_max_impl, read_impl,
};
}  // namespace headrace
