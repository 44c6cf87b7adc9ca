// Element-wise operators, whose inputs broadcast to a contiguous output.
//
// Bytes moved per element: the sizes of all inputs and of the output; 12 for two of float32.
#include "common.cuh"
#include "strided.cuh"

template <typename Out, typename In, typename F>
__device__ inline void map1(Out* __restrict__ out, const In* __restrict__ a, long long n,
                            const Strided& s, F f) {
  for (long long i = first_index(); i < n; i += stride_of_grid())
    out[i] = f(a[offsets_of(s, i).at[0]]);
}
template <typename Out, typename In, typename F>
__device__ inline void map2(Out* __restrict__ out, const In* __restrict__ a,
                            const In* __restrict__ b, long long n, const Strided& s, F f) {
  for (long long i = first_index(); i < n; i += stride_of_grid()) {
    const Offsets from = offsets_of(s, i);
    out[i] = f(a[from.at[0]], b[from.at[1]]);
  }
}

// Division rounded down, and what it leaves, as Python and NumPy have them.
template <typename T>
__device__ inline T rest(T x, T y) {
  const T left = fmod(x, y);
  if (left == 0) return y < 0 ? -(T)0 : (T)0;
  return (y < 0) != (left < 0) ? left + y : left;
}
template <typename T>
__device__ inline T quotient(T x, T y) {
  if (y == 0) return x / y;
  const T exact = (x - rest(x, y)) / y, down = floor(exact);
  return exact - down > (T)0.5 ? down + 1 : down;
}
template <typename T>
__device__ inline T whole_quotient(T x, T y) {
  if (y == 0) return 0;    // NumPy's
  if (y == -1) return -x;  // the division of the lowest integer would overflow
  const T found = x / y;
  return found - (found * y != x && (x < 0) != (y < 0));
}

#define UNARY_OF(name, suffix, T, expression)                               \
  KERNEL(256) name##_##suffix(T* out, const T* a, long long n, Strided s) { \
    map1(out, a, n, s, [](T x) { return (T)(expression); });                \
  }
#define BINARY_OF(name, suffix, Out, T, expression)                                       \
  KERNEL(256) name##_##suffix(Out* out, const T* a, const T* b, long long n, Strided s) { \
    map2(out, a, b, n, s, [](T x, T y) { return (Out)(expression); });                    \
  }
#define UNARY_FLOAT(name, expression)    \
  UNARY_OF(name, f32, float, expression) \
  UNARY_OF(name, f64, double, expression)
#define UNARY(name, expression)        \
  UNARY_FLOAT(name, expression)        \
  UNARY_OF(name, i32, int, expression) \
  UNARY_OF(name, i64, long long, expression)
#define BINARY_FLOAT(name, expression)           \
  BINARY_OF(name, f32, float, float, expression) \
  BINARY_OF(name, f64, double, double, expression)
#define BINARY(name, expression)             \
  BINARY_FLOAT(name, expression)             \
  BINARY_OF(name, i32, int, int, expression) \
  BINARY_OF(name, i64, long long, long long, expression)
#define BINARY_WHOLE(name, expression)       \
  BINARY_OF(name, i32, int, int, expression) \
  BINARY_OF(name, i64, long long, long long, expression)
#define BINARY_BITS(name, expression) \
  BINARY_WHOLE(name, expression)      \
  BINARY_OF(name, b8, bool, bool, expression)
#define COMPARE(name, expression)                   \
  BINARY_OF(name, f32, bool, float, expression)     \
  BINARY_OF(name, f64, bool, double, expression)    \
  BINARY_OF(name, i32, bool, int, expression)       \
  BINARY_OF(name, i64, bool, long long, expression) \
  BINARY_OF(name, b8, bool, bool, expression)

UNARY(negative, -x)
UNARY(absolute, x < 0 ? -x : (x == 0 ? 0 : x))
UNARY(sign, x > 0 ? 1 : (x < 0 ? -1 : (x == 0 ? 0 : x)))
UNARY(square, x* x)
UNARY_FLOAT(floor, floor(x))
UNARY_FLOAT(exp, exp(x))
UNARY_FLOAT(log, log(x))
UNARY_FLOAT(log1p, log1p(x))
UNARY_FLOAT(expm1, expm1(x))
UNARY_FLOAT(sin, sin(x))
UNARY_FLOAT(cos, cos(x))
UNARY_FLOAT(sqrt, sqrt(x))
UNARY_FLOAT(tanh, tanh(x))
UNARY_FLOAT(erf, erf(x))
// Of the exponential's two forms the one that does not overflow.
UNARY_FLOAT(sigmoid, x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)))
UNARY_FLOAT(relu, x < 0 ? 0 : x)  // a NaN passes: it must not be hidden
UNARY_OF(logical_not, b8, bool, !x)
UNARY_FLOAT(round_to_bfloat16, widen(__float2bfloat16_rn((float)x)))
UNARY_OF(invert, i32, int, ~x)
UNARY_OF(invert, i64, long long, ~x)
UNARY_OF(invert, b8, bool, !x)
#define TEST(name, suffix, T, expression)                                      \
  KERNEL(256) name##_##suffix(bool* out, const T* a, long long n, Strided s) { \
    map1(out, a, n, s, [](T x) { return (bool)(expression); });                \
  }
#define TEST_FLOAT(name, expression) \
  TEST(name, f32, float, expression) \
  TEST(name, f64, double, expression)
TEST_FLOAT(isnan, x != x)
TEST_FLOAT(isinf, x == x && x - x != 0)
TEST_FLOAT(isfinite, x - x == 0)

BINARY(add, x + y)
BINARY(subtract, x - y)
BINARY(multiply, x* y)
BINARY(maximum, larger(x, y))
BINARY(minimum, smaller(x, y))
BINARY_FLOAT(divide, x / y)
BINARY_FLOAT(power, pow(x, y))
BINARY_FLOAT(relu_gradient, y > 0 ? x : 0)
BINARY_FLOAT(floor_divide, quotient(x, y))
BINARY_FLOAT(remainder, rest(x, y))
BINARY_WHOLE(floor_divide, whole_quotient(x, y))
BINARY_WHOLE(remainder, x - whole_quotient(x, y) * y)
BINARY_BITS(bitwise_and, x& y)
BINARY_BITS(bitwise_or, x | y)
BINARY_BITS(bitwise_xor, x ^ y)
BINARY_OF(logical_xor, b8, bool, bool, x != y)
BINARY_OF(logical_and, b8, bool, bool, x&& y)
BINARY_OF(logical_or, b8, bool, bool, x || y)
COMPARE(equal, x == y)
COMPARE(not_equal, x != y)
COMPARE(less, x < y)
COMPARE(less_equal, x <= y)
COMPARE(greater, x > y)
COMPARE(greater_equal, x >= y)

template <typename T>
__device__ inline void choose(T* __restrict__ out, const bool* __restrict__ c,
                              const T* __restrict__ a, const T* __restrict__ b, long long n,
                              const Strided& s) {
  for (long long i = first_index(); i < n; i += stride_of_grid()) {
    const Offsets from = offsets_of(s, i);
    out[i] = c[from.at[0]] ? a[from.at[1]] : b[from.at[2]];
  }
}
#define CHOOSE(suffix, T)                                                                 \
  KERNEL(256)                                                                             \
  where_##suffix(T* out, const bool* c, const T* a, const T* b, long long n, Strided s) { \
    choose(out, c, a, b, n, s);                                                           \
  }                                                                                       \
  KERNEL(256) clip_##suffix(T* out, const T* a, T low, T high, long long n, Strided s) {  \
    map1(out, a, n, s, [=](T x) { return smaller(larger(x, low), high); });               \
  }
CHOOSE(f32, float)
CHOOSE(f64, double)
CHOOSE(i32, int)
CHOOSE(i64, long long)
