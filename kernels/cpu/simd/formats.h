// How the types of arrays become lanes to compute with. Only for files compiled once per
// KERNEL_LEVEL.
//
// A format loads `Bytes` bytes of an array as lanes of its type `Lane`, and stores them. The 16-bit
// floats become a pair of vectors of float32 and are rounded when they are stored, to nearest, ties
// to even; a NaN stays one.
#pragma once

#include "cpu/simd/vectors.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

// Types that need no conversion to compute.
template <class T>
struct Plain {
  using Lane = T;
  static constexpr std::size_t kSize = sizeof(T);
  static constexpr std::size_t kVectors = 1;

  template <std::size_t Bytes>
  static Vector<T, Bytes> load(const void* from) {
    return KERNEL_LEVEL::load<Vector<T, Bytes>>(from);
  }
  template <std::size_t Bytes>
  static void store(void* to, Vector<T, Bytes> value) {
    KERNEL_LEVEL::store(to, value);
  }
};

// Twice the lanes: the array's 16-bit floats take two vectors of float32.
template <std::size_t Bytes>
struct Pair {
  Vector<float, Bytes> a, b;
};

// Lanes of 32 bits that hold two neighbours of an array each. Without a shuffle they become the
// vectors of the even and of the odd elements, and one word again.
//
// `Rounding` has even(words), odd(words) and join(even, odd).
template <class Rounding>
struct Words {
  using Lane = float;
  static constexpr std::size_t kSize = 2;
  static constexpr std::size_t kVectors = 2;
  // A last element without a neighbour takes a word, too.
  static constexpr std::size_t word(std::size_t bytes) { return bytes == 2 ? 4 : bytes; }

  template <std::size_t Bytes>
  static auto load(const void* from) {
    Vector<std::uint32_t, word(Bytes)> words = {};
    __builtin_memcpy(&words, from, Bytes);
    return Pair<word(Bytes)>{Rounding::even(words), Rounding::odd(words)};
  }
  template <std::size_t Bytes>
  static void store(void* to, Pair<word(Bytes)> value) {
    const Vector<std::uint32_t, word(Bytes)> words = Rounding::join(value.a, value.b);
    __builtin_memcpy(to, &words, Bytes);
  }
};

// bfloat16 is the upper half of a float32.
struct BrainRounding {
  template <class U>
  static auto even(U words) {
    return bits<Vector<float, sizeof(U)>>(words << 16);
  }
  template <class U>
  static auto odd(U words) {
    return bits<Vector<float, sizeof(U)>>(words & 0xffff0000u);
  }
  template <class F>
  static auto join(F even, F odd) {
    return round(even) >> 16 | (round(odd) & 0xffff0000u);
  }
  // Rounds to the upper half; the lower half is then undefined. A NaN stays one without a test: its
  // payload comes from an input whose lower half is zero, so nothing carries. One line of sums
  // takes 2.8 ns, with a test 3.4 (Zen 4, in the level-2 cache; float32 1.45).
  template <class F>
  static auto round(F value) {
    const auto u = bits<Vector<std::uint32_t, sizeof(F)>>(value);
    return u + 0x7fffu + (u >> 16 & 1u);
  }
};
using BFloat16 = Words<BrainRounding>;

// float16 (IEEE 754 binary16) in integer operations, as the F16C instructions do it.
struct HalfRounding {
  template <class U>
  static auto even(U words) {
    return widen(words & 0xffffu);
  }
  template <class U>
  static auto odd(U words) {
    return widen(words >> 16);
  }
  template <class F>
  static auto join(F even, F odd) {
    return narrow(even) | narrow(odd) << 16;
  }

  template <class U>
  static auto widen(U half) {
    using F = Vector<float, sizeof(U)>;
    const U shifted = (half & 0x7fffu) << 13;
    const U normal = shifted + (112u << 23);  // the exponent's bias is 15 there and 127 here
    // Subnormals get the exponent of the smallest normal; subtracting that leaves their value.
    const U lowest = U{} + (113u << 23);
    const U subnormal = bits<U>(bits<F>(shifted + lowest) - bits<F>(lowest));
    const U special = shifted | 0x7f800000u;  // infinity, NaN
    const U magnitude = shifted >= (0x7c00u << 13)   ? special
                        : shifted >= (0x0400u << 13) ? normal
                                                     : subnormal;
    return bits<F>(magnitude | (half & 0x8000u) << 16);
  }

  template <class F>
  static auto narrow(F value) {
    using U = Vector<std::uint32_t, sizeof(F)>;
    const U all = bits<U>(value);
    const U u = all & 0x7fffffffu;
    // A carry out of the mantissa is right: it goes to the next exponent, and the last to infinity.
    const U normal = (u - (112u << 23) + 0xfffu + (u >> 13 & 1u)) >> 13;
    // Beside 0.5 the last place of a sum is 2^-24, as of subnormals: the addition rounds.
    const U half = U{} + (126u << 23);
    const U subnormal = bits<U>(bits<F>(u) + bits<F>(half)) - half;
    const U payload = u > 0x7f800000u ? (u >> 13 & 0x1ffu) | 0x200u : U{};
    const U magnitude = u >= (143u << 23)   ? payload | 0x7c00u
                        : u >= (113u << 23) ? normal
                                            : subnormal;
    return magnitude | (all >> 16 & 0x8000u);
  }
};
using PortableHalf = Words<HalfRounding>;

#if defined(__F16C__)
// float16 by the processor's own conversions; the first half of the lanes, then the second.
struct Float16 {
  using Lane = float;
  static constexpr std::size_t kSize = 2;
  static constexpr std::size_t kVectors = 2;

  template <std::size_t Bytes>
  static auto load(const void* from) {
    if constexpr (Bytes < 16) {
      return PortableHalf::load<Bytes>(from);
    } else {
      auto* second = static_cast<const unsigned char*>(from) + Bytes / 2;
      return Pair<Bytes>{widen<Bytes>(from), widen<Bytes>(second)};
    }
  }
  template <std::size_t Bytes, class Value>
  static void store(void* to, Value value) {
    if constexpr (Bytes < 16) {
      PortableHalf::store<Bytes>(to, value);
    } else {
      narrow<Bytes>(to, value.a);
      narrow<Bytes>(static_cast<unsigned char*>(to) + Bytes / 2, value.b);
    }
  }

 private:
#if defined(__AVX512F__)
  // All lanes: without a mask, GCC 12 warns of its own header (its bug 105593).
  static constexpr __mmask16 kAll = 0xffff;
#endif
  // Reads Bytes / 2 bytes.
  template <std::size_t Bytes>
  static Vector<float, Bytes> widen(const void* from) {
    if constexpr (Bytes == 16)
      return _mm_cvtph_ps(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
    if constexpr (Bytes == 32) return _mm256_cvtph_ps(KERNEL_LEVEL::load<__m128i>(from));
#if defined(__AVX512F__)
    if constexpr (Bytes == 64)
      return _mm512_maskz_cvtph_ps(kAll, KERNEL_LEVEL::load<__m256i>(from));
#endif
  }
  template <std::size_t Bytes>
  static void narrow(void* to, Vector<float, Bytes> value) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    if constexpr (Bytes == 16)
      _mm_storel_epi64(static_cast<__m128i*>(to), _mm_cvtps_ph(value, kNearest));
    if constexpr (Bytes == 32) KERNEL_LEVEL::store(to, _mm256_cvtps_ph(value, kNearest));
#if defined(__AVX512F__)
    if constexpr (Bytes == 64)
      KERNEL_LEVEL::store(to, _mm512_maskz_cvtps_ph(kAll, value, kNearest));
#endif
  }
};
#else
using Float16 = PortableHalf;
#endif

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
