// Fused arithmetic: several operations of a chain, each on the previous one's value, in registers.
// The results are bitwise NumPy's. Only for files compiled once per KERNEL_LEVEL.
//
// It is for chains of sums and products, not for training steps. Eight operations with numbers
// (benchmarks/workloads/chain.py) take on 10⁷ floats 2.2 ms instead of 8.1, on 10⁵ 38 us instead of
// 85 (Zen 4); steps of an MLP and of a convolutional net, also with gelu and normalisations by
// hand, 1 % more or less.
#pragma once

#include <cstddef>

#include "cpu/elementwise/chain.h"
#include "cpu/simd/vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

constexpr auto Add = [](auto x, auto y) { return x + y; };
constexpr auto Subtract = [](auto x, auto y) { return x - y; };
constexpr auto Multiply = [](auto x, auto y) { return x * y; };
constexpr auto Divide = [](auto x, auto y) { return x / y; };
constexpr auto Nothing = [](auto x, auto) { return x; };

// Vectors computed before the first is stored; with the operands they fill the registers: 256 bytes
// for the widest vectors.
constexpr std::size_t kHeld = kWidth == 64 ? 4 : 8;
// Prefetch distance in bytes; the hardware's own prefetcher stops at the end of a page.
// Eight operations on 10⁷ floats: 4.1 instead of 4.4 ms, and on small pages 5.6 instead of 6.0.
constexpr std::size_t kAhead = 2048;
// Bytes of a tile, which stays in the level-1 cache from one stretch to the next; shorter if the
// last stretch stores past the caches, so that memory reads and writes alternate often.
constexpr std::size_t kFusedTile = 4096, kStreamedTile = 1024;

inline void fetch(const void* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(from) + kAhead + at);
}

// x * factor + term. With term -0, or factor 1, it is bitwise the product, or the sum, alone.
template <class T>
struct Affine {
  T factor, term;
};

constexpr std::size_t kAffines = 4;

// Operations of one loop without branches: affine ones, optionally followed by a division by a
// number and one more affine one; or a single operation of any kind.
template <class T>
struct Stretch {
  Affine<T> affine[kAffines];
  std::size_t count = 0;
  const FusedOp* last = nullptr;  // null: none
  Affine<T> then = {T{1}, -T{}};  // after a division by a number
};

inline bool divides(const FusedOp& entry) {
  return entry.op == ElementwiseOp::divide && entry.repeats && !entry.is_right;
}

// Groups a chain's operations into stretches; returns their number.
template <class T>
inline std::size_t stretches_of(const FusedOp* ops, std::size_t count, Stretch<T>* made) {
  std::size_t place = 0;
  Affine<T>* open = nullptr;  // the last operation, if it is a product without a term
  Affine<T>* then = nullptr;  // for the operation after the last division
  for (const FusedOp* entry = ops; entry != ops + count; ++entry) {
    const T value = entry->repeats ? *static_cast<const T*>(entry->other) : T{};
    const bool difference = entry->op == ElementwiseOp::subtract && !entry->is_right;
    const bool sum = entry->op == ElementwiseOp::add || difference;
    const T term = difference ? -value : value;
    const bool is_number = entry->repeats && value == value;  // a NaN's sign would change
    if (!is_number || !(sum || entry->op == ElementwiseOp::multiply)) {
      if (made[place].count && !divides(*entry)) ++place;
      then = divides(*entry) ? &made[place].then : nullptr;
      made[place++].last = entry;
      open = nullptr;
    } else if (sum && open) {
      open->term = term;
      open = nullptr;
    } else {
      if (!then && made[place].count == kAffines) ++place;
      Affine<T>& next = then ? *then : made[place].affine[made[place].count++];
      next = sum ? Affine<T>{T{1}, term} : Affine<T>{value, -T{}};
      open = sum ? nullptr : &next;
      then = nullptr;
    }
  }
  return place + (made[place].count != 0);
}

// One stretch: `Times` affine operations, `Op`, and `Then` (0 or 1) affine operations.
template <class T, std::size_t Times, auto Op, bool IsRight, bool Repeats, std::size_t Then = 0>
void carry_out(T* to, const T* from, const Stretch<T>& stretch, const T* other, std::size_t n,
               bool streams) {
  using V = Vector<T>;
  constexpr std::size_t lanes = sizeof(V) / sizeof(T), block = kHeld * lanes;
  const Affine<T>* affine = stretch.affine;
  V factors[Times + 1], terms[Times + 1];
  for (std::size_t i = 0; i < Times; ++i) {
    factors[i] = affine[i].factor - V{};
    terms[i] = affine[i].term - V{};
  }
  const V factor = stretch.then.factor - V{}, term = stretch.then.term - V{};
  const V repeated = Repeats ? *other - V{} : V{};
  std::size_t at = 0;
  for (; at + block <= n; at += block) {
    fetch(from + at, block * sizeof(T));
    if (!Repeats) fetch(other + at, block * sizeof(T));
    V made[kHeld];
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kHeld; ++v) {
      const std::size_t here = at + v * lanes;
      V held = load<V>(from + here);
      for (std::size_t i = 0; i < Times; ++i) held = held * factors[i] + terms[i];
      const V operand = Repeats ? repeated : load<V>(other + here);
      held = IsRight ? Op(operand, held) : Op(held, operand);
      made[v] = Then ? held * factor + term : held;
    }
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kHeld; ++v) {
      if (streams)
        stream_store(to + at + v * lanes, made[v]);
      else
        store(to + at + v * lanes, made[v]);
    }
  }
  for (; at < n; ++at) {
    T held = from[at];
    for (std::size_t i = 0; i < Times; ++i) held = held * affine[i].factor + affine[i].term;
    const T operand = other[Repeats ? 0 : at];
    held = IsRight ? Op(operand, held) : Op(held, operand);
    to[at] = Then ? held * stretch.then.factor + stretch.then.term : held;
  }
}

template <class T>
using CarryOut = void (*)(T*, const T*, const Stretch<T>&, const T*, std::size_t, bool);

template <class T, auto Op, bool IsRight>
CarryOut<T> find_for(bool repeats) {
  return repeats ? carry_out<T, 0, Op, IsRight, true> : carry_out<T, 0, Op, IsRight, false>;
}

template <class T>
CarryOut<T> find_for(const FusedOp& only) {
  if (only.op == ElementwiseOp::add) return find_for<T, Add, false>(only.repeats);
  if (only.op == ElementwiseOp::multiply) return find_for<T, Multiply, false>(only.repeats);
  if (only.op == ElementwiseOp::subtract)
    return only.is_right ? find_for<T, Subtract, true>(only.repeats)
                         : find_for<T, Subtract, false>(only.repeats);
  return only.is_right ? find_for<T, Divide, true>(only.repeats)
                       : carry_out<T, 0, Divide, false, false>;
}

template <class T, std::size_t Times>
CarryOut<T> find_affine(const FusedOp* last) {
  return last ? carry_out<T, Times, Divide, false, true, 1>
              : carry_out<T, Times, Nothing, false, true>;
}

template <class T>
CarryOut<T> find_for(const Stretch<T>& stretch) {
  if (stretch.count == 0)
    return divides(*stretch.last) ? find_affine<T, 0>(stretch.last) : find_for<T>(*stretch.last);
  if (stretch.count == 1) return find_affine<T, 1>(stretch.last);
  if (stretch.count == 2) return find_affine<T, 2>(stretch.last);
  return stretch.count == 3 ? find_affine<T, 3>(stretch.last) : find_affine<T, 4>(stretch.last);
}

// Runs one loop per stretch, tile by tile. Branching on the operation every few vectors instead,
// with branch mispredictions, made eight operations on 10⁷ floats take 4.2 to 8.0 ms.
template <class T>
void fused(void* out, const void* x, const FusedOp* ops, std::size_t count, std::size_t n,
           bool streams) {
  const std::size_t most = (streams ? kStreamedTile : kFusedTile) / sizeof(T);
  Stretch<T> stretches[kMaxFusedOps + 1];
  CarryOut<T> loops[kMaxFusedOps + 1];
  const std::size_t parts = stretches_of(ops, count, stretches);
  for (std::size_t i = 0; i < parts; ++i) loops[i] = find_for<T>(stretches[i]);
  alignas(64) T tile[kFusedTile / sizeof(T)];
  const T none{};
  for (std::size_t at = 0; at < n; at += most) {
    const std::size_t length = n - at < most ? n - at : most;
    const T* from = static_cast<const T*>(x) + at;
    for (std::size_t i = 0; i < parts; ++i) {
      const FusedOp* last = stretches[i].last;
      const T* other = last ? static_cast<const T*>(last->other) + (last->repeats ? 0 : at) : &none;
      const bool is_last = i + 1 == parts;
      T* to = is_last ? static_cast<T*>(out) + at : tile;
      loops[i](to, from, stretches[i], other, length, is_last && streams);
      from = tile;
    }
  }
}

inline FusedKernel find_fused(ElementwiseOp op, Scalar type) {
  if (op != ElementwiseOp::add && op != ElementwiseOp::subtract && op != ElementwiseOp::multiply &&
      op != ElementwiseOp::divide)
    return nullptr;
  if (type == Scalar::float32) return fused<float>;
  return type == Scalar::float64 ? fused<double> : nullptr;
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
