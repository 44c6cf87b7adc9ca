// Chains of element-wise operations, executed tile by tile: intermediate values never leave the
// level-1 cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace allreduce {

enum class Scalar : std::uint8_t { boolean, int32, int64, float32, float64 };

enum class ElementwiseOp : std::uint8_t {
  add,
  subtract,
  multiply,
  divide,
  maximum,
  minimum,
  negative,
  absolute,
  sign,
  square,
  sqrt,
  relu,
  relu_gradient,
  less,
  less_equal,
  greater,
  greater_equal,
  equal,
  not_equal,
  logical_and,
  logical_or,
  logical_xor,
  logical_not,
  isfinite,
  isnan,
  isinf,
  where,
  cast,
  copy,
};

// Computes `n` elements; `out` may be one of the operands, and overlaps none otherwise.
using ElementwiseKernel = void (*)(void* out, const void* a, const void* b, const void* c,
                                   std::size_t n);

// An operation on the previous operation's value and another operand; `is_right`: the previous
// value is the right operand; `repeats`: the other operand is one element.
struct FusedOp {
  ElementwiseOp op;
  bool is_right, repeats;
  const void* other;
};

// Executes sums, differences, products and quotients of floats one after the other, the first on
// `x`. If `streams`, `out` is aligned to a cache line, overlaps no operand, and is written past the
// caches.
using FusedKernel = void (*)(void* out, const void* x, const FusedOp* ops, std::size_t count,
                             std::size_t n, bool streams);

struct ElementwiseKernels {
  // The kernel of an operation on operands of type `in` (all but the condition of `where`), or
  // null.
  ElementwiseKernel (*find)(ElementwiseOp op, Scalar in, Scalar out);
  // The kernel that fuses operations of this kind, or null.
  FusedKernel (*find_fused)(ElementwiseOp op, Scalar type);
  // Copies past the caches; `fence` orders such stores before all that follow.
  void (*stream)(void* to, const void* from, std::size_t bytes);
  void (*fence)();
};

constexpr int kMaxReads = 3;
// Operations of one fused kernel.
constexpr std::size_t kMaxFusedOps = 16;
// Inputs of a chain; longer ones are not fused. Their addresses are put on the stack.
constexpr std::size_t kMaxInputs = 2048;

// One operation. It reads inputs by their number, and earlier operations by -1 - theirs. Its value
// is stored in a scratch slot; the last one's in the result.
struct ChainOp {
  ElementwiseOp op;
  Scalar in, out;
  int count;
  int reads[kMaxReads];
  int slot;
};

struct Chain {
  std::vector<ChainOp> ops;
  std::vector<Scalar> inputs;
};

std::size_t size_of(Scalar type);

// A chain bound to shapes and strides; only addresses may change from run to run.
class BoundChain {
 public:
  // The result is C-contiguous, of this shape; an input's strides are 0 where it is repeated.
  BoundChain(const Chain& chain, const ElementwiseKernels& kernels, std::vector<std::size_t> shape,
             std::vector<std::vector<std::ptrdiff_t>> strides);

  // `out` may be an input of the same type that is not repeated, if the last operation can work in
  // place or does not read it.
  void run(char* out, const char* const* inputs) const;

  std::size_t elements() const { return elements_; }

 private:
  enum class Way : std::uint8_t { direct, once, anew };
  struct Source {
    std::size_t size;  // of an element
    std::vector<std::ptrdiff_t> strides;
    Way way;
    bool repeated = false;
    std::size_t tile = 0;  // offset of its copy in scratch memory, if it is not read directly
    bool whole = false;    // whether that is a whole tile, or one repeated element
  };
  // An operation, or several fused ones: those read the previous value and another operand.
  struct Step {
    ElementwiseKernel kernel;
    std::size_t reads[kMaxReads];  // inputs, then the tiles of operations
    int count;
    std::size_t tile;
    FusedKernel fused = nullptr;
    std::vector<FusedOp> ops = {};
    std::vector<std::size_t> others = {};  // their other operands
  };

  void merge_axes();
  void choose_ways();
  void add_steps(const Chain& chain);
  void add_fused(const Chain& chain, std::size_t first, std::size_t last);
  std::size_t place_of(int read) const;
  void needs_tile(std::size_t read);
  void lay_out(char* tile, const Source& source, const char* data, std::size_t first,
               std::size_t n) const;
  void place(const char** operands, char* scratch, const char* const* inputs, std::size_t first,
             std::size_t n) const;
  void run_fused(char* to, const Step& step, const char* const* operands, const char* scratch,
                 std::size_t n, bool streams) const;
  void run_tile(char* out, const char* const* operands, char* scratch, std::size_t n,
                bool streams) const;

  const ElementwiseKernels* kernels_;
  bool is_fused_ = false;  // whether the whole chain is one fused step
  std::vector<std::size_t> shape_;
  std::vector<Source> sources_;
  std::vector<Step> steps_;
  std::vector<std::size_t> tiles_;  // offset in scratch memory of each operation's value
  std::size_t elements_ = 1, row_ = 1, tile_ = 0, out_size_, scratch_ = 0;
};

}  // namespace allreduce
