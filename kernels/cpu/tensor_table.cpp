// Picks the graph's kernels of the best instruction set that this processor has.
#include "tensor_kernels.h"

namespace allreduce {

namespace baseline {
extern const TensorKernels tensor_table;
}
#if defined(ALLREDUCE_X86_LEVELS)
namespace avx2 {
extern const TensorKernels tensor_table;
}
namespace avx512 {
extern const TensorKernels tensor_table;
}
#endif

const TensorKernels* tensor_kernels_at(Level level) {
  if (level == Level::baseline) return &baseline::tensor_table;
#if defined(ALLREDUCE_X86_LEVELS)
  // The collectives' table knows what each level needs of the processor.
  if (kernels_at(level)) return level == Level::avx2 ? &avx2::tensor_table : &avx512::tensor_table;
#endif
  return nullptr;
}

const TensorKernels& tensor_kernels() {
  static const TensorKernels& best = []() -> const TensorKernels& {
    const TensorKernels* found = nullptr;
    for (Level level : kLevels)
      if (const TensorKernels* table = tensor_kernels_at(level)) found = table;
    return *found;
  }();
  return best;
}

}  // namespace allreduce
