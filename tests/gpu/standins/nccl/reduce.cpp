// Arithmetic of the reductions: ranks are added in order; half types are rounded once, at the end.
#include <cmath>
#include <cstring>

#include "nccl.h"

namespace standin_nccl {
namespace {

struct Bfloat16 {
  std::uint16_t bits;
  operator float() const {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
  }
  Bfloat16() = default;
  explicit Bfloat16(float f) {
    std::uint32_t u;
    memcpy(&u, &f, 4);
    bits = static_cast<std::uint16_t>(f != f ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
};

template <class F>
void with_type(int type, F f) {
  switch (type) {
    case kInt8:
      return f(std::int8_t{}, std::int8_t{});
    case kUint8:
      return f(std::uint8_t{}, std::uint8_t{});
    case kInt32:
      return f(std::int32_t{}, std::int32_t{});
    case kUint32:
      return f(std::uint32_t{}, std::uint32_t{});
    case kInt64:
      return f(std::int64_t{}, std::int64_t{});
    case kUint64:
      return f(std::uint64_t{}, std::uint64_t{});
    case kFloat16:
      return f(_Float16{}, float{});
    case kFloat32:
      return f(float{}, float{});
    case kFloat64:
      return f(double{}, double{});
    case kBfloat16:
      return f(Bfloat16{}, float{});
    default:
      return;
  }
}

template <class T>
T load(const std::byte* at, std::size_t i) {
  T value;
  memcpy(&value, at + i * sizeof(T), sizeof(T));
  return value;
}

template <class A>
A combine(A a, A b, int op) {
  switch (op) {
    case kProduct:
      return static_cast<A>(a * b);
    case kMax:
      return a < b || b != b ? b : a;
    case kMin:
      return b < a || b != b ? b : a;
    default:
      return static_cast<A>(a + b);
  }
}

}  // namespace

std::size_t size_of(int type) {
  static const std::size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type < kTypes ? sizes[type] : 0;
}

void reduce(std::byte* out, const std::byte* const* inputs, int count, std::size_t elements,
            int type, int op) {
  with_type(type, [&](auto stored, auto wide) {
    using T = decltype(stored);
    using A = decltype(wide);
    for (std::size_t i = 0; i < elements; ++i) {
      A sum = static_cast<A>(load<T>(inputs[0], i));
      for (int r = 1; r < count; ++r) sum = combine(sum, static_cast<A>(load<T>(inputs[r], i)), op);
      if (op == kMean) sum = static_cast<A>(sum / static_cast<A>(count));
      const T result = static_cast<T>(sum);
      memcpy(out + i * sizeof(T), &result, sizeof(T));
    }
  });
}

void scale(std::byte* out, const std::byte* in, std::size_t elements, int type, double factor) {
  with_type(type, [&](auto stored, auto wide) {
    using T = decltype(stored);
    using A = decltype(wide);
    for (std::size_t i = 0; i < elements; ++i) {
      const T result =
          static_cast<T>(static_cast<A>(static_cast<A>(load<T>(in, i)) * static_cast<A>(factor)));
      memcpy(out + i * sizeof(T), &result, sizeof(T));
    }
  });
}

double read_scalar(const void* at, int type) {
  double value = 0;
  with_type(type, [&](auto stored, auto wide) {
    using A = decltype(wide);
    value = static_cast<double>(
        static_cast<A>(load<decltype(stored)>(static_cast<const std::byte*>(at), 0)));
  });
  return value;
}

}  // namespace standin_nccl
