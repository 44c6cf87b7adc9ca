// What the stand-in driver offers to the stand-ins for NCCL and cuBLAS.
#pragma once

#include <stddef.h>

extern "C" {
int standin_current_device();             // of this thread; -1: none
void standin_enter(int device);           // makes its context this thread's
int standin_physical_device(int device);  // the number without CUDA_VISIBLE_DEVICES
int standin_stream_device(void* stream);  // -1: no such stream
// Enqueues `work(data)`; what it returns is an error of the driver that comes to light later.
int standin_enqueue(void* stream, int (*work)(void*), void* data);
// Gives the memory behind a device address, as work on `device` sees it.
int standin_translate(int device, const void* address, size_t bytes, void** out);
void standin_await_device(int device);
// Occupies a device for a collective: others with another `holder` wait. 0: given up meanwhile.
int standin_hold_device(int device, const char* holder, int (*is_given_up)(void*), void* data);
void standin_release_device(int device);
}
