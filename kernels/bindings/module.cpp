// The native module `allreduce._native`: one binding function per family, each in a file of its
// own.
#include <nanobind/nanobind.h>

#include <cerrno>
#include <system_error>

#define ALLREDUCE_IMPORTS_NUMPY
#include "bindings/bindings.h"
#include "bindings/graph/chain.h"
#include "bindings/graph/tensor.h"
#include "bindings/numpy_api.h"
#include "core/signals.h"
#include "cpu/nn/image_kernels.h"

namespace allreduce {
namespace {

template <class Table>
bool use_table(int level) {
  const Table* table = level < 0 ? best_table<Table>() : table_at<Table>(kLevels[level]);
  if (table != nullptr) table_in_use<Table>() = table;
  return table != nullptr;
}

// Selects the level of the graph's kernels, for tests; below 0 the best one. Returns false where
// the level is not supported.
bool use_level(int level) {
  return use_table<TensorKernels>(level) && use_table<ImageKernels>(level);
}

// Failed system calls raise an OSError with their number.
void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);  // BlockingIOError for EAGAIN
  }
}

}  // namespace
}  // namespace allreduce

NB_MODULE(_native, m) {
  m.doc() = "Native CPU collectives and kernels of allreduce.";
  // Operators that users register keep their functions, and these much else, to the end.
  nanobind::set_leak_warnings(false);
  if (_import_array() < 0) throw nanobind::python_error();
  nanobind::register_exception_translator(&allreduce::translate);
  allreduce::find_main_thread();
  allreduce::bind_comm(m);
  allreduce::bind_images(m);
  allreduce::bind_tcp(m);
  allreduce::bind_tensor(m);
  allreduce::bind_tables(m);
  allreduce::bind_chain(m);
  allreduce::bind_replay(m);
  allreduce::bind_server(m);
  allreduce::bind_exit(m);
  m.def("use_level", allreduce::use_level, nanobind::arg("level"));
}
