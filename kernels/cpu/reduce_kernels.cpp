// Compiled once per instruction set, with KERNEL_LEVEL naming the namespace: no template of the
// standard library may be used here, or the linker could keep the AVX-512 copy for everyone.
#include "reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace allreduce::KERNEL_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kWidth = 64;
#elif defined(__AVX2__)
constexpr std::size_t kWidth = 32;
#else
constexpr std::size_t kWidth = 16;
#endif
// Vectors per step: hides the latency of an add and leaves registers for the inputs.
constexpr std::size_t kUnroll = 4;

template <class T>
struct Lanes {
  typedef T Vector __attribute__((vector_size(kWidth)));
  static constexpr std::size_t count = kWidth / sizeof(T);
};

template <class V>
inline V load(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
inline void store(void* to, V value) {
  __builtin_memcpy(to, &value, sizeof(V));
}

// Stores a whole aligned vector past the caches.
template <class V>
inline void stream_store(void* to, V value) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), reinterpret_cast<__m512i>(value));
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(to), reinterpret_cast<__m256i>(value));
#elif defined(__x86_64__)
  _mm_stream_si128(static_cast<__m128i*>(to), reinterpret_cast<__m128i>(value));
#else
  store(to, value);
#endif
}

inline void store_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

struct Sum {
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};
struct Prod {
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
};
struct Min {  // a NaN on either side wins, as in numpy.minimum
  template <class V>
  static V apply(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <class V>
  static V apply(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct Keep {
  explicit Keep(int) {}
  template <class V>
  V operator()(V value) const {
    return value;
  }
};

// Divides by the number of inputs. A power of two has an exact reciprocal, and a product with it
// rounds as the quotient does, at a fraction of the time.
template <class T>
struct Divide {
  explicit Divide(int n)
      : divisor(static_cast<T>(n)), reciprocal(T(1) / divisor), exact((n & (n - 1)) == 0) {}
  template <class V>
  V operator()(V value) const {
    return exact ? value * reciprocal : value / divisor;
  }
  T divisor;
  T reciprocal;
  bool exact;
};

template <class T, class Fold, class Finish>
inline void reduce_one(const T* const* in, int n, T* const* out, int m, std::size_t i,
                       const Finish& finish) {
  T value = in[0][i];
  for (int k = 1; k < n; ++k) value = Fold::apply(value, in[k][i]);
  value = finish(value);
  for (int j = 0; j < m; ++j) out[j][i] = value;
}

template <class T, class Fold, class Finish>
void reduce(const void* const* inputs, int n, void* const* outputs, int m, std::size_t count) {
  using V = typename Lanes<T>::Vector;
  constexpr std::size_t lanes = Lanes<T>::count;
  const T* const* in = reinterpret_cast<const T* const*>(inputs);
  T* const* out = reinterpret_cast<T* const*>(outputs);
  const Finish finish(n);
  std::size_t i = 0;
  for (; i + kUnroll * lanes <= count; i += kUnroll * lanes) {
    V sums[kUnroll];
    for (std::size_t u = 0; u < kUnroll; ++u) sums[u] = load<V>(in[0] + i + u * lanes);
    for (int k = 1; k < n; ++k)
      for (std::size_t u = 0; u < kUnroll; ++u)
        sums[u] = Fold::apply(sums[u], load<V>(in[k] + i + u * lanes));
    for (std::size_t u = 0; u < kUnroll; ++u) sums[u] = finish(sums[u]);
    for (int j = 0; j < m; ++j)
      for (std::size_t u = 0; u < kUnroll; ++u) store(out[j] + i + u * lanes, sums[u]);
  }
  for (; i < count; ++i) reduce_one<T, Fold>(in, n, out, m, i, finish);
}

void stream_copy(void* to, const void* from, std::size_t bytes) {
  using V = Lanes<unsigned char>::Vector;
  auto* target = static_cast<unsigned char*>(to);
  auto* source = static_cast<const unsigned char*>(from);
  std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % kWidth;
  if (head > bytes) head = bytes;
  __builtin_memcpy(target, source, head);
  std::size_t i = head;
  for (; i + kWidth <= bytes; i += kWidth) stream_store(target + i, load<V>(source + i));
  __builtin_memcpy(target + i, source + i, bytes - i);
  store_fence();
}

template <class Step>
inline void for_each_vector(std::size_t bytes, const Step& step) {
  using V = Lanes<unsigned char>::Vector;
  std::size_t i = 0;
  for (; i + kUnroll * kWidth <= bytes; i += kUnroll * kWidth)
    for (std::size_t u = 0; u < kUnroll; ++u) step(V{}, i + u * kWidth);
  for (; i + kWidth <= bytes; i += kWidth) step(V{}, i);
  for (; i < bytes; ++i) step(static_cast<unsigned char>(0), i);
}

void copy(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  auto* source = static_cast<const unsigned char*>(from);
  for_each_vector(bytes, [=](auto zero, std::size_t i) {
    store(target + i, load<decltype(zero)>(source + i));
  });
}

void swap(void* to, void* shared, const void* next, std::size_t bytes) {
  auto* target = static_cast<unsigned char*>(to);
  auto* middle = static_cast<unsigned char*>(shared);
  auto* source = static_cast<const unsigned char*>(next);
  if (source == nullptr)
    return for_each_vector(bytes, [=](auto zero, std::size_t i) {
      store(target + i, load<decltype(zero)>(middle + i));
      store(middle + i, zero);
    });
  for_each_vector(bytes, [=](auto zero, std::size_t i) {
    const auto value = load<decltype(zero)>(middle + i);
    store(middle + i, load<decltype(zero)>(source + i));
    store(target + i, value);
  });
}

}  // namespace

extern const KernelTable table;
#define ALLREDUCE_STRING(name) #name
#define ALLREDUCE_NAME(name) ALLREDUCE_STRING(name)
#define ALLREDUCE_ROW(Fold)                                        \
  {nullptr, reduce<float, Fold, Keep>, reduce<double, Fold, Keep>, \
   reduce<std::int32_t, Fold, Keep>, reduce<std::int64_t, Fold, Keep>}
const KernelTable table = {ALLREDUCE_NAME(KERNEL_LEVEL),
                           {{},
                            ALLREDUCE_ROW(Sum),
                            {nullptr, reduce<float, Sum, Divide<float>>,
                             reduce<double, Sum, Divide<double>>, nullptr, nullptr},
                            ALLREDUCE_ROW(Min),
                            ALLREDUCE_ROW(Max),
                            ALLREDUCE_ROW(Prod)},
                           copy,
                           stream_copy,
                           swap};

}  // namespace allreduce::KERNEL_LEVEL
