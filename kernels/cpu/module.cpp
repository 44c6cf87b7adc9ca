// The native module `allreduce._native`: one binding function per family, each defined beside its
// code.
#include <nanobind/nanobind.h>

#include "bind_comm.h"

NB_MODULE(_native, m) {
  m.doc() = "Native CPU collectives and kernels of allreduce.";
  allreduce::bind_comm(m);
}
