#include "replay/tasks.h"

#include <algorithm>
#include <cstring>

namespace allreduce {
bool ChainTask::run(const std::vector<std::uintptr_t>& bases) const {
  const char* inputs[kMaxInputs];
  for (std::size_t i = 0; i < inputs_.size(); ++i) inputs[i] = inputs_[i].in(bases);
  chain_.run(out_.in(bases), inputs);
  return true;
}

template <class T>
ProductTask<T>::ProductTask(Product<T> product, std::vector<Axis> axes, Place out, Operand a,
                            Operand b)
    : Task(product.work() * times(axes)),
      product_(product),
      axes_(std::move(axes)),
      out_(out),
      a_(a),
      b_(b) {}

template <class T>
std::size_t ProductTask<T>::times(const std::vector<Axis>& axes) {
  std::size_t product = 1;
  for (const Axis& axis : axes) product *= axis.size;
  return product;
}

// Whether some matrix may be the other operand's, too.
template <class T>
bool ProductTask<T>::is_of_one(const char* a, const char* b) const {
  if (a == b) return true;
  const bool apart = a + a_.last <= b + b_.first || b + b_.last <= a + a_.first;
  return !apart &&
         std::any_of(axes_.begin(), axes_.end(), [](const Axis& axis) { return axis.a != axis.b; });
}

template <class T>
bool ProductTask<T>::run(const std::vector<std::uintptr_t>& bases) const {
  char* const out = out_.in(bases);
  const char *const a = a_.place.in(bases), *const b = b_.place.in(bases);
  if (is_of_one(a, b)) return false;
  for (std::size_t i = 0; i < times(axes_); ++i) {
    std::ptrdiff_t to = 0, left = 0, right = 0;
    std::size_t rest = i;
    for (std::size_t at = axes_.size(); at-- > 0; rest /= axes_[at].size) {
      const auto index = static_cast<std::ptrdiff_t>(rest % axes_[at].size);
      to += index * axes_[at].out;
      left += index * axes_[at].a;
      right += index * axes_[at].b;
    }
    product_.run(reinterpret_cast<T*>(out + to), reinterpret_cast<const T*>(a + left),
                 reinterpret_cast<const T*>(b + right), product_.rows());
  }
  return true;
}

template <class T>
EpilogueTask<T>::EpilogueTask(Product<T> product, Parts parts, std::size_t ops, Input out, Input a,
                              Place b, std::vector<Input> rest, bool in_place, std::size_t columns)
    : Task(product.work() + static_cast<std::size_t>(product.rows()) * columns * ops),
      product_(product),
      parts_(std::move(parts)),
      out_(out),
      a_(a),
      b_(b),
      rest_(std::move(rest)) {
  if (!in_place) made_.reset(new T[static_cast<std::size_t>(parts_.rows) * columns]);
}

template <class T>
bool EpilogueTask<T>::run(const std::vector<std::uintptr_t>& bases) const {
  if (a_.place.in(bases) == b_.in(bases)) return false;
  const char* inputs[kMaxInputs];
  for (std::int64_t first = 0; first < product_.rows(); first += parts_.rows) {
    const std::int64_t count = std::min(parts_.rows, product_.rows() - first);
    char* const here = out_.place.in(bases) + first * out_.down;
    T* const made = made_ ? made_.get() : reinterpret_cast<T*>(here);
    const char* const a = a_.place.in(bases) + first * a_.down;
    product_.run(made, reinterpret_cast<const T*>(a), reinterpret_cast<const T*>(b_.in(bases)),
                 count);
    inputs[0] = reinterpret_cast<const char*>(made);
    for (std::size_t i = 0; i < rest_.size(); ++i)
      inputs[i + 1] = rest_[i].place.in(bases) + first * rest_[i].down;
    (count == parts_.rows ? parts_.whole : *parts_.last).run(here, inputs);
  }
  return true;
}

template <class T>
bool ColumnSumsTask<T>::run(const std::vector<std::uintptr_t>& bases) const {
  blas<T>().gemv(Order::rows, Transpose::yes, static_cast<std::int64_t>(ones_.size()), columns_,
                 T(1), reinterpret_cast<const T*>(x_.in(bases)), columns_, ones_.data(), 1, T(0),
                 reinterpret_cast<T*>(out_.in(bases)), 1);
  return true;
}

bool ConstantTask::run(const std::vector<std::uintptr_t>& bases) const {
  std::memcpy(out_.in(bases), bytes_.data(), bytes_.size());
  return true;
}

template <class T>
bool LossTask<T>::run(const std::vector<std::uintptr_t>& bases) const {
  T* const out = reinterpret_cast<T*>(places_.out.in(bases));
  const T* const dy = reinterpret_cast<const T*>(places_.dy.in(bases));
  const char* const targets = places_.targets.in(bases);
  const T* const logits = reinterpret_cast<const T*>(places_.logits.in(bases));
  if (is_sparse_) {
    const auto* labels = reinterpret_cast<const std::int64_t*>(targets);
    const std::ptrdiff_t wrong =
        is_gradient_
            ? kernels_->sparse_cross_entropy_gradient(out, dy, labels, logits, rows_, columns_)
            : kernels_->sparse_cross_entropy(out, labels, logits, rows_, columns_);
    return wrong < 0;
  }
  const T* const shares = reinterpret_cast<const T*>(targets);
  if (is_gradient_)
    kernels_->cross_entropy_gradient(out, dy, shares, logits, rows_, columns_);
  else
    kernels_->cross_entropy(out, shares, logits, rows_, columns_);
  return true;
}

template <class T>
bool DropoutTask<T>::run(const std::vector<std::uintptr_t>& bases) const {
  const auto number = [&](const Place& place) {
    return *reinterpret_cast<const std::int64_t*>(place.in(bases));
  };
  const auto first_row =
      static_cast<std::uint64_t>(number(places_.row_offset) * plan_.rows_per_sample);
  const DropoutPlan plan = dropout_plan(plan_.rate, plan_.key, first_row,
                                        static_cast<std::uint64_t>(number(places_.step)));
  kernels_->dropout(reinterpret_cast<T*>(places_.out.in(bases)),
                    reinterpret_cast<const T*>(places_.x.in(bases)), plan_.rows, plan_.columns,
                    dropout_scale<T>(plan_.rate), plan);
  return true;
}

template class ProductTask<float>;
template class ProductTask<double>;
template class EpilogueTask<float>;
template class EpilogueTask<double>;
template class ColumnSumsTask<float>;
template class ColumnSumsTask<double>;
template class LossTask<float>;
template class LossTask<double>;
template class DropoutTask<float>;
template class DropoutTask<double>;

}  // namespace allreduce
