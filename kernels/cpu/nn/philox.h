// Random words that are a function of a counter and a key, and the dropout drawn from them.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
// section 3.3: Philox4x32 with 10 rounds. Only for files compiled once per KERNEL_LEVEL.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/nn/tensor_kernels.h"

namespace allreduce::KERNEL_LEVEL {
namespace {

constexpr std::uint32_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;
// Counters worked on side by side: one AVX-512 register of words.
constexpr std::size_t kSide = 16;

struct Words {
  std::uint32_t word[4][kSide];
};

// Replaces each lane's four words by random ones.
inline void randomize(Words& c, std::uint64_t key) {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round, k0 += kWeyl0, k1 += kWeyl1) {
    for (std::size_t i = 0; i < kSide; ++i) {
      const std::uint64_t p0 = std::uint64_t{kMultiply0} * c.word[0][i];
      const std::uint64_t p1 = std::uint64_t{kMultiply1} * c.word[2][i];
      c.word[0][i] = static_cast<std::uint32_t>(p1 >> 32) ^ c.word[1][i] ^ k0;
      c.word[1][i] = static_cast<std::uint32_t>(p1);
      c.word[2][i] = static_cast<std::uint32_t>(p0 >> 32) ^ c.word[3][i] ^ k1;
      c.word[3][i] = static_cast<std::uint32_t>(p0);
    }
  }
}

// An element's draw is a function of its place in its row, the row's global index and the step.
// Element e takes word (e % 64) / 16 of counter (16 * (e / 64) + e % 16, row, row >> 32, step):
// that way a whole register of neighbours is drawn and stored at once.
template <class T>
std::ptrdiff_t dropout(T* out, const void* const* inputs, std::size_t rows, std::size_t columns,
                       const RowNumber* numbers) {
  constexpr std::size_t kGroup = 4 * kSide;
  const T* x = static_cast<const T*>(inputs[0]);
  const double rate = numbers[0].real;
  const std::uint64_t key = numbers[1].whole;
  const std::uint64_t first_row = *static_cast<const std::uint64_t*>(inputs[1]) * numbers[2].whole;
  const auto step = static_cast<std::uint32_t>(*static_cast<const std::uint64_t*>(inputs[2]));
  // An element is kept if its word is at least the threshold, and is scaled up then.
  const auto threshold = static_cast<std::uint32_t>(rate * 4294967296.0);
  const T scale = static_cast<T>(1 / (1 - rate));
  for (std::size_t row = 0; row < rows; ++row) {
    const std::uint64_t global = first_row + row;
    for (std::size_t begin = 0; begin < columns; begin += kGroup) {
      Words c;
      for (std::size_t i = 0; i < kSide; ++i) {
        c.word[0][i] = static_cast<std::uint32_t>(begin / 4 + i);
        c.word[1][i] = static_cast<std::uint32_t>(global);
        c.word[2][i] = static_cast<std::uint32_t>(global >> 32);
        c.word[3][i] = step;
      }
      randomize(c, key);
      const std::uint32_t* draw = c.word[0];
      const T* from = x + row * columns + begin;
      T* to = out + row * columns + begin;
      const std::size_t used = columns - begin < kGroup ? columns - begin : kGroup;
      for (std::size_t e = 0; e < used; ++e) {
        const T scaled = from[e] * scale;
        to[e] = draw[e] >= threshold ? scaled : T(0);
      }
    }
  }
  return -1;
}

}  // namespace
}  // namespace allreduce::KERNEL_LEVEL
