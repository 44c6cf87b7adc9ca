// The BLAS that NumPy itself calls, so that products have its bits and its threads.
#pragma once

#include <cstdint>

namespace allreduce {

// CBLAS's numbers.
enum class Order : int { rows = 101, columns = 102 };
enum class Transpose : int { no = 111, yes = 112 };

// Integers of 64 bits also serve a library whose own have 32: on Linux each argument has a register
// or 8 bytes of the stack, of which that library reads the lower half. Sizes are kept below 2³¹.
template <class T>
struct Blas {
  using Gemm = void (*)(Order, Transpose, Transpose, std::int64_t, std::int64_t, std::int64_t, T,
                        const T*, std::int64_t, const T*, std::int64_t, T, T*, std::int64_t);
  using Gemv = void (*)(Order, Transpose, std::int64_t, std::int64_t, T, const T*, std::int64_t,
                        const T*, std::int64_t, T, T*, std::int64_t);
  Gemm gemm = nullptr;
  Gemv gemv = nullptr;
};

// Finds the functions in the dependencies of a loaded module of NumPy; without them BLAS is not
// called.
void find_blas(const char* module);

template <class T>
const Blas<T>& blas();

}  // namespace allreduce
