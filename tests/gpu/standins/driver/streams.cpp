// Streams: a worker thread each, which does the stream's tasks in order, with seeded delays.
#include <chrono>
#include <thread>

#include "driver.h"

namespace standin {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool are_reached(const std::vector<MarkPointer>& marks) {
  for (const auto& mark : marks)
    if (!mark->reached) return false;
  return true;
}

// A seed makes some streams slow and others fast, so that what misses an event reads too early.
void delay(Stream* stream) {
  const int longest = driver().max_delay * stream->slowness;
  if (!driver().seed || longest <= 0 || stream->random() % 2) return;
  std::this_thread::sleep_for(
      std::chrono::microseconds(stream->random() % static_cast<unsigned>(longest)));
}

void work_off(Stream* stream) {
  Driver& all = driver();
  Lock lock(all.mutex);
  for (;;) {
    all.changed.wait(lock, [&] { return !stream->tasks.empty() || stream->is_closing; });
    if (stream->tasks.empty()) break;
    Task task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    all.changed.wait(lock, [&] { return are_reached(task.awaited); });
    CUresult result = CUDA_SUCCESS;
    if (task.work && stream->context->error == CUDA_SUCCESS) {
      lock.unlock();
      delay(stream);
      result = task.work();
      task.work = nullptr;
      lock.lock();
    }
    if (result != CUDA_SUCCESS && stream->context->error == CUDA_SUCCESS)
      stream->context->error = result;  // comes to light at the next call
    task.mark->reached = true;
    task.mark->time = now();
    all.changed.notify_all();
  }
  stream->context->streams.erase(stream);
  lock.unlock();
  delete stream;
}

}  // namespace

Stream* make_stream(Context* context, bool is_blocking, int priority) {
  static std::uint64_t made = 0;
  auto* stream = new Stream{context, is_blocking, priority, {}, nullptr, false, {}, 0};
  stream->last = std::make_shared<Mark>();
  stream->last->reached = true;
  stream->random.seed(driver().seed * 1000003 + ++made);
  stream->slowness = static_cast<int>(stream->random() % 4);
  context->streams.insert(stream);
  std::thread(work_off, stream).detach();
  return stream;
}

Stream* find_stream(CUstream handle, Context* context) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) {
    if (!context->null_stream) context->null_stream.reset(make_stream(context, false, 0));
    return context->null_stream.get();
  }
  if (handle == CU_STREAM_PER_THREAD) {
    thread_local std::map<Context*, Stream*> mine;
    Stream*& stream = mine[context];
    if (!stream) stream = make_stream(context, true, 0);
    return stream;
  }
  auto* stream = reinterpret_cast<Stream*>(handle);
  return driver().streams.contains(stream) ? stream : nullptr;
}

MarkPointer enqueue(Lock&, Stream* stream, Work work, std::vector<MarkPointer> awaited) {
  Context* context = stream->context;
  const Stream* null_stream = context->null_stream.get();
  if (stream == null_stream) {
    for (Stream* other : context->streams)
      if (other->is_blocking && !other->last->reached) awaited.push_back(other->last);
  } else if (stream->is_blocking && null_stream && !null_stream->last->reached) {
    awaited.push_back(null_stream->last);
  }
  stream->last = std::make_shared<Mark>();
  stream->tasks.push_back({std::move(awaited), std::move(work), stream->last});
  driver().changed.notify_all();
  return stream->last;
}

void await(Lock& lock, const MarkPointer& mark) {
  driver().changed.wait(lock, [&] { return mark->reached; });
}

std::vector<MarkPointer> pending(Context* context) {
  std::vector<MarkPointer> marks;
  for (Stream* stream : context->streams)
    if (!stream->last->reached) marks.push_back(stream->last);
  return marks;
}

void await_stream(Lock& lock, Stream* stream) {
  if (stream == stream->context->null_stream.get()) {
    std::vector<MarkPointer> marks;
    for (Stream* other : stream->context->streams)
      if (other->is_blocking) marks.push_back(other->last);
    for (const auto& mark : marks) await(lock, mark);
  }
  const MarkPointer last = stream->last;
  await(lock, last);
}

void await_device(Lock& lock, Context* context) {
  for (const auto& mark : pending(context)) await(lock, mark);
}

}  // namespace standin
