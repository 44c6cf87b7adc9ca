// Python's view of the kernels of tables' rows. Arrays are C-contiguous; lengths are checked here.
// What `group_numbers` has written is taken as it is.
#include <nanobind/ndarray.h>

#include "bindings/bindings.h"
#include "bindings/graph/tensor.h"
#include "cpu/nn/table_rows.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

template <class T>
using List = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Places = List<const std::int64_t>;

// `grouped` has a row for each group, `whole` one for each number.
template <class Grouped, class Whole>
RowGroups groups_of(const Places& starts, const Places& order, const Grouped& grouped,
                    const Whole& whole) {
  require(starts.size() == grouped.shape(0) + 1 && order.size() == whole.shape(0) &&
          grouped.shape(1) == whole.shape(1));
  return {starts.data(), order.data(), grouped.shape(0)};
}

template <class Number>
void bind_groups(nb::module_& m) {
  m.def(
      "group_numbers",
      [](List<const Number> numbers, List<Number> different, List<std::int64_t> order,
         List<std::int64_t> starts) {
        const std::size_t n = numbers.size();
        require(different.size() == n && order.size() == n && starts.size() == n + 1);
        return unlocked(n, [&] {
          return group_numbers(numbers.data(), n, different.data(), order.data(), starts.data());
        });
      },
      "numbers"_array, "different"_array, "order"_array, "starts"_array);
}

template <class T>
void bind_sums(nb::module_& m) {
  m.def(
      "add_rows",
      [](Places starts, Places order, Matrix<const T> rows, Matrix<T> sums) {
        const RowGroups groups = groups_of(starts, order, sums, rows);
        unlocked(rows.size(), [&] { add_rows(groups, rows.data(), rows.shape(1), sums.data()); });
      },
      "starts"_array, "order"_array, "rows"_array, "sums"_array);
}

void spread(Places starts, Places order, Matrix<const unsigned char> rows,
            Matrix<unsigned char> out) {
  const RowGroups groups = groups_of(starts, order, rows, out);
  unlocked(out.size(), [&] { spread_rows(groups, rows.data(), rows.shape(1), out.data()); });
}

}  // namespace

void bind_tables(nb::module_& m) {
  bind_groups<std::int32_t>(m);
  bind_groups<std::int64_t>(m);
  bind_sums<float>(m);
  bind_sums<double>(m);
  m.def("spread_rows", &spread, "starts"_array, "order"_array, "rows"_array, "out"_array);
}

}  // namespace allreduce
