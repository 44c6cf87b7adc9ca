// Updates for Python: optimizers pass them to calls that update values while reducing.
#include "shm/update.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/graph/tensor.h"
#include "cpu/nn/optimizer_steps.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

template <class T>
class RuleUpdate : public TypedUpdate<T> {
 public:
  RuleUpdate(const std::string& rule, Array<const T> header, const std::vector<Array<T>>& slots)
      : rule_(rule), run_(rule_kernel<T>(rule, slots.size())), used_(slots.size()) {
    if (header.size() == 0 || slots.empty()) throw nb::value_error("an empty header, or no slots");
    for (std::size_t i = 0; i < used_; ++i) {
      if (slots[i].size() != slots[0].size()) throw nb::value_error("arrays of different sizes");
      slots_[i] = slots[i].data();
    }
    this->header_ = divisor_ = header.data();
    this->header_bytes = header.size() * sizeof(T);
    this->count_ = slots[0].size();
  }
  const std::string& rule() const { return rule_; }
  void set(const std::vector<double>& numbers) { step_ = RuleStep<T>(numbers); }
  void use_sums(Array<const T> divisor) {
    if (divisor.size() != 1) throw nb::value_error("gradients are divided by one number");
    divisor_ = divisor.data();
    this->stage = Update::Stage::values;
  }
  void apply(std::byte* values, const std::byte* sums, std::uint64_t low,
             std::uint64_t count) const override {
    RuleStep<T> step = step_;
    step.numbers[0] = *divisor_;
    T* at[kMostRuleSlots] = {};
    for (std::size_t i = 0; i < used_; ++i) at[i] = slots_[i] + low;
    run_(reinterpret_cast<T*>(values), reinterpret_cast<const T*>(sums), at, step.numbers, count);
  }
  std::vector<const std::byte*> slots() const override {
    std::vector<const std::byte*> found;
    for (std::size_t i = 0; i < used_; ++i)
      found.push_back(reinterpret_cast<const std::byte*>(slots_[i]));
    return found;
  }

 private:
  std::string rule_;
  RuleKernel<T> run_;
  std::size_t used_;
  T* slots_[kMostRuleSlots] = {};
  const T* divisor_ = nullptr;
  RuleStep<T> step_{};
};

template <class T>
void bind_typed(nb::module_& m, const char* type) {
  nb::class_<RuleUpdate<T>, Update>(m, type)
      .def_prop_ro("rule", &RuleUpdate<T>::rule)
      .def("set", &RuleUpdate<T>::set, nb::arg("numbers"))
      .def("use_sums", &RuleUpdate<T>::use_sums, "divisor"_array);
  m.def(
      "rule_update",
      [](const std::string& rule, Array<const T> header, const std::vector<Array<T>>& slots) {
        return RuleUpdate<T>(rule, header, slots);
      },
      nb::arg("rule"), "header"_array, nb::arg("slots"));
  m.def(
      "sum_update",
      [](Array<const T> gradients) {
        return SumUpdate(sizeof(T) == 4 ? Type::float32 : Type::float64, gradients.size());
      },
      "gradients"_array);
}

}  // namespace

void bind_updates(nb::module_& m) {
  nb::class_<Update>(m, "Update")
      .def(
          "expect",
          [](Update& update, nb::bytes sums, bool keeps) {
            if (sums.size() + size_of(update.type()) > update.header_bytes)
              throw nb::value_error("more bytes than the header has behind its first element");
            update.expected.assign(sums.c_str(), sums.size());
            update.keeps = keeps;
          },
          nb::arg("sums"), nb::arg("keeps"));
  nb::class_<SumUpdate, Update>(m, "SumUpdate");
  bind_typed<float>(m, "RuleUpdate32");
  bind_typed<double>(m, "RuleUpdate64");
}

}  // namespace allreduce
