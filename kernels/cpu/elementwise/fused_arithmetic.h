// Several operations of a chain at once, of which each goes on with what the one before has made,
// with the bits that NumPy's have one after the other. Only for files compiled once per
// KERNEL_LEVEL.
#pragma once

#include <cstddef>

#include "cpu/elementwise/chain.h"
#include "cpu/simd/vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

struct Add {
  template <class T>
  static T of(T x, T y) {
    return x + y;
  }
};
struct Subtract {
  template <class T>
  static T of(T x, T y) {
    return x - y;
  }
};
struct Multiply {
  template <class T>
  static T of(T x, T y) {
    return x * y;
  }
};
struct Divide {
  template <class T>
  static T of(T x, T y) {
    return x / y;
  }
};

struct Nothing {
  template <class T>
  static T of(T x, T) {
    return x;
  }
};

// Vectors that are computed before the first of them is stored, which with the operands fill the
// registers: 256 bytes of them where vectors are long.
constexpr std::size_t kHeld = kWidth == 64 ? 4 : 8;
// Bytes: as far ahead is asked for what is read, as a processor does by itself within a page only.
// Eight operations on 10⁷ floats: 4.1 instead of 4.4 ms, and on small pages 5.6 instead of 6.0.
constexpr std::size_t kAhead = 2048;
// Bytes of a tile, which stays in the nearest cache from one stretch to the next; and of one whose
// last stretch stores past the caches, so that reads and writes of the memory take short turns.
constexpr std::size_t kSpineTile = 4096, kStreamedTile = 1024;

inline void fetch(const void* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(from) + kAhead + at);
}

// A product with one number and a sum with another: what each of these is by itself, too, where the
// other number is -0 or 1, to the bit.
template <class T>
struct Affine {
  T factor, term;
};

constexpr std::size_t kAffines = 4;

// Operations between which nothing is chosen: affine ones and then, if it is a division by a
// number, another one with one more affine one behind it; or one of any kind.
template <class T>
struct Stretch {
  Affine<T> affine[kAffines];
  std::size_t count = 0;
  const SpineLink* last = nullptr;  // none where this is null
  Affine<T> then = {T{1}, -T{}};    // behind a division by a number
};

inline bool divides(const SpineLink& link) {
  return link.op == LinkOp::divide && link.repeats && !link.is_right;
}

// Puts a chain's operations into stretches; returns how many these are.
template <class T>
inline std::size_t stretches_of(const SpineLink* links, std::size_t count, Stretch<T>* made) {
  std::size_t place = 0;
  Affine<T>* open = nullptr;  // what came last, if that is a product without a term
  Affine<T>* then = nullptr;  // what may follow the division that came last
  for (const SpineLink* link = links; link != links + count; ++link) {
    const T value = link->repeats ? *static_cast<const T*>(link->other) : T{};
    const bool difference = link->op == LinkOp::subtract && !link->is_right;
    const bool sum = link->op == LinkOp::add || difference;
    const T term = difference ? -value : value;
    const bool is_number = link->repeats && value == value;  // a NaN's sign would change
    if (!is_number || !(sum || link->op == LinkOp::multiply)) {
      if (made[place].count && !divides(*link)) ++place;
      then = divides(*link) ? &made[place].then : nullptr;
      made[place++].last = link;
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

// One stretch of `Times` affine operations, another one, and `Then` (0 or 1) affine ones.
template <class T, std::size_t Times, class Op, bool IsRight, bool Repeats, std::size_t Then = 0>
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
      held = IsRight ? Op::of(operand, held) : Op::of(held, operand);
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
    held = IsRight ? Op::of(operand, held) : Op::of(held, operand);
    to[at] = Then ? held * stretch.then.factor + stretch.then.term : held;
  }
}

template <class T>
using CarryOut = void (*)(T*, const T*, const Stretch<T>&, const T*, std::size_t, bool);

template <class T, class Op, bool IsRight>
CarryOut<T> find_for(bool repeats) {
  return repeats ? carry_out<T, 0, Op, IsRight, true> : carry_out<T, 0, Op, IsRight, false>;
}

template <class T>
CarryOut<T> find_for(const SpineLink& only) {
  if (only.op == LinkOp::add) return find_for<T, Add, false>(only.repeats);
  if (only.op == LinkOp::multiply) return find_for<T, Multiply, false>(only.repeats);
  if (only.op == LinkOp::subtract)
    return only.is_right ? find_for<T, Subtract, true>(only.repeats)
                         : find_for<T, Subtract, false>(only.repeats);
  return only.is_right ? find_for<T, Divide, true>(only.repeats)
                       : carry_out<T, 0, Divide, false, false>;
}

template <class T, std::size_t Times>
CarryOut<T> find_affine(const SpineLink* last) {
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

// A loop for each stretch, from tile to tile: where each operation was chosen anew for every few
// vectors, which a processor may foresee wrongly, eight of them on 10⁷ floats took 4.2 to 8.0 ms.
template <class T>
void spine(void* out, const void* x, const SpineLink* links, std::size_t count, std::size_t n,
           bool streams) {
  const std::size_t most = (streams ? kStreamedTile : kSpineTile) / sizeof(T);
  Stretch<T> stretches[kLongest + 1];
  CarryOut<T> loops[kLongest + 1];
  const std::size_t parts = stretches_of(links, count, stretches);
  for (std::size_t i = 0; i < parts; ++i) loops[i] = find_for<T>(stretches[i]);
  alignas(64) T tile[kSpineTile / sizeof(T)];
  const T none{};
  for (std::size_t at = 0; at < n; at += most) {
    const std::size_t length = n - at < most ? n - at : most;
    const T* from = static_cast<const T*>(x) + at;
    for (std::size_t i = 0; i < parts; ++i) {
      const SpineLink* last = stretches[i].last;
      const T* other = last ? static_cast<const T*>(last->other) + (last->repeats ? 0 : at) : &none;
      const bool is_last = i + 1 == parts;
      T* to = is_last ? static_cast<T*>(out) + at : tile;
      loops[i](to, from, stretches[i], other, length, is_last && streams);
      from = tile;
    }
  }
}

inline SpineKernel find_spine(LinkOp op, Scalar type) {
  if (op != LinkOp::add && op != LinkOp::subtract && op != LinkOp::multiply && op != LinkOp::divide)
    return nullptr;
  if (type == Scalar::float32) return spine<float>;
  return type == Scalar::float64 ? spine<double> : nullptr;
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
