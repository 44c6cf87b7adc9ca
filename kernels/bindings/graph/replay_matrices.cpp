// Tasks on matrices: products and sums of rows.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "bindings/graph/python_replay.h"
#include "replay/product.h"

namespace allreduce {
namespace {

// The matrix of an array's last two axes.
Matrix matrix_of(PyArrayObject* array) {
  const int axes = PyArray_NDIM(array);
  return {PyArray_DIM(array, axes - 2), PyArray_DIM(array, axes - 1),
          PyArray_STRIDE(array, axes - 2), PyArray_STRIDE(array, axes - 1)};
}

// Whether NumPy would see one matrix and its own transposed.
bool is_one(PyArrayObject* a, PyArrayObject* b) { return PyArray_DATA(a) == PyArray_DATA(b); }

// An axis that a product and both of its operands have: its size, and bytes from one matrix to the
// next.
struct Axis {
  std::size_t size;
  std::ptrdiff_t out, a, b;
};
using Axes = std::vector<Axis>;

struct Operand {
  Place place;
  std::ptrdiff_t first, last;  // how far it reaches, in bytes from its first element
};

Operand operand_of(PyArrayObject* array, Place place) {
  const auto [first, last] = extent_of(array);
  const auto address = reinterpret_cast<std::uintptr_t>(PyArray_DATA(array));
  return {place, static_cast<std::ptrdiff_t>(first - address),
          static_cast<std::ptrdiff_t>(last - address)};
}

// Whether some matrix may be the other operand's, too: NumPy goes another way there.
bool may_be_of_one(const Operand& x, const Operand& y, const char* a, const char* b,
                   const Axes& axes) {
  if (a == b) return true;
  const bool apart = a + x.last <= b + y.first || b + y.last <= a + x.first;
  return !apart &&
         std::any_of(axes.begin(), axes.end(), [](const Axis& axis) { return axis.a != axis.b; });
}

// Where the matrices of product number `i` begin, in bytes.
std::array<std::ptrdiff_t, 3> offsets_of(const Axes& axes, std::size_t i) {
  std::array<std::ptrdiff_t, 3> found{};
  for (std::size_t at = axes.size(); at-- > 0; i /= axes[at].size) {
    const auto index = static_cast<std::ptrdiff_t>(i % axes[at].size);
    found[0] += index * axes[at].out;
    found[1] += index * axes[at].a;
    found[2] += index * axes[at].b;
  }
  return found;
}

}  // namespace

bool PythonReplay::add_product(nb::handle out, nb::handle a, nb::handle b) {
  PyArrayObject *to = as_array(out), *left = as_array(a), *right = as_array(b);
  if (PyArray_NDIM(left) < 2 || PyArray_NDIM(right) < 2 || is_one(left, right)) return false;
  return for_floats(to, [&](auto zero) {
    using T = decltype(zero);
    if (!is_of<T>(left) || !is_of<T>(right)) return false;
    const auto product = Product<T>::of(matrix_of(to), matrix_of(left), matrix_of(right));
    if (!product) return false;
    Axes axes;
    for (int axis = 0; axis < PyArray_NDIM(to) - 2; ++axis) {
      const auto step = [&](PyArrayObject* array) -> std::ptrdiff_t {
        const int own = axis - (PyArray_NDIM(to) - PyArray_NDIM(array));
        return own < 0 ? 0 : stride_of(array, own);
      };
      const auto size = static_cast<std::size_t>(PyArray_DIM(to, axis));
      axes.push_back({size, step(to), step(left), step(right)});
    }
    std::size_t times = 1;
    for (const Axis& axis : axes) times *= axis.size;
    const Operand x = operand_of(left, place(left)), y = operand_of(right, place(right));
    replay_.add(product->work() * times,
                [=, product = *product, made = place(to)](const Bases& bases) {
                  const char *const from = x.place.in(bases), *const by = y.place.in(bases);
                  if (may_be_of_one(x, y, from, by, axes)) return false;
                  for (std::size_t i = 0; i < times; ++i) {
                    const auto [at, first, second] = offsets_of(axes, i);
                    product.run(reinterpret_cast<T*>(made.in(bases) + at),
                                reinterpret_cast<const T*>(from + first),
                                reinterpret_cast<const T*>(by + second));
                  }
                  return true;
                });
    return true;
  });
}

// The sum of a matrix's rows, as a product with ones.
bool PythonReplay::add_column_sums(nb::handle out, nb::handle x) {
  PyArrayObject *to = as_array(out), *from = as_array(x);
  const int axes = PyArray_NDIM(from);
  if (PyArray_NDIM(to) != 1 || axes < 2 || PyArray_DIM(from, axes - 1) != PyArray_DIM(to, 0))
    return false;
  return for_floats(to, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t columns = PyArray_DIM(to, 0),
                       rows = PyArray_SIZE(from) / std::max<std::int64_t>(columns, 1);
    const bool fits = is_of<T>(from) && is_contiguous(to) && is_contiguous(from);
    if (!fits || !blas<T>().gemv || rows < 2 || columns < 2 || (rows | columns) >> 31) return false;
    const std::vector<T> ones(static_cast<std::size_t>(rows), T(1));
    const Place sums = place(to), matrix = place(from);
    replay_.add(static_cast<std::size_t>(rows * columns), [=](const Bases& bases) {
      blas<T>().gemv(Order::rows, Transpose::yes, rows, columns, T(1), matrix.in<const T>(bases),
                     columns, ones.data(), 1, T(0), sums.in<T>(bases), 1);
      return true;
    });
    return true;
  });
}

}  // namespace allreduce
