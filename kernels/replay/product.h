// Matrix products as NumPy has BLAS compute them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "replay/blas.h"

namespace allreduce {

// How a matrix lies: its rows and columns, and bytes from one to the next.
struct Matrix {
  std::ptrdiff_t rows, columns, down, right;
};

// One call of `gemm`, for matrices of these layouts.
template <class T>
class Product {
 public:
  // None if NumPy would not call this function: vectors, empty arrays, or layouts that BLAS does
  // not take.
  static std::optional<Product> of(const Matrix& out, const Matrix& a, const Matrix& b);

  void run(T* out, const T* a, const T* b) const {
    blas<T>().gemm(Order::rows, transpose_a_, transpose_b_, rows_, columns_, inner_, T(1), a,
                   lead_a_, b, lead_b_, T(0), out, lead_out_);
  }

  std::size_t work() const { return static_cast<std::size_t>(rows_ * columns_ * inner_); }

 private:
  Transpose transpose_a_, transpose_b_;
  std::int64_t rows_, columns_, inner_, lead_a_, lead_b_, lead_out_;
};

}  // namespace allreduce
