#include "replay/product.h"

namespace allreduce {
namespace {

constexpr std::ptrdiff_t kMost = (std::ptrdiff_t{1} << 31) - 2;

// Whether BLAS takes it as rows one behind the other, which may be apart but not overlap.
bool is_by_rows(const Matrix& matrix, std::ptrdiff_t size) {
  return matrix.right == size && matrix.down % size == 0 && matrix.down / size >= matrix.columns &&
         matrix.down / size <= kMost;
}

Matrix transposed(const Matrix& matrix) {
  return {matrix.columns, matrix.rows, matrix.right, matrix.down};
}

struct Reading {
  Transpose transpose;
  std::int64_t lead;
};

std::optional<Reading> reading_of(const Matrix& matrix, std::ptrdiff_t size) {
  if (is_by_rows(matrix, size)) return Reading{Transpose::no, matrix.down / size};
  if (is_by_rows(transposed(matrix), size)) return Reading{Transpose::yes, matrix.right / size};
  return std::nullopt;
}

}  // namespace

template <class T>
std::optional<Product<T>> Product<T>::of(const Matrix& out, const Matrix& a, const Matrix& b) {
  const auto size = static_cast<std::ptrdiff_t>(sizeof(T));
  for (const std::ptrdiff_t each : {a.rows, a.columns, b.columns})
    if (each < 2 || each > kMost) return std::nullopt;
  const std::optional<Reading> left = reading_of(a, size), right = reading_of(b, size);
  if (!blas<T>().gemm || !left || !right || !is_by_rows(out, size)) return std::nullopt;
  Product product;
  product.transpose_a_ = left->transpose;
  product.transpose_b_ = right->transpose;
  product.rows_ = a.rows;
  product.columns_ = b.columns;
  product.inner_ = a.columns;
  product.lead_a_ = left->lead;
  product.lead_b_ = right->lead;
  product.lead_out_ = out.down / size;
  return product;
}

template class Product<float>;
template class Product<double>;

}  // namespace allreduce
