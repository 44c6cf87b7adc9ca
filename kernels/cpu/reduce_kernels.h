// Element-wise kernels of the collectives: one table of functions per instruction set.
//
// All levels give the same bits: each output element is folded over the inputs in their order, with
// no contraction and no reassociation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace allreduce {

enum class Op : std::uint8_t { none, sum, mean, min, max, prod };
enum class Type : std::uint8_t { none, float32, float64, int32, int64 };
inline constexpr int kOps = 6;
inline constexpr int kTypes = 5;

constexpr std::size_t size_of(Type type) {
  switch (type) {
    case Type::float32:
    case Type::int32:
      return 4;
    case Type::float64:
    case Type::int64:
      return 8;
    case Type::none:
      return 1;
  }
  return 1;
}

// Folds `count` elements of `n` inputs and stores the result into each of `m` outputs. An output
// may be one of the inputs.
using Reduce = void (*)(const void* const* in, int n, void* const* out, int m, std::size_t count);
// Copies; with streaming stores, which go past the caches, a store fence follows.
using Copy = void (*)(void* to, const void* from, std::size_t bytes);
// Moves `shared` to `to`, and `next` into its place. Without `next` it leaves zeros.
using Swap = void (*)(void* to, void* shared, const void* next, std::size_t bytes);

struct KernelTable {
  const char* name;
  Reduce reduce[kOps][kTypes];  // null where the pair makes no sense
  Copy copy;
  Copy stream_copy;
  Swap swap;
};

enum class Level { baseline, avx2, avx512 };
inline constexpr Level kLevels[] = {Level::baseline, Level::avx2, Level::avx512};

// The table of a level, or null if this processor or this build lacks it.
const KernelTable* kernels_at(Level level);
// The best table this processor can run.
const KernelTable& kernels();

}  // namespace allreduce
