// Picks the kernels of the best instruction set that this processor has.
#include "reduce_kernels.h"

namespace allreduce {

namespace baseline {
extern const KernelTable table;
}
#if defined(ALLREDUCE_X86_LEVELS)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
#endif

const KernelTable* kernels_at(Level level) {
  if (level == Level::baseline) return &baseline::table;
#if defined(ALLREDUCE_X86_LEVELS)
  // Every processor with AVX2 has the conversions of float16, but a virtual one may hide them.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (level == Level::avx2) return avx2 ? &avx2::table : nullptr;
  if (level == Level::avx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? &avx512::table
               : nullptr;
#endif
  return nullptr;
}

const KernelTable& kernels() {
  static const KernelTable& best = []() -> const KernelTable& {
    const KernelTable* found = nullptr;
    for (Level level : kLevels)
      if (const KernelTable* table = kernels_at(level)) found = table;
    return *found;
  }();
  return best;
}

}  // namespace allreduce
