// Chains of element-wise operations, carried out tile by tile: what stands between the first and
// the last of them never leaves the level-1 cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace allreduce {

enum class Scalar : std::uint8_t { boolean, int32, int64, float32, float64 };

enum class LinkOp : std::uint8_t {
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
using LinkKernel = void (*)(void* out, const void* a, const void* b, const void* c, std::size_t n);

// An operation on what the one before it has made, and an operand of its own: one element where it
// is repeated. On the right stands what the one before has made, or not.
struct SpineLink {
  LinkOp op;
  bool is_right, repeats;
  const void* other;
};

// Operations on floats, one behind the other, the first of them on `x`; for sums, differences,
// products and quotients. Where `streams` holds, `out` is aligned to a cache line, apart from all
// operands, and written past the caches.
using SpineKernel = void (*)(void* out, const void* x, const SpineLink* links, std::size_t count,
                             std::size_t n, bool streams);

struct LinkKernels {
  // The kernel of an operation on operands of type `in` (all but the condition of `where`), or null
  // where there is none.
  LinkKernel (*find)(LinkOp op, Scalar in, Scalar out);
  // The kernel of several operations of which this is one, or null.
  SpineKernel (*find_spine)(LinkOp op, Scalar type);
  // Copies past the caches; `fence` orders such stores before all that follow.
  void (*stream)(void* to, const void* from, std::size_t bytes);
  void (*fence)();
};

constexpr int kMostReads = 3;
// Operations of a spine.
constexpr std::size_t kLongest = 16;
// Inputs of a chain; one with more is left to NumPy. Their addresses are put on the stack.
constexpr std::size_t kMostInputs = 2048;

// One operation. It reads inputs by their number, and earlier links by -1 - theirs; its value goes
// to a room, or, as the last one's does, to the result.
struct Link {
  LinkOp op;
  Scalar in, out;
  int count;
  int reads[kMostReads];
  int room;
};

struct Chain {
  std::vector<Link> links;
  std::vector<Scalar> inputs;
};

std::size_t size_of(Scalar type);

// A chain bound to shapes and strides; only addresses may change from run to run.
class BoundChain {
 public:
  // The result is C-contiguous, of this shape; an input's strides are 0 where it is repeated.
  BoundChain(const Chain& chain, const LinkKernels& kernels, std::vector<std::size_t> shape,
             std::vector<std::vector<std::ptrdiff_t>> strides);

  // `out` may be an input of its type that is not repeated, where the last link may work in place
  // or does not read that.
  void run(char* out, const char* const* inputs) const;

  std::size_t elements() const { return elements_; }

 private:
  enum class Way : std::uint8_t { direct, once, anew };
  struct Source {
    std::size_t size;  // of an element
    std::vector<std::ptrdiff_t> strides;
    Way way;
    bool repeated = false;
    std::size_t tile = 0;  // where in the scratch memory what is not read directly is laid out
    bool whole = false;    // whether a tile of it is, or one element that is repeated
  };
  // An operation, or a spine: those read what the one before has made, and another operand.
  struct Step {
    LinkKernel kernel;
    std::size_t reads[kMostReads];  // inputs, and behind them the tiles of links
    int count;
    std::size_t tile;
    SpineKernel spine = nullptr;
    std::vector<SpineLink> links = {};
    std::vector<std::size_t> others = {};  // what they read
  };

  struct Fetched {
    std::size_t source, bytes, share;  // of a tile, and what of it is fetched in each step
  };

  void merge_axes();
  void choose_ways();
  void add_steps(const Chain& chain);
  void add_spine(const Chain& chain, std::size_t first, std::size_t last);
  std::size_t place_of(int read) const;
  void needs_tile(std::size_t read);
  void lay_out(char* tile, const Source& source, const char* data, std::size_t first,
               std::size_t n) const;
  void place(const char** operands, char* scratch, const char* const* inputs, std::size_t first,
             std::size_t n) const;
  void run_spine(char* to, const Step& step, const char* const* operands, const char* scratch,
                 std::size_t n, bool streams) const;
  void run_tile(char* out, const char* const* operands, char* scratch, std::size_t n,
                bool streams) const;
  void fetch_share(const char* const* operands, std::size_t index) const;

  const LinkKernels* kernels_;
  bool is_spine_ = false;  // the whole chain
  std::vector<std::size_t> shape_;
  std::vector<Source> sources_;
  std::vector<Step> steps_;
  std::vector<Fetched> fetched_;    // the sources that are read directly, where tiles follow
  std::vector<std::size_t> tiles_;  // where in the scratch memory each link's value is
  std::size_t elements_ = 1, row_ = 1, tile_ = 0, out_size_, scratch_ = 0;
};

}  // namespace allreduce
