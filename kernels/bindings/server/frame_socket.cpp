// Sends and receives the frames of data connections between the tasks of a cluster.
//
// A frame is a head, a description, and the bytes of arrays. Descriptions are made and read in
// Python (server/protocol/frames.py); steps repeat them, so the latest in each direction is kept.
// Steps are short, and three processes may share two cores: in cold caches the same work in Python
// took 60 of 200 µs of a step over two tasks.
#include <endian.h>
#include <nanobind/nanobind.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "core/gil.h"

namespace nb = nanobind;

namespace allreduce {
namespace {

constexpr std::size_t kBuffer = 1 << 16;
constexpr std::size_t kMostDescription = 1 << 24;  // names and shapes; arrays come behind
constexpr std::size_t kShort = 1 << 10;            // of a description that is kept
constexpr std::size_t kSmall = 1 << 16;            // below it an array always goes by the socket
constexpr std::size_t kMostParts = 1000;           // of one system call, below IOV_MAX
constexpr std::size_t kMostDescriptors = 64;       // that come with the bytes of one read

// The description's length, the kind, the request and the step, in network byte order.
struct [[gnu::packed]] Head {
  std::uint32_t length;
  std::uint8_t kind;
  std::uint64_t request, step;
};

Head head_of(std::size_t length, int kind, std::uint64_t request, std::uint64_t step) {
  return {htobe32(static_cast<std::uint32_t>(length)), static_cast<std::uint8_t>(kind),
          htobe64(request), htobe64(step)};
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Runs a system call without the interpreter's lock, again after signals.
template <class Call>
std::size_t unlocked_call(Call call) {
  for (;;) {
    ssize_t count;
    int error;
    {
      const GilRelease released;
      count = call();
      error = errno;
    }
    if (count >= 0) return static_cast<std::size_t>(count);
    if (error != EINTR) throw std::system_error(error, std::generic_category());
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

PyArrayObject* array_in(nb::handle object) {
  return PyArray_Check(object.ptr()) ? reinterpret_cast<PyArrayObject*>(object.ptr()) : nullptr;
}

// An array's dtype and shape.
struct Form {
  nb::object dtype;
  std::vector<npy_intp> shape;

  bool is_of(PyArrayObject* array) const {
    return reinterpret_cast<PyObject*>(PyArray_DESCR(array)) == dtype.ptr() &&
           static_cast<std::size_t>(PyArray_NDIM(array)) == shape.size() &&
           std::equal(shape.begin(), shape.end(), PyArray_DIMS(array));
  }
};

// An array that a description announces; `header` is for Python.
struct Announced {
  nb::object header;
  Form form;
  std::size_t nbytes;
  bool is_elsewhere;
};

// The receiving half is for one thread at a time, and so is the sending half.
class FrameSocket {
 public:
  // `parse` reads a description: what it is about, and its arrays. `announce` describes an array.
  FrameSocket(int fd, nb::object parse, nb::object announce)
      : fd_(fd), buffer_(kBuffer), parse_(std::move(parse)), announce_(std::move(announce)) {}
  FrameSocket(const FrameSocket&) = delete;
  FrameSocket& operator=(const FrameSocket&) = delete;
  ~FrameSocket() { close(); }

  double heard = now();  // when the latest bytes came
  bool listens = false;  // whether a thread waits for bytes; both change with the lock only

  nb::tuple read(int flags);
  void fill(nb::object target);
  int take_descriptor();
  bool send_small(int kind, std::uint64_t request, std::uint64_t step, nb::bytes about,
                  const nb::list& arrays);
  void close();

 private:
  std::size_t ready() const { return end_ - begin_; }
  std::size_t receive(iovec target, int flags);
  std::size_t receive_more(iovec target);
  iovec room(std::size_t count);
  void await(std::size_t count);
  void recognize(std::string_view description);
  nb::list arrays();
  bool describe(nb::bytes about, const nb::list& arrays);
  void send_all(std::vector<iovec> parts);

  std::atomic<int> fd_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0, end_ = 0;
  std::deque<int> descriptors_;  // that have come with bytes and are not taken yet
  nb::object parse_, announce_;

  std::optional<std::string> known_;  // the description that came last, if it is short
  nb::object known_about_;
  std::vector<Announced> known_arrays_;

  std::optional<std::string> sent_about_;  // of the description that was sent last
  std::string sent_;                       // the same with its arrays
  std::vector<Form> sent_forms_;
};

// Reads a frame: its kind, request and step, what it is about, its arrays, and whether these are
// complete. In the place of an array that is elsewhere, or not in the buffer as a whole, is what
// the description announced; the caller gets it from there, in this order.
nb::tuple FrameSocket::read(int flags) {
  if (!ready()) end_ += receive(room(kBuffer), flags);
  await(sizeof(Head));
  Head head;
  std::memcpy(&head, buffer_.data() + begin_, sizeof head);
  const std::size_t length = be32toh(head.length);
  if (length > kMostDescription) {
    PyErr_Format(PyExc_ValueError, "it sent a frame of %zu bytes", length);
    throw nb::python_error();
  }
  await(sizeof head + length);
  begin_ += sizeof head;
  recognize({buffer_.data() + begin_, length});
  begin_ += length;
  const nb::object about = known_about_;
  nb::list found = arrays();
  bool whole = true;
  for (nb::handle each : found) whole = whole && array_in(each) != nullptr;
  return nb::make_tuple(static_cast<int>(head.kind), be64toh(head.request), be64toh(head.step),
                        about, found, whole);
}

// Returns the buffer's free part, after making it at least as large as `count`.
iovec FrameSocket::room(std::size_t count) {
  if (begin_ == end_) begin_ = end_ = 0;
  if (!ready() && buffer_.size() > kBuffer && count <= kBuffer) {  // after a long description
    buffer_.resize(kBuffer);
    buffer_.shrink_to_fit();
  }
  if (buffer_.size() - end_ < count) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, ready());
    end_ -= begin_;
    begin_ = 0;
    if (buffer_.size() - end_ < count) buffer_.resize(end_ + count);
  }
  return {buffer_.data() + end_, buffer_.size() - end_};
}

// Reads bytes from the socket, and keeps the descriptors that come with them; returns how many.
std::size_t FrameSocket::receive(iovec target, int flags) {
  alignas(cmsghdr) char rights[CMSG_SPACE(kMostDescriptors * sizeof(int))];
  msghdr message{};
  message.msg_iov = &target;
  message.msg_iovlen = 1;
  listens = true;
  const std::size_t count = unlocked_call([&] {
    message.msg_control = rights;
    message.msg_controllen = sizeof rights;
    return recvmsg(fd_, &message, flags | MSG_CMSG_CLOEXEC);
  });
  for (cmsghdr* each = CMSG_FIRSTHDR(&message); each; each = CMSG_NXTHDR(&message, each)) {
    if (each->cmsg_level != SOL_SOCKET || each->cmsg_type != SCM_RIGHTS) continue;
    const auto* data = reinterpret_cast<const int*>(CMSG_DATA(each));
    descriptors_.insert(descriptors_.end(), data,
                        data + (each->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  }
  heard = now();
  listens = false;
  if (!count) {
    PyErr_SetNone(PyExc_EOFError);
    throw nb::python_error();
  }
  return count;
}

// The same in the middle of a frame, where a timeout of the socket does not count.
std::size_t FrameSocket::receive_more(iovec target) {
  for (;;) {
    try {
      return receive(target, 0);
    } catch (const std::system_error& error) {
      if (error.code().value() != EAGAIN) throw;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();  // another thread may have got one
    }
  }
}

// Waits until the buffer has `count` bytes.
void FrameSocket::await(std::size_t count) {
  while (ready() < count) end_ += receive_more(room(count - ready()));
}

// Makes a description the known one.
void FrameSocket::recognize(std::string_view description) {
  if (known_ == description) return;
  const nb::bytes given(description.data(), description.size());
  const nb::object parsed = block_unwinding([&] { return parse_(given); });
  std::vector<Announced> arrays;
  for (nb::handle each : nb::object(parsed[1])) {
    Announced next{
        nb::borrow(each), {each.attr("dtype"), {}}, 0, !each.attr("elsewhere").is_none()};
    next.nbytes = nb::cast<std::size_t>(each.attr("nbytes"));
    for (nb::handle size : nb::object(each.attr("shape")))
      next.form.shape.push_back(nb::cast<npy_intp>(size));
    arrays.push_back(std::move(next));
  }
  known_.reset();
  if (description.size() <= kShort) known_ = description;
  known_about_ = nb::object(parsed[0]);
  known_arrays_ = std::move(arrays);
}

// Takes the known description's arrays out of the buffer.
nb::list FrameSocket::arrays() {
  nb::list found;
  bool whole = true;
  for (const Announced& each : known_arrays_) {
    if (!each.is_elsewhere) whole = whole && each.nbytes <= ready();
    if (each.is_elsewhere || !whole) {
      found.append(each.header);
      continue;
    }
    nb::object dtype = each.form.dtype;
    PyObject* made = PyArray_SimpleNewFromDescr(
        static_cast<int>(each.form.shape.size()), const_cast<npy_intp*>(each.form.shape.data()),
        reinterpret_cast<PyArray_Descr*>(dtype.release().ptr()));
    if (made == nullptr) throw nb::python_error();
    std::memcpy(PyArray_DATA(reinterpret_cast<PyArrayObject*>(made)), buffer_.data() + begin_,
                each.nbytes);
    begin_ += each.nbytes;
    found.append(nb::steal(made));
  }
  return found;
}

// Reads exactly an array's bytes, those in the buffer first.
void FrameSocket::fill(nb::object target) {
  PyArrayObject* to = array_in(target);
  if (to == nullptr || !PyArray_IS_C_CONTIGUOUS(to) || !PyArray_ISWRITEABLE(to))
    throw nb::type_error("fill takes contiguous arrays");
  const auto size = static_cast<std::size_t>(PyArray_NBYTES(to));
  std::size_t done = std::min(size, ready());
  if (done) std::memcpy(PyArray_BYTES(to), buffer_.data() + begin_, done);
  begin_ += done;
  while (done < size) done += receive_more({PyArray_BYTES(to) + done, size - done});
}

// Returns the first descriptor that has come and was not taken; -1 if there is none.
int FrameSocket::take_descriptor() {
  if (descriptors_.empty()) return -1;
  const int found = descriptors_.front();
  descriptors_.pop_front();
  return found;
}

// Sends a frame whose arrays are all small; returns false, without sending, if they are not, or
// are no arrays of numbers in one piece. The list is the caller's own.
bool FrameSocket::send_small(int kind, std::uint64_t request, std::uint64_t step, nb::bytes about,
                             const nb::list& arrays) {
  if (arrays.size() > kMostParts || !describe(about, arrays)) return false;
  std::vector<iovec> parts;
  const std::string description = sent_;
  const Head head = head_of(description.size(), kind, request, step);
  parts.push_back({const_cast<Head*>(&head), sizeof head});
  parts.push_back({const_cast<char*>(description.data()), description.size()});
  for (nb::handle each : arrays) {
    PyArrayObject* array = array_in(each);
    parts.push_back({PyArray_DATA(array), static_cast<std::size_t>(PyArray_NBYTES(array))});
  }
  send_all(std::move(parts));
  return true;
}

// Makes `sent_` the description of small arrays; returns false if some are not.
bool FrameSocket::describe(nb::bytes about, const nb::list& arrays) {
  const std::string_view wanted(about.c_str(), about.size());
  bool is_same = arrays.size() == sent_forms_.size() && sent_about_ == wanted;
  std::size_t i = 0;
  for (nb::handle each : arrays) {
    PyArrayObject* array = array_in(each);
    if (array == nullptr || !PyArray_IS_C_CONTIGUOUS(array) ||
        static_cast<std::size_t>(PyArray_NBYTES(array)) >= kSmall)
      return false;
    is_same = is_same && sent_forms_[i++].is_of(array);
  }
  if (is_same) return true;
  std::string described(wanted);
  std::vector<Form> forms;
  for (nb::handle each : arrays) {
    PyArrayObject* array = array_in(each);
    if (!std::strchr("biufc", PyArray_DESCR(array)->kind)) return false;
    const nb::object dtype = each.attr("dtype"), shape = each.attr("shape");
    const nb::bytes announced(block_unwinding([&] { return announce_(dtype, shape); }));
    described.append(announced.c_str(), announced.size());
    forms.push_back({dtype, {PyArray_DIMS(array), PyArray_DIMS(array) + PyArray_NDIM(array)}});
  }
  sent_about_ = wanted;
  sent_ = std::move(described);
  sent_forms_ = std::move(forms);
  return true;
}

// Sends all parts, in as few system calls as there can be.
void FrameSocket::send_all(std::vector<iovec> parts) {
  for (std::size_t first = 0; first < parts.size();) {
    msghdr message{};
    message.msg_iov = parts.data() + first;
    message.msg_iovlen = parts.size() - first;
    std::size_t sent = unlocked_call([&] { return sendmsg(fd_, &message, MSG_NOSIGNAL); });
    while (first < parts.size() && sent >= parts[first].iov_len) sent -= parts[first++].iov_len;
    if (!sent) continue;
    parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + sent;
    parts[first].iov_len -= sent;
  }
}

// Forgets the socket, which the caller closes, and closes descriptors that were not taken.
void FrameSocket::close() {
  fd_ = -1;
  for (const int each : descriptors_) ::close(each);
  descriptors_.clear();
}

}  // namespace

void bind_server(nb::module_& m) {
  nb::class_<FrameSocket>(m, "FrameSocket")
      .def(nb::init<int, nb::object, nb::object>(), nb::arg("fd"), nb::arg("parse"),
           nb::arg("announce"))
      .def_rw("heard", &FrameSocket::heard)
      .def_ro("listens", &FrameSocket::listens)
      .def("read", &FrameSocket::read, nb::arg("flags"))
      .def("fill", &FrameSocket::fill, nb::arg("target"))
      .def("take_descriptor", &FrameSocket::take_descriptor)
      .def("send_small", &FrameSocket::send_small, nb::arg("kind"), nb::arg("request"),
           nb::arg("step"), nb::arg("about"), nb::arg("arrays"))
      .def("close", &FrameSocket::close)
      .def_static(
          "head",
          [](std::size_t length, int kind, std::uint64_t request, std::uint64_t step) {
            const Head head = head_of(length, kind, request, step);
            return nb::bytes(&head, sizeof head);
          },
          nb::arg("length"), nb::arg("kind"), nb::arg("request"), nb::arg("step"));
}

}  // namespace allreduce
