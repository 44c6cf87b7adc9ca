// Dropout, with the draws of the CPU (kernels/cpu/nn/philox.h).
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
// section 3.3: Philox4x32 with 10 rounds. Bytes moved per element: 2 x its size; each thread draws
// the four words of a counter, and uses them for four elements that are 16 apart.
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

#define DROPOUT(suffix, T)                                                                      \
  extern "C" __global__ void dropout_##suffix(T* out, const T* x, const long long* row_offset,  \
                                              const long long* step, long long rows_per_sample, \
                                              long long rows, long long columns, double rate,   \
                                              unsigned long long key) {                         \
    dropout(out, x, row_offset, step, rows_per_sample, rows, columns, rate, key);               \
  }
DROPOUT(f32, float)
DROPOUT(f64, double)
DROPOUT(f16, __half)
DROPOUT(bf16, __nv_bfloat16)
