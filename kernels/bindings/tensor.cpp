// Python's view of the graph's kernels. Arrays are C-contiguous and of one dtype, float32 or
// float64; the first is written to. Shapes are the caller's to get right, lengths are checked here.
#include "bindings/tensor.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "cpu/nn/optimizer_steps.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

// Runs `work` without the interpreter's lock where there is enough of it.
template <class Work>
auto unlocked(std::size_t elements, Work work) {
  std::optional<nb::gil_scoped_release> released;
  if (elements >= kWorthUnlocking) released.emplace();
  return work();
}

template <class... Sizes>
std::size_t same_size(std::size_t size, Sizes... others) {
  if (((others != size) || ...)) throw nb::value_error("arrays of different sizes");
  return size;
}

struct Rows {
  std::size_t count, columns;
};

// Checks that `matrix` has one row for each element of the vectors.
template <class T>
Rows rows_of(const Array<T>& matrix, std::size_t count) {
  const std::size_t columns = matrix.ndim() ? matrix.shape(matrix.ndim() - 1) : 1;
  if (!columns) throw nb::value_error("rows without elements");
  same_size(matrix.size(), count * columns);
  return {count, columns};
}

// Cuts an array along its last axis.
template <class T>
Rows rows_of(const Array<T>& array) {
  const std::size_t columns = array.ndim() ? array.shape(array.ndim() - 1) : 1;
  return rows_of(array, columns ? array.size() / columns : 0);
}

template <class T>
void bind_erf(nb::module_& m) {
  m.def(
      "erf",
      [](Array<T> out, Array<const T> x) {
        const std::size_t n = same_size(out.size(), x.size());
        unlocked(n, [&] {
          std::transform(x.data(), x.data() + n, out.data(), [](T each) { return std::erf(each); });
        });
      },
      "out"_array, "x"_array);
}

template <class T>
void bind_losses(nb::module_& m) {
  m.def(
      "sparse_cross_entropy",
      [](Array<T> out, Array<const std::int64_t> labels, Array<const T> logits) {
        const Rows rows = rows_of(logits, same_size(out.size(), labels.size()));
        return unlocked(logits.size(), [&] {
          return tensor_kernels().of<T>().sparse_cross_entropy(
              out.data(), labels.data(), logits.data(), rows.count, rows.columns);
        });
      },
      "out"_array, "labels"_array, "logits"_array);
  m.def(
      "sparse_cross_entropy_gradient",
      [](Array<T> out, Array<const T> dy, Array<const std::int64_t> labels, Array<const T> logits) {
        const Rows rows = rows_of(logits, same_size(dy.size(), labels.size()));
        same_size(out.size(), logits.size());
        return unlocked(logits.size(), [&] {
          return tensor_kernels().of<T>().sparse_cross_entropy_gradient(
              out.data(), dy.data(), labels.data(), logits.data(), rows.count, rows.columns);
        });
      },
      "out"_array, "dy"_array, "labels"_array, "logits"_array);
  m.def(
      "cross_entropy",
      [](Array<T> out, Array<const T> targets, Array<const T> logits) {
        const Rows rows = rows_of(logits, out.size());
        same_size(logits.size(), targets.size());
        unlocked(logits.size(), [&] {
          tensor_kernels().of<T>().cross_entropy(out.data(), targets.data(), logits.data(),
                                                 rows.count, rows.columns);
        });
      },
      "out"_array, "targets"_array, "logits"_array);
  m.def(
      "cross_entropy_gradient",
      [](Array<T> out, Array<const T> dy, Array<const T> targets, Array<const T> logits) {
        const Rows rows = rows_of(logits, dy.size());
        same_size(logits.size(), targets.size(), out.size());
        unlocked(logits.size(), [&] {
          tensor_kernels().of<T>().cross_entropy_gradient(out.data(), dy.data(), targets.data(),
                                                          logits.data(), rows.count, rows.columns);
        });
      },
      "out"_array, "dy"_array, "targets"_array, "logits"_array);
}

template <class T>
void bind_rows(nb::module_& m) {
  m.def(
      "softmax",
      [](Array<T> out, Array<const T> x) {
        const Rows rows = rows_of(x);
        same_size(out.size(), x.size());
        unlocked(x.size(), [&] {
          tensor_kernels().of<T>().softmax(out.data(), x.data(), rows.count, rows.columns);
        });
      },
      "out"_array, "x"_array);
  m.def(
      "normalize",
      [](Array<T> out, Array<const T> x, double epsilon) {
        const Rows rows = rows_of(x);
        same_size(out.size(), x.size());
        unlocked(x.size(), [&] {
          tensor_kernels().of<T>().normalize(out.data(), x.data(), rows.count, rows.columns,
                                             static_cast<T>(epsilon));
        });
      },
      "out"_array, "x"_array, nb::arg("epsilon"));
  m.def(
      "normalize_gradient",
      [](Array<T> out, Array<const T> dy, Array<const T> x, Array<const T> y, double epsilon) {
        const Rows rows = rows_of(x);
        same_size(out.size(), dy.size(), x.size(), y.size());
        unlocked(x.size(), [&] {
          tensor_kernels().of<T>().normalize_gradient(out.data(), dy.data(), x.data(), y.data(),
                                                      rows.count, rows.columns,
                                                      static_cast<T>(epsilon));
        });
      },
      "out"_array, "dy"_array, "x"_array, "y"_array, nb::arg("epsilon"));
}

template <class T>
T only_element(const Array<const T>& array) {
  same_size(array.size(), std::size_t{1});
  return *array.data();
}

template <class T>
void bind_optimizers(nb::module_& m) {
  m.def(
      "sgd",
      [](Array<T> value, Array<const T> gradient, std::optional<Array<T>> velocity,
         Array<const T> count, double learning_rate, double momentum, bool nesterov) {
        const std::size_t n = same_size(value.size(), gradient.size());
        if (velocity) same_size(n, velocity->size());
        const SgdStep<T> step{only_element<T>(count), static_cast<T>(learning_rate),
                              static_cast<T>(momentum), nesterov};
        T* slot = velocity ? velocity->data() : nullptr;
        unlocked(
            n, [&] { tensor_kernels().of<T>().sgd(value.data(), gradient.data(), slot, step, n); });
      },
      "value"_array, "gradient"_array, "velocity"_array.none(), "count"_array,
      nb::arg("learning_rate"), nb::arg("momentum"), nb::arg("nesterov"));
  m.def(
      "adam",
      [](Array<T> value, Array<const T> gradient, Array<T> mean, Array<T> square,
         Array<const T> count, double learning_rate, double beta1, double beta2, double epsilon,
         std::int64_t step, double weight_decay) {
        const std::size_t n = same_size(value.size(), gradient.size(), mean.size(), square.size());
        if (step < 1) throw nb::value_error("the first step of Adam is number 1");
        AdamStep<T> plan = adam_step<T>(learning_rate, beta1, beta2, epsilon, weight_decay, step);
        plan.count = only_element<T>(count);
        unlocked(n, [&] {
          tensor_kernels().of<T>().adam(value.data(), gradient.data(), mean.data(), square.data(),
                                        plan, n);
        });
      },
      "value"_array, "gradient"_array, "mean"_array, "square"_array, "count"_array,
      nb::arg("learning_rate"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("epsilon"),
      nb::arg("step"), nb::arg("weight_decay") = 0.0);
  m.def(
      "apply_rule",
      [](const std::string& rule, Array<T> value, Array<const T> gradient,
         const std::vector<Array<T>>& slots, Array<const T> count,
         const std::vector<double>& numbers) {
        const std::size_t n = same_size(value.size(), gradient.size());
        T* at[kMostRuleSlots] = {};
        if (slots.size() > kMostRuleSlots) throw nb::value_error("too many slots");
        for (std::size_t i = 0; i < slots.size(); ++i) {
          same_size(n, slots[i].size());
          at[i] = slots[i].data();
        }
        RuleStep<T> step(numbers);
        step.numbers[0] = only_element<T>(count);
        const RuleKernel<T> run = tensor_kernels().of<T>().rules[rule_of(rule)];
        unlocked(n, [&] { run(value.data(), gradient.data(), at, step.numbers, n); });
      },
      nb::arg("rule"), "value"_array, "gradient"_array, nb::arg("slots"), "count"_array,
      nb::arg("numbers"));
}

template <class T>
void bind_dropout(nb::module_& m) {
  m.def(
      "dropout",
      [](Array<T> out, Array<const T> x, double rate, std::uint64_t key, std::uint64_t first_row,
         std::uint64_t step) {
        const std::size_t n = same_size(out.size(), x.size());
        if (!(rate >= 0 && rate < 1)) throw nb::value_error("the rate of a dropout is in [0, 1)");
        if (!n) return;
        const std::size_t rows = x.ndim() ? x.shape(0) : 1;
        const DropoutPlan plan = dropout_plan(rate, key, first_row, step);
        unlocked(n, [&] {
          tensor_kernels().of<T>().dropout(out.data(), x.data(), rows, n / rows,
                                           dropout_scale<T>(rate), plan);
        });
      },
      "out"_array, "x"_array, nb::arg("rate"), nb::arg("key"), nb::arg("first_row"),
      nb::arg("step"));
}

template <class T>
void bind_all(nb::module_& m) {
  bind_erf<T>(m);
  bind_losses<T>(m);
  bind_rows<T>(m);
  bind_optimizers<T>(m);
  bind_dropout<T>(m);
}

}  // namespace

void bind_tensor(nb::module_& m) {
  bind_all<float>(m);
  bind_all<double>(m);
}

}  // namespace allreduce
