// Element-wise kernels of the collectives: one table of functions per instruction set.
//
// All levels give the same bits: each output element is folded over the inputs in their order, with
// no contraction and no reassociation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/simd/levels.h"

namespace allreduce {

// Rows and columns of the table; Python's OPERATORS and DTYPES stand in the same order.
enum class Op : std::uint8_t {
  none,
  sum,
  mean,
  min,
  max,
  prod,
  logical_and,
  logical_or,
  bitwise_and,
  bitwise_or,
  bitwise_xor
};
enum class Type : std::uint8_t {
  none,
  float32,
  float64,
  int32,
  int64,
  float16,
  bfloat16,
  int8,
  int16,
  uint8,
  uint16,
  uint32,
  uint64,
  boolean,
  complex64,
  complex128
};
inline constexpr int kOps = 11;
inline constexpr int kTypes = 16;

// Bytes of an element.
constexpr std::size_t size_of(Type type) {
  constexpr std::size_t kSizes[kTypes] = {1, 4, 8, 4, 8, 2, 2, 1, 2, 1, 2, 4, 8, 1, 8, 16};
  return kSizes[static_cast<int>(type)];
}

// Folds `count` elements of `n` inputs and stores the result into each of `m` outputs. An output
// may be one of the inputs. A mean is the sum, divided by `divisor`.
//
// Integers wrap. The 16-bit floats are folded in float32 and rounded once, at the end. A NaN wins
// min and max; which of several NaNs a result repeats is not promised. Logical operators take all
// but zero for true and give 1 or 0.
using Reduce = void (*)(const void* const* in, int n, void* const* out, int m, std::size_t count,
                        int divisor);
// Copies; with streaming stores, which go past the caches, a store fence follows.
using Copy = void (*)(void* to, const void* from, std::size_t bytes);
// Moves `shared` to `to`, and `next` to `shared`; without `next`, zeros.
using Swap = void (*)(void* to, void* shared, const void* next, std::size_t bytes);
// As Swap, with stores past the caches to `to`. With `next`, it copies `own`, unless that is null,
// to `kept` in the same way; `kept` lies as far into a cache line as `to`.
using StreamSwap = void (*)(void* to, void* shared, const void* next, void* kept, const void* own,
                            std::size_t bytes);

struct KernelTable {
  Reduce reduce[kOps][kTypes];  // null where the pair makes no sense
  Copy copy;
  Copy stream_copy;
  Swap swap;
  StreamSwap stream_swap;
};

template <>
const KernelTable LevelTable<KernelTable, Level::baseline>::table;
template <>
const KernelTable LevelTable<KernelTable, Level::avx2>::table;
template <>
const KernelTable LevelTable<KernelTable, Level::avx512>::table;

inline const KernelTable& kernels() { return *table_in_use<KernelTable>(); }

// Reduces all inputs of a call: a mean divides by their number.
inline void reduce_all(Op op, Type type, const void* const* in, int n, void* const* out, int m,
                       std::size_t count) {
  kernels().reduce[static_cast<int>(op)][static_cast<int>(type)](in, n, out, m, count, n);
}

}  // namespace allreduce
