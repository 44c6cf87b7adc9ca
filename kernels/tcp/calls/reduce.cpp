// Arrays of any members folded into one, by the kernels.
#include <algorithm>

#include "tcp/calls/execution.h"

namespace allreduce::tcp {
namespace {

// Zeros that change no number: x + -0 is x for every x, -0 itself too.
constexpr std::size_t kZeros = 4096;
template <class T>
const std::byte* negative_zeros() {
  static const std::vector<T> zeros(kZeros / sizeof(T), T(-0.0));
  return reinterpret_cast<const std::byte*>(zeros.data());
}

}  // namespace

void fold(Op op, Type type, const void* const* in, int n, void* out, std::uint64_t count, bool last,
          int members) {
  const Op folded = op == Op::mean && !last ? Op::sum : op;
  const Reduce reduce = kernels().reduce[static_cast<int>(folded)][static_cast<int>(type)];
  if (folded != Op::mean || n == members) return reduce(in, n, &out, 1, count);
  // The kernel divides by the number of its inputs: further ones add nothing.
  const std::byte* zeros =
      type == Type::float64 ? negative_zeros<double>() : negative_zeros<float>();
  const std::size_t element = size_of(type), step = kZeros / element;
  std::vector<const void*> inputs(static_cast<std::size_t>(members), zeros);
  for (std::uint64_t i = 0; i < count; i += step) {
    for (int k = 0; k < n; ++k)
      inputs[static_cast<std::size_t>(k)] = static_cast<const std::byte*>(in[k]) + i * element;
    void* target = static_cast<std::byte*>(out) + i * element;
    reduce(inputs.data(), members, &target, 1, std::min<std::uint64_t>(step, count - i));
  }
}

}  // namespace allreduce::tcp
