// Updates of optimizers, fused: one pass over a range of an arena.
//
// Gradients are sums over samples; they are multiplied by 1 / *count, are 0 where it is 0, and are
// limited to -limit…limit, which may be infinite.
// Formulas are those of allreduce/optim. Bytes moved per element of float32: parameter and slots
// are read and written, the gradient is read: 12 + 8 x slots. Four elements at a time where all
// arrays are aligned to 16 bytes. LARS and LAMB read parameter and gradient (and LAMB the slots)
// once more, for their norms; a norm of all gradients reads 4, an average of parameters moves 12.
// Blocks of 256 threads, at least 2 in a multiprocessor: without that number the compiler aims at
// 8, and spills registers (NVRTC 12.9, sm_70 and sm_80).
#include "common.cuh"

template <typename T>
struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Four {
  T at[4];
};

__device__ inline bool is_aligned(const void* p) { return ((unsigned long long)p & 15) == 0; }

// What makes a mean of a sum over `count` samples, between -limit and limit; without samples it is
// 0, whatever the sum.
template <typename T>
struct Mean {
  T factor, limit;
  bool is_live;
};
template <typename T>
__device__ inline Mean<T> mean_of(T count, T limit) {
  return {1 / count, limit, count > 0};
}
template <typename T>
__device__ inline T scaled(T sum, const Mean<T>& mean) {
  if (!mean.is_live) return 0;
  return smaller(larger(sum * mean.factor, -mean.limit), mean.limit);
}

// Writes a block's two sums; reads the roots of all blocks' sums, of which there are at most as
// many as a block has threads. Their order is fixed.
struct Pair {
  double first, second;
};
__device__ inline void put_pair(double* sums, double first, double second) {
  __shared__ double part[32];
  first = block_sum(first, part);
  second = block_sum(second, part);
  if (threadIdx.x == 0) {
    sums[2 * blockIdx.x] = first;
    sums[2 * blockIdx.x + 1] = second;
  }
}
__device__ inline Pair norms_of(const double* sums, int parts) {
  __shared__ double part[32];
  const bool has_part = threadIdx.x < parts;
  const double first = block_sum(has_part ? sums[2 * threadIdx.x] : 0.0, part);
  const double second = block_sum(has_part ? sums[2 * threadIdx.x + 1] : 0.0, part);
  return {sqrt(first), sqrt(second)};
}

// Calls step(p, g, slots of element i) for all elements; `g` is the mean gradient.
template <typename T, int slots, typename Step>
__device__ inline void update(T* p, const T* g, T* const (&s)[slots], const T* count, T limit,
                              long long n, Step step) {
  const Mean<T> live = mean_of(*count, limit);
  bool has_fours = is_aligned(p) && is_aligned(g);
#pragma unroll
  for (int k = 0; k < slots; ++k) has_fours = has_fours && is_aligned(s[k]);
  const long long fours = has_fours ? n / 4 : 0;
  for (long long i = first_index(); i < fours; i += stride_of_grid()) {
    Four<T> P = ((Four<T>*)p)[i], S[slots];
    const Four<T> G = ((const Four<T>*)g)[i];
#pragma unroll
    for (int k = 0; k < slots; ++k) S[k] = ((Four<T>*)s[k])[i];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      T one[slots];
#pragma unroll
      for (int k = 0; k < slots; ++k) one[k] = S[k].at[e];
      step(P.at[e], scaled(G.at[e], live), one);
#pragma unroll
      for (int k = 0; k < slots; ++k) S[k].at[e] = one[k];
    }
    ((Four<T>*)p)[i] = P;
#pragma unroll
    for (int k = 0; k < slots; ++k) ((Four<T>*)s[k])[i] = S[k];
  }
  for (long long i = fours * 4 + first_index(); i < n; i += stride_of_grid()) {
    T value = p[i], one[slots];
#pragma unroll
    for (int k = 0; k < slots; ++k) one[k] = s[k][i];
    step(value, scaled(g[i], live), one);
    p[i] = value;
#pragma unroll
    for (int k = 0; k < slots; ++k) s[k][i] = one[k];
  }
}

#define OPTIMIZERS(suffix, T)                                                                      \
  KERNEL(256, 2)                                                                                   \
  sgd_##suffix(T* p, const T* g, const T* count, double limit, double rate, long long n) {         \
    const Mean<T> live = mean_of(*count, (T)limit);                                                \
    const T r = (T)rate;                                                                           \
    for (long long i = first_index(); i < n; i += stride_of_grid())                                \
      p[i] -= r * scaled(g[i], live);                                                              \
  }                                                                                                \
  KERNEL(256, 2)                                                                                   \
  momentum_##suffix(T* p, const T* g, T* v, const T* count, double limit, double rate,             \
                    double momentum, int nesterov, long long n) {                                  \
    const T r = (T)rate, keep = (T)momentum, ahead = nesterov ? keep : (T)1;                       \
    const T again = nesterov ? r : (T)0;                                                           \
    update<T, 1>(p, g, {v}, count, (T)limit, n, [=](T& value, T mean, T(&slot)[1]) {               \
      slot[0] = keep * slot[0] - r * mean;                                                         \
      value += ahead * slot[0] - again * mean;                                                     \
    });                                                                                            \
  }                                                                                                \
  KERNEL(256, 2)                                                                                   \
  adam_##suffix(T* p, const T* g, T* m, T* v, const T* count, double limit, double rate,           \
                double beta1, double beta2, double epsilon, double keep, long long n) {            \
    const T r = (T)rate, b1 = (T)beta1, c1 = (T)(1 - beta1), b2 = (T)beta2, c2 = (T)(1 - beta2),   \
            e = (T)epsilon, k = (T)keep;                                                           \
    update<T, 2>(p, g, {m, v}, count, (T)limit, n, [=](T& value, T mean, T(&slot)[2]) {            \
      slot[0] = b1 * slot[0] + c1 * mean;                                                          \
      slot[1] = b2 * slot[1] + c2 * (mean * mean);                                                 \
      value = k * value - r * slot[0] / (sqrt(slot[1]) + e);                                       \
    });                                                                                            \
  }                                                                                                \
  /* start: the initial accumulator value + epsilon */                                             \
  KERNEL(256, 2)                                                                                   \
  adagrad_##suffix(T* p, const T* g, T* accumulator, const T* count, double limit, double rate,    \
                   double start, long long n) {                                                    \
    const T r = (T)rate, first = (T)start;                                                         \
    update<T, 1>(p, g, {accumulator}, count, (T)limit, n, [=](T& value, T mean, T(&slot)[1]) {     \
      slot[0] += mean * mean;                                                                      \
      value -= r * mean / sqrt(slot[0] + first);                                                   \
    });                                                                                            \
  }                                                                                                \
  KERNEL(256, 2)                                                                                   \
  lion_##suffix(T* p, const T* g, T* m, const T* count, double limit, double rate, double beta1,   \
                double beta2, double decay, long long n) {                                         \
    const T r = (T)rate, b1 = (T)beta1, c1 = (T)(1 - beta1), b2 = (T)beta2, c2 = (T)(1 - beta2),   \
            d = (T)decay;                                                                          \
    update<T, 1>(p, g, {m}, count, (T)limit, n, [=](T& value, T mean, T(&slot)[1]) {               \
      const T x = b1 * slot[0] + c1 * mean;                                                        \
      value -= r * ((x > 0 ? 1 : (x < 0 ? -1 : x)) + d * value);                                   \
      slot[0] = b2 * slot[0] + c2 * mean;                                                          \
    });                                                                                            \
  }                                                                                                \
  /* mean and move are null where `centered` and momentum are not used */                          \
  KERNEL(256, 2)                                                                                   \
  rmsprop_##suffix(T* p, const T* g, T* square, T* mean, T* move, const T* count, double limit,    \
                   double rate, double rho, double momentum, double epsilon, long long n) {        \
    const T r = (T)rate, keep = (T)rho, rest = (T)(1 - rho), k = (T)momentum, e = (T)epsilon;      \
    const bool has_mean = mean, has_move = move;                                                   \
    const Mean<T> live = mean_of(*count, (T)limit);                                                \
    for (long long i = first_index(); i < n; i += stride_of_grid()) {                              \
      const T gradient = scaled(g[i], live);                                                       \
      const T squares = keep * square[i] + rest * (gradient * gradient);                           \
      square[i] = squares;                                                                         \
      T below = squares + e;                                                                       \
      if (has_mean) {                                                                              \
        const T average = keep * mean[i] + rest * gradient;                                        \
        mean[i] = average;                                                                         \
        below -= average * average;                                                                \
      }                                                                                            \
      T step = r * gradient / sqrt(below);                                                         \
      if (has_move) {                                                                              \
        step += k * move[i];                                                                       \
        move[i] = step;                                                                            \
      }                                                                                            \
      p[i] -= step;                                                                                \
    }                                                                                              \
  }                                                                                                \
  /* Of one variable. norms: pairs of sums of squares, of the parameters and of the gradient or */ \
  /* update, one of each block of this kernel. */                                                  \
  KERNEL(256, 2)                                                                                   \
  lars_norms_##suffix(const T* p, const T* g, const T* count, double* norms, double limit,         \
                      long long n) {                                                               \
    const Mean<T> live = mean_of(*count, (T)limit);                                                \
    double weights = 0, gradients = 0;                                                             \
    for (long long i = first_index(); i < n; i += stride_of_grid()) {                              \
      const double value = p[i], gradient = scaled(g[i], live);                                    \
      weights += value * value;                                                                    \
      gradients += gradient * gradient;                                                            \
    }                                                                                              \
    put_pair(norms, weights, gradients);                                                           \
  }                                                                                                \
  KERNEL(256, 2)                                                                                   \
  lars_##suffix(T* p, const T* g, T* velocity, const T* count, const double* norms, int parts,     \
                double limit, double rate, double momentum, double decay, double coefficient,      \
                long long n) {                                                                     \
    const Pair norm = norms_of(norms, parts);                                                      \
    const double trust = norm.first > 0 && norm.second > 0                                         \
                             ? coefficient * norm.first / (norm.second + decay * norm.first)       \
                             : 1;                                                                  \
    const T r = (T)(rate * trust), keep = (T)momentum, d = (T)decay;                               \
    update<T, 1>(p, g, {velocity}, count, (T)limit, n, [=](T& value, T mean, T(&slot)[1]) {        \
      slot[0] = keep * slot[0] + r * (mean + d * value);                                           \
      value -= slot[0];                                                                            \
    });                                                                                            \
  }                                                                                                \
  /* The moments' update, and the norms; fix1 and fix2 are 1 - beta ** step. */                    \
  KERNEL(256, 2)                                                                                   \
  lamb_norms_##suffix(const T* p, const T* g, T* m, T* v, const T* count, double* norms,           \
                      double limit, double beta1, double beta2, double epsilon, double decay,      \
                      double fix1, double fix2, long long n) {                                     \
    const Mean<T> live = mean_of(*count, (T)limit);                                                \
    const T b1 = (T)beta1, c1 = (T)(1 - beta1), b2 = (T)beta2, c2 = (T)(1 - beta2);                \
    double weights = 0, moves = 0;                                                                 \
    for (long long i = first_index(); i < n; i += stride_of_grid()) {                              \
      const T gradient = scaled(g[i], live);                                                       \
      m[i] = b1 * m[i] + c1 * gradient;                                                            \
      v[i] = b2 * v[i] + c2 * (gradient * gradient);                                               \
      const double value = p[i];                                                                   \
      const double move = m[i] / (T)fix1 / (sqrt(v[i] / (T)fix2) + (T)epsilon) + (T)decay * p[i];  \
      weights += value * value;                                                                    \
      moves += move * move;                                                                        \
    }                                                                                              \
    put_pair(norms, weights, moves);                                                               \
  }                                                                                                \
  KERNEL(256, 2)                                                                                   \
  lamb_##suffix(T* p, const T* m, const T* v, const double* norms, int parts, double rate,         \
                double epsilon, double decay, double fix1, double fix2, long long n) {             \
    const Pair norm = norms_of(norms, parts);                                                      \
    const T r = (T)(rate * (norm.first > 0 && norm.second > 0 ? norm.first / norm.second : 1));    \
    const T f1 = (T)fix1, f2 = (T)fix2, e = (T)epsilon, d = (T)decay;                              \
    for (long long i = first_index(); i < n; i += stride_of_grid())                                \
      p[i] -= r * (m[i] / f1 / (sqrt(v[i] / f2) + e) + d * p[i]);                                  \
  }                                                                                                \
  /* The moving average of parameters. */                                                          \
  KERNEL(256, 2)                                                                                   \
  average_##suffix(T* average, const T* p, double keep, long long n) {                             \
    const T k = (T)keep, rest = (T)(1 - keep);                                                     \
    for (long long i = first_index(); i < n; i += stride_of_grid())                                \
      average[i] = k * average[i] + rest * p[i];                                                   \
  }                                                                                                \
  /* Of all gradients: sums of squares, one of each block; and what to divide gradients by so */   \
  /* that the norm of their mean is `limit` at most: the count, or more. */                        \
  KERNEL(256, 2)                                                                                   \
  squares_##suffix(double* squares, const T* g, long long n) {                                     \
    double sum = 0;                                                                                \
    for (long long i = first_index(); i < n; i += stride_of_grid()) sum += (double)g[i] * g[i];    \
    put_pair(squares, sum, 0);                                                                     \
  }                                                                                                \
  KERNEL(256, 2)                                                                                   \
  divisor_##suffix(T* divisor, const T* count, const double* squares, int parts, double limit) {   \
    const double norm = norms_of(squares, parts).first, most = limit * (double)*count;             \
    if (threadIdx.x == 0)                                                                          \
      *divisor = norm > most && most > 0 ? (T)(*count * (norm / most)) : *count;                   \
  }
OPTIMIZERS(f32, float)
OPTIMIZERS(f64, double)
