// The tasks of a replay: one class per kind of instruction, bound to addresses and shapes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cpu/elementwise/chain.h"
#include "cpu/nn/tensor_kernels.h"
#include "replay/product.h"
#include "replay/replay.h"

namespace allreduce {

class ChainTask : public Task {
 public:
  ChainTask(BoundChain chain, std::size_t ops, Place out, std::vector<Place> inputs)
      : Task(chain.elements() * ops),
        chain_(std::move(chain)),
        out_(out),
        inputs_(std::move(inputs)) {}
  bool run(const std::vector<std::uintptr_t>& bases) const override;

 private:
  BoundChain chain_;
  Place out_;
  std::vector<Place> inputs_;
};

// Matrix products, over axes that all three have: `steps` are bytes along each of these. One of a
// matrix and its own transposed is not done, as NumPy goes another way there.
template <class T>
class ProductTask : public Task {
 public:
  struct Axis {
    std::size_t size;
    std::ptrdiff_t out, a, b;
  };
  struct Operand {
    Place place;
    std::ptrdiff_t first, last;  // how far it reaches, in bytes from its first element
  };
  ProductTask(Product<T> product, std::vector<Axis> axes, Place out, Operand a, Operand b);
  bool run(const std::vector<std::uintptr_t>& bases) const override;

 private:
  static std::size_t times(const std::vector<Axis>& axes);
  bool is_of_one(const char* a, const char* b) const;

  Product<T> product_;
  std::vector<Axis> axes_;
  Place out_;
  Operand a_, b_;
};

// A product, but none of a matrix and its own transposed, and the chain behind it, some rows at a
// time.
template <class T>
class EpilogueTask : public Task {
 public:
  struct Input {
    Place place;
    std::ptrdiff_t down;  // bytes from row to row; 0 where it has one for all
  };
  struct Parts {
    std::int64_t rows;  // of a piece
    BoundChain whole;
    std::optional<BoundChain> last;  // for a smaller piece, where there is one
  };
  // With `in_place` the product is written to the result, otherwise to separate memory.
  EpilogueTask(Product<T> product, Parts parts, std::size_t ops, Input out, Input a, Place b,
               std::vector<Input> rest, bool in_place, std::size_t columns);
  bool run(const std::vector<std::uintptr_t>& bases) const override;

 private:
  Product<T> product_;
  Parts parts_;
  Input out_, a_;
  Place b_;
  std::vector<Input> rest_;
  std::unique_ptr<T[]> made_;
};

// The sum of a matrix's rows, as a product with ones.
template <class T>
class ColumnSumsTask : public Task {
 public:
  ColumnSumsTask(std::int64_t rows, std::int64_t columns, Place out, Place x)
      : Task(static_cast<std::size_t>(rows * columns)),
        ones_(static_cast<std::size_t>(rows), T(1)),
        columns_(columns),
        out_(out),
        x_(x) {}
  bool run(const std::vector<std::uintptr_t>& bases) const override;

 private:
  std::vector<T> ones_;
  std::int64_t columns_;
  Place out_, x_;
};

// The parts that are equal in all steps.
class ConstantTask : public Task {
 public:
  ConstantTask(std::vector<char> bytes, Place out)
      : Task(bytes.size()), bytes_(std::move(bytes)), out_(out) {}
  bool run(const std::vector<std::uintptr_t>& bases) const override;

 private:
  std::vector<char> bytes_;
  Place out_;
};

// A cross-entropy, or its gradient, of rows of logits: of labels, or of shares of the classes.
template <class T>
class LossTask : public Task {
 public:
  struct Places {
    Place out, dy, targets, logits;
  };
  LossTask(const FloatKernels<T>& kernels, bool is_sparse, bool is_gradient, Places places,
           std::size_t rows, std::size_t columns)
      : Task(rows * columns * 8),
        kernels_(&kernels),
        is_sparse_(is_sparse),
        is_gradient_(is_gradient),
        places_(places),
        rows_(rows),
        columns_(columns) {}
  bool run(const std::vector<std::uintptr_t>& bases) const override;

 private:
  const FloatKernels<T>* kernels_;
  bool is_sparse_, is_gradient_;
  Places places_;
  std::size_t rows_, columns_;
};

// A dropout's mask depends on the step and on the index of the replica's first row, which it reads.
template <class T>
class DropoutTask : public Task {
 public:
  struct Plan {
    std::size_t rows, columns;
    double rate;
    std::uint64_t key;
    std::int64_t rows_per_sample;
  };
  struct Places {
    Place out, x, row_offset, step;
  };
  DropoutTask(const FloatKernels<T>& kernels, const Plan& plan, const Places& places)
      : Task(plan.rows * plan.columns * 8), kernels_(&kernels), plan_(plan), places_(places) {}
  bool run(const std::vector<std::uintptr_t>& bases) const override;

 private:
  const FloatKernels<T>* kernels_;
  Plan plan_;
  Places places_;
};

}  // namespace allreduce
