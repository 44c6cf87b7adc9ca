// A libcublas.so.12 with the products that the library calls, checked more strictly than the real.
//
// Matrices are column-major. A product runs on its handle's stream; half types are summed in
// float32, and rounded once. Fast products of float32 round their operands first, as tensor cores
// do. The math mode changes nothing here. The first product of a kind waits for the device, as the
// real one's kernels are loaded then; which products share kernels is not known, so none do here.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <type_traits>
#include <vector>

#include "standin.h"

namespace {

enum Status {
  kSuccess = 0,
  kNotInitialized = 1,
  kInvalidValue = 7,
  kExecutionFailed = 13,
  kNotSupported = 15
};
enum Compute { kInFloat32 = 68, kInFloat64 = 70, kFastBfloat16 = 75, kFastTf32 = 77 };
enum DataType { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBfloat16 = 14 };

struct Handle {
  int device;
  void* stream = nullptr;
  void* workspace = nullptr;
};

int refuse(int status, const char* why) {
  fprintf(stderr, "stand-in cuBLAS: %s\n", why);
  return status;
}

struct Bfloat16 {
  std::uint16_t bits;
};
float widen(float x) { return x; }
double widen(double x) { return x; }
float widen(_Float16 x) { return static_cast<float>(x); }
float widen(Bfloat16 x) {
  const std::uint32_t wide = std::uint32_t{x.bits} << 16;
  float f;
  memcpy(&f, &wide, 4);
  return f;
}
void narrow(float x, float* out) { *out = x; }
void narrow(double x, double* out) { *out = x; }
void narrow(float x, _Float16* out) { *out = static_cast<_Float16>(x); }
void narrow(float x, Bfloat16* out) {
  std::uint32_t u;
  memcpy(&u, &x, 4);
  out->bits = static_cast<std::uint16_t>(x != x ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}

std::size_t size_of(int type) {
  return type == kFloat64                        ? 8
         : type == kFloat32                      ? 4
         : type == kFloat16 || type == kBfloat16 ? 2
                                                 : 0;
}

struct Matrix {
  const void* address;
  int type, rows, columns;  // as they lie in memory
  long long leading, stride;
  std::size_t bytes(int batch) const {
    if (!rows || !columns || !batch) return 0;
    const long long last = stride * (batch - 1) + leading * (columns - 1) + rows;
    return static_cast<std::size_t>(last) * size_of(type);
  }
};

struct Product {
  int device, m, n, k, batch;
  bool is_a_transposed, is_b_transposed;
  Matrix a, b, c;
  double alpha, beta;
  int compute;
};

// Rounds to the nearest number whose mantissa lacks so many bits of float32's.
float shortened(float x, unsigned bits) {
  std::uint32_t u;
  memcpy(&u, &x, 4);
  if (x == x) u = (u + (1u << (bits - 1)) - 1 + (u >> bits & 1)) & ~((1u << bits) - 1);
  memcpy(&x, &u, 4);
  return x;
}
template <class T>
auto operand(T x, int compute) {
  const auto wide = widen(x);
  if constexpr (std::is_same_v<T, float>) {
    if (compute == kFastBfloat16) return shortened(wide, 16);
    if (compute == kFastTf32) return shortened(wide, 13);
  }
  return wide;
}

template <class In, class Out>
void multiply(const Product& p, const std::byte* a_bytes, const std::byte* b_bytes,
              std::byte* c_bytes) {
  using Wide = decltype(widen(In{}));
  const auto* a = reinterpret_cast<const In*>(a_bytes);
  const auto* b = reinterpret_cast<const In*>(b_bytes);
  auto* c = reinterpret_cast<Out*>(c_bytes);
  const long long a_row = p.is_a_transposed ? p.a.leading : 1;
  const long long a_inner = p.is_a_transposed ? 1 : p.a.leading;
  const long long b_inner = p.is_b_transposed ? p.b.leading : 1;
  const long long b_column = p.is_b_transposed ? 1 : p.b.leading;
  std::vector<Wide> sums(static_cast<std::size_t>(p.m));
  for (int column = 0; column < p.n; ++column) {
    std::fill(sums.begin(), sums.end(), Wide{0});
    for (int inner = 0; inner < p.k; ++inner) {
      const Wide factor = operand(b[inner * b_inner + column * b_column], p.compute);
      const In* from = a + inner * a_inner;
      for (int row = 0; row < p.m; ++row)
        sums[static_cast<std::size_t>(row)] += operand(from[row * a_row], p.compute) * factor;
    }
    for (int row = 0; row < p.m; ++row) {
      Out* at = c + row + column * p.c.leading;
      Wide value = static_cast<Wide>(p.alpha) * sums[static_cast<std::size_t>(row)];
      // With beta 0 the output is not read: it may be NaN.
      if (p.beta != 0) value += static_cast<Wide>(p.beta) * static_cast<Wide>(widen(*at));
      narrow(value, at);
    }
  }
}

template <class In, class Out>
void multiply_all(const Product& p, std::byte* a, std::byte* b, std::byte* c) {
  for (int i = 0; i < p.batch; ++i)
    multiply<In, Out>(p, a + i * p.a.stride * static_cast<long long>(sizeof(In)),
                      b + i * p.b.stride * static_cast<long long>(sizeof(In)),
                      c + i * p.c.stride * static_cast<long long>(sizeof(Out)));
}

int run(void* data) {
  std::unique_ptr<Product> p(static_cast<Product*>(data));
  std::byte* at[3] = {};
  const Matrix* all[] = {&p->a, &p->b, &p->c};
  for (int i = 0; i < 3; ++i) {
    void* found = nullptr;
    const std::size_t bytes = all[i]->bytes(p->batch);
    if (!bytes) continue;
    if (int wrong = standin_translate(p->device, all[i]->address, bytes, &found)) return wrong;
    at[i] = static_cast<std::byte*>(found);
  }
  const int in = p->a.type, out = p->c.type;
  if (in == kFloat32) multiply_all<float, float>(*p, at[0], at[1], at[2]);
  if (in == kFloat64) multiply_all<double, double>(*p, at[0], at[1], at[2]);
  if (in == kFloat16 && out == kFloat16) multiply_all<_Float16, _Float16>(*p, at[0], at[1], at[2]);
  if (in == kFloat16 && out == kFloat32) multiply_all<_Float16, float>(*p, at[0], at[1], at[2]);
  if (in == kBfloat16 && out == kBfloat16)
    multiply_all<Bfloat16, Bfloat16>(*p, at[0], at[1], at[2]);
  if (in == kBfloat16 && out == kFloat32) multiply_all<Bfloat16, float>(*p, at[0], at[1], at[2]);
  return 0;
}

int check(const Product& p, int compute) {
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0) return refuse(kInvalidValue, "a size below 0");
  for (const Matrix* x : {&p.a, &p.b, &p.c}) {
    if (x->leading < (x->rows > 1 ? x->rows : 1))
      return refuse(kInvalidValue, "a leading dimension below the number of rows");
    if (size_of(x->type) && reinterpret_cast<std::uintptr_t>(x->address) % size_of(x->type))
      return refuse(kInvalidValue, "a matrix is not aligned to its type");
    if (x->stride < 0) return refuse(kInvalidValue, "a stride below 0");
  }
  if (p.batch > 1 && p.c.stride < p.c.leading * p.c.columns && p.m && p.n)
    return refuse(kInvalidValue, "outputs of a batch overlap");
  const bool is_same = p.a.type == p.b.type && size_of(p.a.type);
  const bool is_double = p.a.type == kFloat64;
  const bool is_output = p.c.type == p.a.type || (size_of(p.a.type) == 2 && p.c.type == kFloat32);
  const bool is_fast = size_of(p.a.type) == 4 && (compute == kFastBfloat16 || compute == kFastTf32);
  const bool is_compute = is_double ? compute == kInFloat64 : compute == kInFloat32 || is_fast;
  if (!is_same || !is_output || !is_compute)
    return refuse(kNotSupported, "no such combination of types");
  return kSuccess;
}

// Loads the kernels for a product, unless an earlier one like it has done so.
void load_kernels(const Product& p) {
  static std::mutex mutex;
  static auto& loaded = *new std::set<std::vector<long long>>;
  std::vector<long long> key = {
      p.device,          p.m,       p.n,        p.k, p.batch, p.is_a_transposed,
      p.is_b_transposed, p.compute, p.beta != 0};
  for (const Matrix* x : {&p.a, &p.b, &p.c})
    key.insert(key.end(),
               {x->type, x->leading, x->stride,
                static_cast<long long>(reinterpret_cast<std::uintptr_t>(x->address) % 16)});
  {
    std::lock_guard lock(mutex);
    if (!loaded.insert(key).second) return;
  }
  const char* is_logged = getenv("STANDIN_LOG");
  if (is_logged && *is_logged == '1') fprintf(stderr, "stand-in cuBLAS: loads kernels\n");
  standin_await_device(p.device);
}

// The scalars have the compute type, and are read when the product is called.
int start(Handle* handle, int a_op, int b_op, int m, int n, int k, const void* alpha, Matrix a,
          Matrix b, const void* beta, Matrix c, int batch, int compute) {
  if (!handle) return kNotInitialized;
  if (a_op < 0 || a_op > 1 || b_op < 0 || b_op > 1)
    return refuse(kInvalidValue, "an operation other than N and T");
  a.rows = a_op ? k : m, a.columns = a_op ? m : k;
  b.rows = b_op ? n : k, b.columns = b_op ? k : n;
  c.rows = m, c.columns = n;
  const bool is_double = compute == kInFloat64;
  auto scalar = [=](const void* at) {
    return is_double ? *static_cast<const double*>(at)
                     : static_cast<double>(*static_cast<const float*>(at));
  };
  auto made =
      std::make_unique<Product>(Product{handle->device, m, n, k, batch, a_op == 1, b_op == 1, a, b,
                                        c, scalar(alpha), scalar(beta), compute});
  if (int wrong = check(*made, compute)) return wrong;
  if (standin_stream_device(handle->stream) != handle->device)
    return refuse(kExecutionFailed, "the handle's stream is of another device than the handle");
  if (!m || !n || !batch) return kSuccess;
  load_kernels(*made);
  return standin_enqueue(handle->stream, run, made.release()) ? kExecutionFailed : kSuccess;
}

}  // namespace

extern "C" {

int cublasCreate_v2(Handle** out) {
  const int device = standin_current_device();
  if (device < 0) return refuse(kNotInitialized, "no CUDA context on this thread");
  *out = new Handle{device};
  return kSuccess;
}

int cublasDestroy_v2(Handle* handle) {
  if (!handle) return kNotInitialized;
  standin_await_device(handle->device);
  delete handle;
  return kSuccess;
}

int cublasSetStream_v2(Handle* handle, void* stream) {
  if (!handle) return kNotInitialized;
  handle->stream = stream;  // and the workspace is the default again, as in the real one
  handle->workspace = nullptr;
  return kSuccess;
}

int cublasGetStream_v2(Handle* handle, void** stream) {
  if (!handle) return kNotInitialized;
  *stream = handle->stream;
  return kSuccess;
}

int cublasSetWorkspace_v2(Handle* handle, void* workspace, size_t bytes) {
  if (!handle) return kNotInitialized;
  void* found = nullptr;
  if (bytes && standin_translate(handle->device, workspace, bytes, &found))
    return refuse(kInvalidValue, "the workspace is not device memory");
  handle->workspace = workspace;
  return kSuccess;
}

int cublasSetMathMode(Handle* handle, int) { return handle ? kSuccess : kNotInitialized; }

int cublasGetVersion_v2(Handle*, int* version) {
  *version = 120900;
  return kSuccess;
}

const char* cublasGetStatusString(int status) {
  return status == kSuccess ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_ERROR";
}

int cublasGemmEx(Handle* handle, int a_op, int b_op, int m, int n, int k, const void* alpha,
                 const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                 const void* beta, void* c, int c_type, int ldc, int compute, int) {
  return start(handle, a_op, b_op, m, n, k, alpha, {a, a_type, 0, 0, lda, 0},
               {b, b_type, 0, 0, ldb, 0}, beta, {c, c_type, 0, 0, ldc, 0}, 1, compute);
}

int cublasGemmStridedBatchedEx(Handle* handle, int a_op, int b_op, int m, int n, int k,
                               const void* alpha, const void* a, int a_type, int lda,
                               long long a_stride, const void* b, int b_type, int ldb,
                               long long b_stride, const void* beta, void* c, int c_type, int ldc,
                               long long c_stride, int batch, int compute, int) {
  return start(handle, a_op, b_op, m, n, k, alpha, {a, a_type, 0, 0, lda, a_stride},
               {b, b_type, 0, 0, ldb, b_stride}, beta, {c, c_type, 0, 0, ldc, c_stride}, batch,
               compute);
}

int cublasSgemm_v2(Handle* handle, int a_op, int b_op, int m, int n, int k, const float* alpha,
                   const float* a, int lda, const float* b, int ldb, const float* beta, float* c,
                   int ldc) {
  return cublasGemmEx(handle, a_op, b_op, m, n, k, alpha, a, kFloat32, lda, b, kFloat32, ldb, beta,
                      c, kFloat32, ldc, 68, 0);
}

}  // extern "C"
