// Copies that read with strides (broadcast, transposed), casts, and fills.
//
// Bytes moved per element: copy 2 x its size, cast the sizes of both types, fill its size.
#include "common.cuh"
#include "strided.cuh"

template <typename T>
__device__ inline void copy_strided(T* __restrict__ out, const T* __restrict__ a, long long n,
                                    const Strided& s) {
  for (long long i = first_index(); i < n; i += stride_of_grid())
    out[i] = a[offsets_of(s, i).at[0]];
}
// To and from views of one shape: `s` has the source's strides, then the target's.
template <typename T>
__device__ inline void place_strided(T* __restrict__ out, const T* __restrict__ a, long long n,
                                     const Strided& s) {
  for (long long i = first_index(); i < n; i += stride_of_grid()) {
    const Offsets at = offsets_of(s, i);
    out[at.at[1]] = a[at.at[0]];
  }
}
template <typename T>
__device__ inline void fill(T* out, T value, long long n) {
  for (long long i = first_index(); i < n; i += stride_of_grid()) out[i] = value;
}

#define COPY(bytes, T)                                                    \
  KERNEL(256) copy_##bytes(T* out, const T* a, long long n, Strided s) {  \
    copy_strided(out, a, n, s);                                           \
  }                                                                       \
  KERNEL(256) place_##bytes(T* out, const T* a, long long n, Strided s) { \
    place_strided(out, a, n, s);                                          \
  }                                                                       \
  KERNEL(256) fill_##bytes(T* out, T value, long long n) { fill(out, value, n); }
COPY(1, unsigned char)
COPY(2, unsigned short)
COPY(4, unsigned)
COPY(8, unsigned long long)

// Conversions that C++ does not define, of floats to integers, are as NVIDIA's processors do them.
__device__ inline void convert(bool* to, float x) { *to = x != 0; }
__device__ inline void convert(bool* to, double x) { *to = x != 0; }
__device__ inline void convert(bool* to, int x) { *to = x != 0; }
__device__ inline void convert(bool* to, long long x) { *to = x != 0; }
template <typename To, typename From>
__device__ inline void convert(To* to, From x) {
  *to = (To)x;
}
__device__ inline void convert(__half* to, float x) { put(to, x); }
__device__ inline void convert(__nv_bfloat16* to, float x) { put(to, x); }
__device__ inline void convert(float* to, __half x) { *to = widen(x); }
__device__ inline void convert(float* to, __nv_bfloat16 x) { *to = widen(x); }

template <typename To, typename From>
__device__ inline void cast(To* __restrict__ out, const From* __restrict__ a, long long n,
                            const Strided& s) {
  for (long long i = first_index(); i < n; i += stride_of_grid())
    convert(out + i, a[offsets_of(s, i).at[0]]);
}

#define CAST(from, From, to, To)                                                   \
  KERNEL(256) cast_##from##_##to(To* out, const From* a, long long n, Strided s) { \
    cast(out, a, n, s);                                                            \
  }
#define CAST_BOTH(one, One, other, Other) \
  CAST(one, One, other, Other)            \
  CAST(other, Other, one, One)
CAST_BOTH(f32, float, f64, double)
CAST_BOTH(f32, float, i32, int)
CAST_BOTH(f32, float, i64, long long)
CAST_BOTH(f32, float, b8, bool)
CAST_BOTH(f64, double, i32, int)
CAST_BOTH(f64, double, i64, long long)
CAST_BOTH(f64, double, b8, bool)
CAST_BOTH(i32, int, i64, long long)
CAST_BOTH(i32, int, b8, bool)
CAST_BOTH(i64, long long, b8, bool)
CAST_BOTH(f32, float, u8, unsigned char)
// Narrow integers as indices and labels.
CAST(u8, unsigned char, i64, long long)
CAST(i8, signed char, i64, long long)
CAST(i16, short, i64, long long)
CAST(u16, unsigned short, i64, long long)
CAST(u32, unsigned, i64, long long)
CAST_BOTH(f32, float, f16, __half)
CAST_BOTH(f32, float, bf16, __nv_bfloat16)
