// Picks the kernels of images of the best instruction set that this processor has.
#include "image_kernels.h"

namespace allreduce {

namespace baseline {
extern const ImageKernels image_table;
}
#if defined(ALLREDUCE_X86_LEVELS)
namespace avx2 {
extern const ImageKernels image_table;
}
namespace avx512 {
extern const ImageKernels image_table;
}
#endif

const ImageKernels* image_kernels_at(Level level) {
  if (level == Level::baseline) return &baseline::image_table;
#if defined(ALLREDUCE_X86_LEVELS)
  // The collectives' table knows what each level needs of the processor, besides what is fused.
  if (kernels_at(level) && __builtin_cpu_supports("fma"))
    return level == Level::avx2 ? &avx2::image_table : &avx512::image_table;
#endif
  return nullptr;
}

const ImageKernels& image_kernels() {
  static const ImageKernels& best = []() -> const ImageKernels& {
    const ImageKernels* found = nullptr;
    for (Level level : kLevels)
      if (const ImageKernels* table = image_kernels_at(level)) found = table;
    return *found;
  }();
  return best;
}

}  // namespace allreduce
