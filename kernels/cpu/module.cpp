// The native module `allreduce._native`: one binding function per family, each defined beside its
// code.
#include <nanobind/nanobind.h>

#include "bind_comm.h"
#include "bind_tcp.h"
#include "bind_tensor.h"

NB_MODULE(_native, m) {
  m.doc() = "Native CPU collectives and kernels of allreduce.";
  allreduce::bind_comm(m);
  allreduce::bind_tcp(m);
  allreduce::bind_tensor(m);
}
