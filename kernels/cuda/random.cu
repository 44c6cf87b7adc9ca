// Random numbers: dropout with the draws of the CPU (kernels/cpu/nn/philox.h), and uniform and
// normal deviates with those of NumPy's Philox.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
// section 3.3: Philox4x32 and Philox4x64 with 10 rounds; Box and Muller, "A note on the
// generation of random normal deviates" (1958). Bytes moved per element: deviates its size, dropout
// 2 x its size; there each thread draws the four words of a counter, and uses them for four
// elements that are 16 apart.
#include "common.cuh"

struct Words {
  unsigned word[4];
};

__device__ inline Words philox(Words c, unsigned long long key) {
  unsigned k0 = (unsigned)key, k1 = (unsigned)(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long p0 = 0xD2511F53ull * c.word[0], p1 = 0xCD9E8D57ull * c.word[2];
    c = {{(unsigned)(p1 >> 32) ^ c.word[1] ^ k0, (unsigned)p1,
          (unsigned)(p0 >> 32) ^ c.word[3] ^ k1, (unsigned)p0}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Element e of a row takes word (e % 64) / 16 of counter (16 * (e / 64) + e % 16, row, row >> 32,
// step); rows count through all replicas.
template <typename T>
__device__ inline void dropout(T* __restrict__ out, const T* __restrict__ x,
                               const long long* row_offset, const long long* step,
                               long long rows_per_sample, long long rows, long long columns,
                               double rate, unsigned long long key) {
  const unsigned threshold = (unsigned)(rate * 4294967296.0);
  const auto scale = (decltype(widen(*x)))(1 / (1 - rate));
  const unsigned long long first_row = (unsigned long long)(*row_offset * rows_per_sample);
  const unsigned number = (unsigned)*step;
  const long long per_row = (columns + 63) / 64 * 16;  // counters
  for (long long i = first_index(); i < rows * per_row; i += stride_of_grid()) {
    const long long row = i / per_row, counter = i % per_row;
    const unsigned long long global = first_row + (unsigned long long)row;
    const Words drawn =
        philox({{(unsigned)counter, (unsigned)global, (unsigned)(global >> 32), number}}, key);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const long long column = counter / 16 * 64 + w * 16 + counter % 16;
      if (column >= columns) continue;
      const long long at = row * columns + column;
      const auto scaled = widen(x[at]) * scale;
      put(out + at, drawn.word[w] >= threshold ? scaled : (decltype(scaled))0);
    }
  }
}

#define DROPOUT(suffix, T)                                                                    \
  KERNEL(256)                                                                                 \
  dropout_##suffix(T* out, const T* x, const long long* row_offset, const long long* step,    \
                   long long rows_per_sample, long long rows, long long columns, double rate, \
                   unsigned long long key) {                                                  \
    dropout(out, x, row_offset, step, rows_per_sample, rows, columns, rate, key);             \
  }
DROPOUT(f32, float)
DROPOUT(f64, double)
DROPOUT(f16, __half)
DROPOUT(bf16, __nv_bfloat16)

// Philox4x64 of the counter (block, 0, 0, 0); gives one of its four words.
__device__ inline unsigned long long wide_word(unsigned long long block, int word,
                                               unsigned long long key, unsigned long long step) {
  unsigned long long c[4] = {block, 0, 0, 0};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
    const unsigned long long high0 = __umul64hi(m0, c[0]), low0 = m0 * c[0];
    const unsigned long long high1 = __umul64hi(m1, c[2]), low1 = m1 * c[2];
    c[0] = high1 ^ c[1] ^ key;
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ step;
    c[3] = low0;
    key += 0x9E3779B97F4A7C15ull;
    step += 0xBB67AE8584CAA73Bull;
  }
  return word == 0 ? c[0] : word == 1 ? c[1] : word == 2 ? c[2] : c[3];
}
// The number of that place in the stream of NumPy's generator, in [0, 1): it counts before it
// draws.
__device__ inline double drawn(unsigned long long place, unsigned long long key,
                               unsigned long long step) {
  return (wide_word(place / 4 + 1, (int)(place % 4), key, step) >> 11) * (1.0 / 9007199254740992.0);
}

// `unit` elements belong to each row that *row_offset counts.
template <typename T>
__device__ inline void uniform(T* __restrict__ out, const long long* row_offset,
                               const long long* step, long long unit, long long n, double low,
                               double width, double most, unsigned long long key) {
  const unsigned long long first = (unsigned long long)(*row_offset * unit);
  for (long long i = first_index(); i < n; i += stride_of_grid()) {
    const T value = (T)(low + drawn(first + i, key, *step) * width);
    out[i] = value < (T)most ? value : (T)most;
  }
}
template <typename T>
__device__ inline void normal(T* __restrict__ out, const long long* row_offset,
                              const long long* step, long long unit, long long n, double mean,
                              double deviation, unsigned long long key) {
  const unsigned long long first = 2 * (unsigned long long)(*row_offset * unit);
  for (long long i = first_index(); i < n; i += stride_of_grid()) {
    const double radius = sqrt(-2 * log1p(-drawn(first + 2 * i, key, *step)));
    const double angle = 2 * 3.141592653589793 * drawn(first + 2 * i + 1, key, *step);
    out[i] = (T)(mean + deviation * (radius * cos(angle)));
  }
}
#define DRAW(suffix, T)                                                                          \
  KERNEL(256)                                                                                    \
  uniform_##suffix(T* out, const long long* row_offset, const long long* step, long long unit,   \
                   long long n, double low, double width, double most, unsigned long long key) { \
    uniform(out, row_offset, step, unit, n, low, width, most, key);                              \
  }                                                                                              \
  KERNEL(256)                                                                                    \
  normal_##suffix(T* out, const long long* row_offset, const long long* step, long long unit,    \
                  long long n, double mean, double deviation, unsigned long long key) {          \
    normal(out, row_offset, step, unit, n, mean, deviation, key);                                \
  }
DRAW(f32, float)
DRAW(f64, double)
