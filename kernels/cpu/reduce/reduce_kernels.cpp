// Compiled once per instruction set, with KERNEL_LEVEL naming the namespace: no template of the
// standard library may be used here, or the linker could keep the AVX-512 copy for everyone.
#include "cpu/reduce/reduce_kernels.h"

#include "cpu/simd/copies.h"
#include "cpu/simd/formats.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

// Operators: how two values become one, in lanes of any type.
constexpr auto Sum = [](auto a, auto b) { return a + b; };
constexpr auto Prod = [](auto a, auto b) { return a * b; };
// A NaN on either side wins, as in numpy.minimum.
constexpr auto Min = [](auto a, auto b) { return a != a ? a : (a < b ? a : b); };
constexpr auto Max = [](auto a, auto b) { return a != a ? a : (a > b ? a : b); };
// True or false, to be made 1 or 0 by Truth.
constexpr auto Both = [](auto a, auto b) { return a != decltype(a){} ? b : a; };
constexpr auto Either = [](auto a, auto b) { return a != decltype(a){} ? a : b; };
constexpr auto And = [](auto a, auto b) { return a & b; };
constexpr auto Or = [](auto a, auto b) { return a | b; };
constexpr auto Xor = [](auto a, auto b) { return a ^ b; };

// Final steps, applied to the folded value: all are made with a divisor.
template <class T>
struct Keep {
  explicit Keep(int) {}
  template <class V>
  V operator()(V value) const {
    return value;
  }
};

template <class T>
struct Truth {
  explicit Truth(int) {}
  template <class V>
  V operator()(V value) const {
    return value != V{} ? V{} + T(1) : V{};
  }
};

// Divides. A power of two has an exact reciprocal, and a product with it rounds as the quotient
// does, at a fraction of the time.
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

// The fold of plain vectors and of pairs, and what follows it.
template <auto Fold, class V>
inline V fold(V a, V b) {
  return Fold(a, b);
}
template <auto Fold, std::size_t Bytes>
inline Pair<Bytes> fold(Pair<Bytes> x, Pair<Bytes> y) {
  return {Fold(x.a, y.a), Fold(x.b, y.b)};
}
template <class Finish, class V>
inline V finished(const Finish& finish, V value) {
  return finish(value);
}
template <class Finish, std::size_t Bytes>
inline Pair<Bytes> finished(const Finish& finish, Pair<Bytes> value) {
  return {finish(value.a), finish(value.b)};
}

// The pointers and counts of one call, in bytes.
template <class Finish>
struct Span {
  const unsigned char* const* in;
  int n;
  unsigned char* const* out;
  int m;
  std::size_t bytes;
  Finish finish;
};

// Reduces `Times` vectors of `Bytes` bytes that lie `at` into each array.
template <class Format, auto Fold, std::size_t Bytes, std::size_t Times, class Finish>
inline void step(const Span<Finish>& span, std::size_t at) {
  decltype(Format::template load<Bytes>(nullptr)) values[Times];
  for (std::size_t u = 0; u < Times; ++u)
    values[u] = Format::template load<Bytes>(span.in[0] + at + u * Bytes);
  for (int k = 1; k < span.n; ++k)
    for (std::size_t u = 0; u < Times; ++u)
      values[u] = fold<Fold>(values[u], Format::template load<Bytes>(span.in[k] + at + u * Bytes));
  for (std::size_t u = 0; u < Times; ++u) values[u] = finished(span.finish, values[u]);
  for (int j = 0; j < span.m; ++j)
    for (std::size_t u = 0; u < Times; ++u)
      Format::template store<Bytes>(span.out[j] + at + u * Bytes, values[u]);
}

// Reduces what is left, less than twice `Bytes`, in ever narrower vectors.
template <class Format, auto Fold, std::size_t Bytes, class Finish>
inline void tail(const Span<Finish>& span, std::size_t at) {
  if (at + Bytes <= span.bytes) {
    step<Format, Fold, Bytes, 1>(span, at);
    at += Bytes;
  }
  if constexpr (Bytes > Format::kSize) tail<Format, Fold, Bytes / 2>(span, at);
}

// Reduces the whole vectors of two inputs from `at` on, where they fit, into `Outs` outputs;
// returns how far it got. Pointers that stores might change are read for every step: 2 arrays into
// both, AVX2 (Zen 3), in the caches, 3.2 ns a line instead of 1.6.
template <class Format, auto Fold, std::size_t Outs, class Finish>
inline std::size_t pairs(const Span<Finish>& span, std::size_t at) {
  const Finish finish = span.finish;
  const unsigned char *const a = span.in[0], *const b = span.in[1];
  unsigned char* out[Outs];
  for (std::size_t j = 0; j < Outs; ++j) out[j] = span.out[j];
  constexpr std::size_t kTimes = kUnroll / Format::kVectors;
  for (const std::size_t end = span.bytes; at + kTimes * kWidth <= end; at += kTimes * kWidth) {
    decltype(Format::template load<kWidth>(nullptr)) values[kTimes];
    for (std::size_t u = 0; u < kTimes; ++u)
      values[u] = finished(finish, fold<Fold>(Format::template load<kWidth>(a + at + u * kWidth),
                                              Format::template load<kWidth>(b + at + u * kWidth)));
    for (std::size_t j = 0; j < Outs; ++j)
      for (std::size_t u = 0; u < kTimes; ++u)
        Format::template store<kWidth>(out[j] + at + u * kWidth, values[u]);
  }
  return at;
}

template <class Format, auto Fold, template <class> class Finish>
void reduce(const void* const* in, int n, void* const* out, int m, std::size_t count, int divisor) {
  const Span<Finish<typename Format::Lane>> span{reinterpret_cast<const unsigned char* const*>(in),
                                                 n,
                                                 reinterpret_cast<unsigned char* const*>(out),
                                                 m,
                                                 count * Format::kSize,
                                                 Finish<typename Format::Lane>(divisor)};
  constexpr std::size_t kTimes = kUnroll / Format::kVectors;
  std::size_t at = bytes_to_line(out[0], span.bytes);
  if (at % Format::kSize != 0) at = 0;
  Span head = span;
  head.bytes = at;
  tail<Format, Fold, kWidth / 2>(head, 0);
  if (n == 2 && m == 1) at = pairs<Format, Fold, 1>(span, at);
  if (n == 2 && m == 2) at = pairs<Format, Fold, 2>(span, at);
  for (; at + kTimes * kWidth <= span.bytes; at += kTimes * kWidth)
    step<Format, Fold, kWidth, kTimes>(span, at);
  for (; at + kWidth <= span.bytes; at += kWidth) step<Format, Fold, kWidth, 1>(span, at);
  tail<Format, Fold, kWidth / 2>(span, at);
}

// A complex number is two real ones to sums and means.
template <Reduce parts>
void complex(const void* const* in, int n, void* const* out, int m, std::size_t count,
             int divisor) {
  parts(in, n, out, m, 2 * count, divisor);
}

// A row of the table: an operator on the types that it makes sense on.
using Row = Reduce[kTypes];

constexpr Reduce& at(Row& row, Type type) { return row[static_cast<int>(type)]; }

template <auto Fold, template <class> class Finish>
constexpr void floats(Row& row) {
  at(row, Type::float64) = reduce<Plain<double>, Fold, Finish>;
  at(row, Type::float32) = reduce<Plain<float>, Fold, Finish>;
  at(row, Type::float16) = reduce<Float16, Fold, Finish>;
  at(row, Type::bfloat16) = reduce<BFloat16, Fold, Finish>;
}

template <auto Fold, template <class> class Finish>
constexpr void complexes(Row& row) {
  at(row, Type::complex64) = complex<reduce<Plain<float>, Fold, Finish>>;
  at(row, Type::complex128) = complex<reduce<Plain<double>, Fold, Finish>>;
}

template <auto Fold, template <class> class Finish>
constexpr void unsigned_integers(Row& row) {
  at(row, Type::uint8) = reduce<Plain<std::uint8_t>, Fold, Finish>;
  at(row, Type::uint16) = reduce<Plain<std::uint16_t>, Fold, Finish>;
  at(row, Type::uint32) = reduce<Plain<std::uint32_t>, Fold, Finish>;
  at(row, Type::uint64) = reduce<Plain<std::uint64_t>, Fold, Finish>;
}

// All integers as unsigned ones: for operators that give the same bits, and wrap.
template <auto Fold, template <class> class Finish>
constexpr void integers(Row& row) {
  unsigned_integers<Fold, Finish>(row);
  at(row, Type::int8) = at(row, Type::uint8);
  at(row, Type::int16) = at(row, Type::uint16);
  at(row, Type::int32) = at(row, Type::uint32);
  at(row, Type::int64) = at(row, Type::uint64);
}

template <auto Fold>
constexpr void arithmetic(Row& row) {
  floats<Fold, Keep>(row);
  integers<Fold, Keep>(row);
}

template <auto Fold>
constexpr void order(Row& row) {
  floats<Fold, Keep>(row);
  unsigned_integers<Fold, Keep>(row);
  at(row, Type::int8) = reduce<Plain<std::int8_t>, Fold, Keep>;
  at(row, Type::int16) = reduce<Plain<std::int16_t>, Fold, Keep>;
  at(row, Type::int32) = reduce<Plain<std::int32_t>, Fold, Keep>;
  at(row, Type::int64) = reduce<Plain<std::int64_t>, Fold, Keep>;
}

template <auto Fold>
constexpr void logical(Row& row) {
  floats<Fold, Truth>(row);
  integers<Fold, Truth>(row);
  at(row, Type::boolean) = at(row, Type::uint8);
}

template <auto Fold>
constexpr void bitwise(Row& row) {
  integers<Fold, Keep>(row);
  at(row, Type::boolean) = at(row, Type::uint8);
}

constexpr KernelTable make_table() {
  KernelTable made = {{}, copy, stream_copy, swap, stream_swap};
  const auto row = [&](Op op) -> Row& { return made.reduce[static_cast<int>(op)]; };
  arithmetic<Sum>(row(Op::sum));
  complexes<Sum, Keep>(row(Op::sum));
  floats<Sum, Divide>(row(Op::mean));
  complexes<Sum, Divide>(row(Op::mean));
  order<Min>(row(Op::min));
  order<Max>(row(Op::max));
  arithmetic<Prod>(row(Op::prod));
  logical<Both>(row(Op::logical_and));
  logical<Either>(row(Op::logical_or));
  bitwise<And>(row(Op::bitwise_and));
  bitwise<Or>(row(Op::bitwise_or));
  bitwise<Xor>(row(Op::bitwise_xor));
  return made;
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL

namespace allreduce {

template <>
constinit const KernelTable LevelTable<KernelTable, Level::KERNEL_LEVEL>::table =
    KERNEL_LEVEL::make_table();

}  // namespace allreduce
