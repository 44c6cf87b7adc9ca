// The kernels of every instruction set: reductions for every operator and type against plain
// arithmetic, and copies.
//
// Usage: kernels_test. Prints "ok" and exits 0, or says what is wrong and exits 1.
#include <cmath>
#include <complex>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/reduce/reduce_kernels.h"
#include "reference.h"

using namespace allreduce;

namespace {

void check(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

std::string name_of(Level level) { return "level " + std::to_string(static_cast<int>(level)); }

// Any bits there are; for the larger floats rather numbers that round, and special ones.
template <class T>
T any(std::mt19937_64& random) {
  if constexpr (is_complex<T>) {
    using Part = typename T::value_type;
    const Part real = any<Part>(random);
    return {real, any<Part>(random)};
  } else if constexpr (std::is_floating_point_v<T>) {
    const T tiny = std::numeric_limits<T>::denorm_min();
    const T special[] = {0, T(-0.0), T(INFINITY), T(-INFINITY), T(NAN), tiny};
    if (random() % 8 == 0) return special[random() % 6];
    return static_cast<T>(static_cast<std::int64_t>(random() % 2000001) - 1000000) / T(7);
  } else {
    const std::uint64_t word = std::is_same_v<T, Bool> ? random() % 2 : random();
    T value{};
    if (random() % 4 != 0) std::memcpy(static_cast<void*>(&value), &word, sizeof(T));
    return value;
  }
}

// Reduces into memory that is `skip` elements off, and in place of the last input; returns the
// result, and checks that nothing around it was touched.
template <class T>
std::vector<T> reduced(Reduce reduce, std::vector<std::vector<T>> in, std::size_t skip) {
  const std::size_t count = in[0].size(), low = skip * sizeof(T), size = count * sizeof(T);
  std::vector<unsigned char> memory(low + size + 64, 0xEE);
  std::vector<const void*> sources;
  for (const auto& one : in) sources.push_back(one.data());
  void* outs[] = {memory.data() + low, in.back().data()};
  const int n = static_cast<int>(in.size());
  reduce(sources.data(), n, outs, 2, count, n);
  const std::vector<T> result = in.back();
  if (size != 0) check(std::memcmp(memory.data() + low, result.data(), size) == 0, "two outputs");
  for (std::size_t i = 0; i < memory.size(); ++i)
    check((i >= low && i < low + size) || memory[i] == 0xEE, "a reduction's bounds");
  return result;
}

template <class T>
void test_pair(Op op, Type type, const std::vector<std::vector<T>>& in) {
  const std::size_t count = in[0].size();
  std::vector<T> wanted(count);
  for (std::size_t i = 0; i < count && makes_sense<T>(op); ++i) {
    std::vector<T> values;
    for (const auto& one : in) values.push_back(one[i]);
    wanted[i] = expected(op, values);
  }
  for (Level level : kLevels) {
    const KernelTable* table = table_at<KernelTable>(level);
    if (table == nullptr) continue;
    const std::string what = name_of(level) + ": operator " + std::to_string(static_cast<int>(op)) +
                             ", type " + std::to_string(static_cast<int>(type)) + ", " +
                             std::to_string(in.size()) + " inputs, element ";
    const Reduce reduce = table->reduce[static_cast<int>(op)][static_cast<int>(type)];
    check((reduce != nullptr) == makes_sense<T>(op), what + "of any kind");
    if (reduce == nullptr) continue;
    const auto out = reduced(reduce, in, count % 3);
    for (std::size_t i = 0; i < count; ++i)
      if (!same(out[i], wanted[i])) check(false, what + std::to_string(i));
  }
}

template <class T>
void test_type(Type type) {
  check(size_of(type) == sizeof(T), "the size of a type");
  std::mt19937_64 random(7);
  for (std::size_t n : {1, 2, 3, 4, 7})
    for (std::size_t count : {0, 1, 2, 3, 7, 31, 64, 65, 127, 1003}) {
      std::vector<std::vector<T>> in(n, std::vector<T>(count));
      for (auto& one : in)
        for (T& value : one) value = any<T>(random);
      for (int op = 0; op < kOps; ++op) test_pair(static_cast<Op>(op), type, in);
    }
}

// Every 16-bit float comes through as it is, alone, but for a NaN, which stays some NaN; with
// itself a NaN, and nothing else, gives one.
template <class T>
void test_every_word(Type type) {
  std::vector<T> words(1 << 16), out(1 << 16);
  for (std::size_t i = 0; i < words.size(); ++i) words[i].word = static_cast<std::uint16_t>(i);
  for (Level level : kLevels) {
    const KernelTable* table = table_at<KernelTable>(level);
    if (table == nullptr) continue;
    const Reduce sum = table->reduce[static_cast<int>(Op::sum)][static_cast<int>(type)];
    const void* in[] = {words.data(), words.data()};
    void* outs[] = {out.data()};
    const auto changed = name_of(level) + " changes the word ";
    sum(in, 1, outs, 1, words.size(), 1);
    for (std::size_t i = 0; i < words.size(); ++i)
      if (nan(words[i]) ? !nan(out[i]) : out[i].word != words[i].word)
        check(false, changed + std::to_string(i));
    sum(in, 2, outs, 1, words.size(), 2);
    for (std::size_t i = 0; i < words.size(); ++i)
      if (nan(out[i]) != nan(words[i])) check(false, changed + std::to_string(i) + " twice");
  }
}

// The end of a chain has a sum of all others' inputs: a mean divides by more than it reads.
void test_divisor() {
  for (Level level : kLevels) {
    const KernelTable* table = table_at<KernelTable>(level);
    if (table == nullptr) continue;
    const std::complex<double> sum = {6, 0}, mine = {3, 0};
    std::complex<double> mean = {7, 7};
    const void* in[] = {&sum, &mine};
    void* outs[] = {&mean};
    const auto reduce =
        table->reduce[static_cast<int>(Op::mean)][static_cast<int>(Type::complex128)];
    reduce(in, 2, outs, 1, 1, 3);
    check(mean.real() == 3 && mean.imag() == 0, name_of(level) + ": the divisor of a mean");
  }
}

void test_copies() {
  for (Level level : kLevels) {
    const KernelTable* table = table_at<KernelTable>(level);
    if (table == nullptr) continue;
    std::vector<unsigned char> from(5000), to(5000), next(5000, 0x77), own(5000, 0x55);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 31);
    for (std::size_t low : {0, 1, 63, 64, 100})
      for (std::size_t size : {0, 1, 63, 64, 65, 256, 4000})
        for (int way = 0; way < 7; ++way) {
          std::vector<unsigned char> source = from;
          std::fill(to.begin(), to.end(), 0xEE);
          // As far into a cache line as the target.
          std::vector<unsigned char> beside(64 + 5000, 0xEE);
          const auto apart = reinterpret_cast<std::uintptr_t>(to.data()) -
                             reinterpret_cast<std::uintptr_t>(beside.data());
          unsigned char* kept = beside.data() + apart % 64 + low;
          void* target = to.data() + low;
          if (way == 0) table->copy(target, source.data() + 3, size);
          if (way == 1) table->stream_copy(target, source.data() + 3, size);
          if (way == 2) table->swap(target, source.data() + 3, nullptr, size);
          if (way == 3) table->swap(target, source.data() + 3, next.data() + low, size);
          if (way == 4)
            table->stream_swap(target, source.data() + 3, nullptr, nullptr, nullptr, size);
          if (way >= 5)
            table->stream_swap(target, source.data() + 3, next.data() + low, kept,
                               way == 6 ? own.data() : nullptr, size);
          check(std::memcmp(target, from.data() + 3, size) == 0, "a copy copies");
          check(to[low + size] == 0xEE && (low == 0 || to[low - 1] == 0xEE), "a copy's bounds");
          for (std::size_t i = 0; i < size; ++i)
            check(kept[i] == (way == 6 ? 0x55 : 0xEE), "what is copied beside");
          check(kept[size] == 0xEE && (low == 0 || kept[-1] == 0xEE), "the bounds beside");
          const unsigned char left = way == 2 || way == 4 ? 0 : 0x77;
          for (std::size_t i = 0; i < source.size(); ++i)
            check(source[i] == (way >= 2 && i >= 3 && i < 3 + size ? left : from[i]),
                  "what a copy leaves");
        }
  }
}

}  // namespace

int main() {
  test_type<float>(Type::float32);
  test_type<double>(Type::float64);
  test_type<Half>(Type::float16);
  test_type<Brain>(Type::bfloat16);
  test_type<std::int8_t>(Type::int8);
  test_type<std::int16_t>(Type::int16);
  test_type<std::int32_t>(Type::int32);
  test_type<std::int64_t>(Type::int64);
  test_type<std::uint8_t>(Type::uint8);
  test_type<std::uint16_t>(Type::uint16);
  test_type<std::uint32_t>(Type::uint32);
  test_type<std::uint64_t>(Type::uint64);
  test_type<Bool>(Type::boolean);
  test_type<std::complex<float>>(Type::complex64);
  test_type<std::complex<double>>(Type::complex128);
  test_every_word<Half>(Type::float16);
  test_every_word<Brain>(Type::bfloat16);
  test_divisor();
  test_copies();
  std::puts("ok");
  return 0;
}
