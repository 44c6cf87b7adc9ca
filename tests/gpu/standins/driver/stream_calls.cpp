// The driver's calls for streams and events, and what the other stand-ins enqueue.
#include "driver.h"

using namespace standin;

namespace {

// The stream and event of a call, or nullptr.
Event* find_event(CUevent handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  return driver().events.contains(event) ? event : nullptr;
}

CUresult record(CUevent handle, CUstream stream_handle) {
  Lock lock(driver().mutex);
  Event* event = find_event(handle);
  Stream* stream = find_stream(stream_handle, current.back());
  if (!event || !stream || event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  event->mark = enqueue(lock, stream, nullptr);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  ENTER;
  Lock lock(driver().mutex);
  Stream* made = make_stream(current.back(), !(flags & CU_STREAM_NON_BLOCKING), priority);
  driver().streams.insert(made);
  *out = reinterpret_cast<CUstream>(made);
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* out, unsigned flags) {
  return cuStreamCreateWithPriority(out, flags, 0);
}

CUresult cuStreamDestroy(CUstream handle) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  auto* stream = reinterpret_cast<Stream*>(handle);
  if (!driver().streams.erase(stream)) return CUDA_ERROR_INVALID_HANDLE;
  stream->is_closing = true;  // its worker finishes what is enqueued
  driver().changed.notify_all();
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
  ENTER;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  Context* context = stream->context;
  await_stream(lock, stream);
  return context->error;
}

CUresult cuStreamQuery(CUstream handle) {
  ENTER;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  return stream->last->reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
  ENTER;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  Event* event = find_event(event_handle);
  if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
  if (event->mark) enqueue(lock, stream, nullptr, {event->mark});
  return CUDA_SUCCESS;
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* out) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  Context* mine = current.empty() ? nullptr : current.back();
  Stream* stream = find_stream(handle, mine);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  *out = reinterpret_cast<CUcontext>(stream->context);
  return CUDA_SUCCESS;
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice* out) {
  ENTER;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  *out = stream->context->device;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
  ENTER;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  *flags = stream->is_blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  ENTER;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  *priority = stream->priority;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  ENTER_PLAIN;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  ENTER;
  Lock lock(driver().mutex);
  Stream* stream = find_stream(handle, current.back());
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  enqueue(lock, stream, [=] {
    function(data);
    return CUDA_SUCCESS;
  });
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* out, unsigned flags) {
  ENTER;
  Lock lock(driver().mutex);
  auto* made = new Event{current.back(), !(flags & CU_EVENT_DISABLE_TIMING), nullptr};
  driver().events.insert(made);
  *out = reinterpret_cast<CUevent>(made);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  auto* event = reinterpret_cast<Event*>(handle);
  if (!driver().events.erase(event)) return CUDA_ERROR_INVALID_HANDLE;
  delete event;
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  ENTER;
  return record(event, stream);
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned) {
  ENTER;
  return record(event, stream);
}

CUresult cuEventQuery(CUevent handle) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  Event* event = find_event(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (event->context->error != CUDA_SUCCESS) return event->context->error;
  return !event->mark || event->mark->reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  Event* event = find_event(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  Context* context = event->context;
  const MarkPointer mark = event->mark;
  if (mark) await(lock, mark);
  return context->error;
}

CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  ENTER_PLAIN;
  Lock lock(driver().mutex);
  Event *from = find_event(start), *to = find_event(end);
  if (!from || !to || !from->mark || !to->mark || !from->has_time || !to->has_time)
    return CUDA_ERROR_INVALID_HANDLE;
  if (!from->mark->reached || !to->mark->reached) return CUDA_ERROR_NOT_READY;
  *milliseconds = static_cast<float>((to->mark->time - from->mark->time) * 1e3);
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

}  // extern "C"
