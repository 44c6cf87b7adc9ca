// The native module `allreduce._native`: one binding function per family, each defined beside its
// code.
#include <nanobind/nanobind.h>

#define ALLREDUCE_IMPORTS_NUMPY
#include "bind_chain.h"
#include "bind_comm.h"
#include "bind_exit.h"
#include "bind_images.h"
#include "bind_tape.h"
#include "bind_tcp.h"
#include "bind_tensor.h"
#include "numpy_api.h"
#include "signals.h"

NB_MODULE(_native, m) {
  m.doc() = "Native CPU collectives and kernels of allreduce.";
  // Operators that users register keep their functions, and these much else, to the end.
  nanobind::set_leak_warnings(false);
  if (_import_array() < 0) throw nanobind::python_error();
  allreduce::find_main_thread();
  allreduce::bind_comm(m);
  allreduce::bind_images(m);
  allreduce::bind_tcp(m);
  allreduce::bind_tensor(m);
  allreduce::bind_chain(m);
  allreduce::bind_tape(m);
  allreduce::bind_exit(m);
}
