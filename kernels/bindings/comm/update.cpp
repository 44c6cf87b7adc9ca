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
class AdamUpdate : public TypedUpdate<T> {
 public:
  AdamUpdate(Array<const T> header, Array<T> m, Array<T> v) : m_(m.data()), v_(v.data()) {
    if (header.size() == 0 || m.size() != v.size())
      throw nb::value_error("arrays of different sizes");
    this->header_ = header.data();
    this->header_bytes = header.size() * sizeof(T);
    this->count_ = m.size();
  }
  void set(double learning_rate, double beta1, double beta2, double epsilon, double weight_decay,
           std::int64_t number) {
    step_ = adam_step<T>(learning_rate, beta1, beta2, epsilon, weight_decay, number);
  }
  void apply(std::byte* values, const std::byte* sums, std::uint64_t low,
             std::uint64_t count) const override {
    AdamStep<T> step = step_;
    step.count = *this->header_;
    tensor_kernels().of<T>().adam(reinterpret_cast<T*>(values), reinterpret_cast<const T*>(sums),
                                  m_ + low, v_ + low, step, count);
  }
  std::vector<const std::byte*> slots() const override {
    return {reinterpret_cast<const std::byte*>(m_), reinterpret_cast<const std::byte*>(v_)};
  }

 private:
  T *m_, *v_;
  AdamStep<T> step_{};
};

template <class T>
class SgdUpdate : public TypedUpdate<T> {
 public:
  SgdUpdate(Array<const T> header, Array<T> velocity) : velocity_(velocity.data()) {
    if (header.size() == 0) throw nb::value_error("an empty header");
    this->header_ = header.data();
    this->header_bytes = header.size() * sizeof(T);
    this->count_ = velocity.size();
  }
  void set(double learning_rate, double momentum, bool nesterov) {
    step_ = {T(0), static_cast<T>(learning_rate), static_cast<T>(momentum), nesterov};
  }
  void apply(std::byte* values, const std::byte* sums, std::uint64_t low,
             std::uint64_t count) const override {
    SgdStep<T> step = step_;
    step.count = *this->header_;
    tensor_kernels().of<T>().sgd(reinterpret_cast<T*>(values), reinterpret_cast<const T*>(sums),
                                 velocity_ + low, step, count);
  }
  std::vector<const std::byte*> slots() const override {
    return {reinterpret_cast<const std::byte*>(velocity_)};
  }

 private:
  T* velocity_;
  SgdStep<T> step_{};
};

template <class T>
class RuleUpdate : public TypedUpdate<T> {
 public:
  RuleUpdate(const std::string& rule, Array<const T> header, const std::vector<Array<T>>& slots)
      : run_(tensor_kernels().of<T>().rules[rule_of(rule)]), used_(slots.size()) {
    if (header.size() == 0 || slots.empty() || slots.size() > kMostRuleSlots)
      throw nb::value_error("an empty header, or no slots or too many");
    for (std::size_t i = 0; i < used_; ++i) {
      if (slots[i].size() != slots[0].size()) throw nb::value_error("arrays of different sizes");
      slots_[i] = slots[i].data();
    }
    this->header_ = header.data();
    this->header_bytes = header.size() * sizeof(T);
    this->count_ = slots[0].size();
  }
  void set(const std::vector<double>& numbers) { step_ = RuleStep<T>(numbers); }
  void apply(std::byte* values, const std::byte* sums, std::uint64_t low,
             std::uint64_t count) const override {
    RuleStep<T> step = step_;
    step.numbers[0] = *this->header_;
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
  RuleKernel<T> run_;
  std::size_t used_;
  T* slots_[kMostRuleSlots] = {};
  RuleStep<T> step_{};
};

template <class T>
void bind_typed(nb::module_& m, const char* adam, const char* sgd, const char* rule) {
  nb::class_<RuleUpdate<T>, Update>(m, rule).def("set", &RuleUpdate<T>::set, nb::arg("numbers"));
  m.def(
      "rule_update",
      [](const std::string& name, Array<const T> header, const std::vector<Array<T>>& slots) {
        return RuleUpdate<T>(name, header, slots);
      },
      nb::arg("rule"), nb::arg("header").noconvert(), nb::arg("slots"));
  nb::class_<AdamUpdate<T>, Update>(m, adam).def(
      "set", &AdamUpdate<T>::set, nb::arg("learning_rate"), nb::arg("beta1"), nb::arg("beta2"),
      nb::arg("epsilon"), nb::arg("weight_decay"), nb::arg("number"));
  m.def(
      "adam_update",
      [](Array<const T> header, Array<T> mean, Array<T> square) {
        return AdamUpdate<T>(header, mean, square);
      },
      "header"_array, "mean"_array, "square"_array);
  nb::class_<SgdUpdate<T>, Update>(m, sgd).def("set", &SgdUpdate<T>::set, nb::arg("learning_rate"),
                                               nb::arg("momentum"), nb::arg("nesterov"));
  m.def(
      "sgd_update",
      [](Array<const T> header, Array<T> velocity) { return SgdUpdate<T>(header, velocity); },
      "header"_array, "velocity"_array);
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
  bind_typed<float>(m, "AdamUpdate32", "SgdUpdate32", "RuleUpdate32");
  bind_typed<double>(m, "AdamUpdate64", "SgdUpdate64", "RuleUpdate64");
}

}  // namespace allreduce
