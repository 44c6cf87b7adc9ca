// Python's view of the graph's kernels. Arrays are C-contiguous and of one dtype, float32 or
// float64; the first is written to. Shapes are the caller's to get right, lengths are checked here.
#include "bindings/graph/tensor.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/graph/rows.h"
#include "cpu/nn/optimizer_steps.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

template <class... Sizes>
std::size_t same_size(std::size_t size, Sizes... others) {
  if (((others != size) || ...)) throw nb::value_error("arrays of different sizes");
  return size;
}

// Runs a row operator; returns the first row that it refuses, or -1.
template <class T>
Py_ssize_t run_rows_of(const std::string& name, PyArrayObject* out, const Arrays& inputs,
                       const nb::list& numbers) {
  BoundRows<T> bound;
  if (const char* wrong = bind_rows<T>(name, out, inputs, numbers, bound))
    throw nb::value_error((name + ": " + wrong).c_str());
  const void* from[kMostRowInputs];
  for (std::size_t i = 0; i < inputs.size(); ++i) from[i] = PyArray_DATA(inputs[i]);
  return unlocked(bound.rows * bound.columns,
                  [&] { return bound.run(static_cast<T*>(PyArray_DATA(out)), from); });
}

Py_ssize_t run_rows(const std::string& name, nb::handle out, const nb::list& inputs,
                    const nb::list& numbers) {
  PyArrayObject* to = as_array(out);
  Py_ssize_t refused = -1;
  if (!for_floats(to, [&](auto zero) {
        refused = run_rows_of<decltype(zero)>(name, to, arrays_of(inputs), numbers);
        return true;
      }))
    throw nb::value_error((name + ": the result has to be float32 or float64").c_str());
  return refused;
}

// Names the settings of each row operator.
nb::dict row_operators() {
  nb::dict found;
  for (const RowOperator<float>& each : tensor_kernels().of<float>().rows) {
    nb::list numbers;
    for (const char* number : each.numbers)
      if (number) numbers.append(number);
    found[each.name] = numbers;
  }
  return found;
}

template <class T>
void bind_optimizers(nb::module_& m) {
  m.def(
      "apply_rule",
      [](const std::string& rule, Array<T> value, Array<const T> gradient,
         const std::vector<Array<T>>& slots, Array<const T> count,
         const std::vector<double>& numbers) {
        const std::size_t n = same_size(value.size(), gradient.size());
        const RuleKernel<T> run = rule_kernel<T>(rule, slots.size());
        T* at[kMostRuleSlots] = {};
        for (std::size_t i = 0; i < slots.size(); ++i) {
          same_size(n, slots[i].size());
          at[i] = slots[i].data();
        }
        RuleStep<T> step(numbers);
        same_size(count.size(), std::size_t{1});
        step.numbers[0] = *count.data();
        unlocked(n, [&] { run(value.data(), gradient.data(), at, step.numbers, n); });
      },
      nb::arg("rule"), "value"_array, "gradient"_array, nb::arg("slots"), "count"_array,
      nb::arg("numbers"));
}

}  // namespace

void bind_tensor(nb::module_& m) {
  m.def("row_operators", &row_operators);
  m.def("run_rows", &run_rows, nb::arg("name"), nb::arg("out"), nb::arg("inputs"),
        nb::arg("numbers") = nb::list());
  bind_optimizers<float>(m);
  bind_optimizers<double>(m);
}

}  // namespace allreduce
