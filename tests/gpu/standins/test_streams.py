"""The stand-in driver's streams: what waits, what does not, and what a missing event does."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, Program, ProgramOptions

from tests.gpu import launch
from tests.gpu.kernels.calls import call, module

pytestmark = pytest.mark.skipif(launch.has_driver(), reason="only simulated GPUs are this strict")
NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
SUCCESS = driver.CUresult.CUDA_SUCCESS


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    made = Device(0)
    made.set_current()
    yield made
    call(driver.cuCtxSynchronize())


def new_stream() -> Any:
    return call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def new_event() -> Any:
    return call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))


@contextmanager
def held(stream: Any) -> Iterator[None]:
    """Keep a stream busy for the length of a with block."""
    released = threading.Event()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: released.wait(90) and None)
    pointer = driver.CUhostFn(_ptr=ctypes.addressof(ctypes.c_void_p.from_buffer(function)))
    call(driver.cuLaunchHostFunc(stream, pointer, 0))
    try:
        yield
    finally:
        released.set()
        call(driver.cuStreamSynchronize(stream))


def blocks(work: Callable[[], Any], stream: Any, seconds: float = 0.2) -> bool:
    """Say whether `work` waits, for so many seconds, for what is on a stream of its device."""
    started = threading.Event()

    def start() -> None:
        Device(0).set_current()
        started.set()
        work()

    with held(stream):
        thread = threading.Thread(target=start)
        thread.start()
        assert started.wait(30)
        thread.join(seconds)
        was_blocked = thread.is_alive()
    thread.join(30)
    assert not thread.is_alive()
    return was_blocked


def pinned(n: int) -> np.ndarray:
    at = int(call(driver.cuMemHostAlloc(4 * n, 0)))
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(at))


def read(at: int, n: int) -> np.ndarray:
    out = np.empty(n, np.float32)
    call(driver.cuMemcpyDtoH(out.ctypes.data, at, out.nbytes))
    return out


def test_a_copy_from_pinned_memory_reads_it_when_the_stream_comes_to_it() -> None:
    stream, x, at = new_stream(), pinned(10), int(call(driver.cuMemAlloc(40)))
    x[:] = 1
    with held(stream):
        call(driver.cuMemcpyHtoDAsync(at, x.ctypes.data, 40, stream))
        x[:] = 2  # too early
    np.testing.assert_array_equal(read(at, 10), np.full(10, 2))


def test_a_copy_from_pageable_memory_waits() -> None:
    stream, x, at = new_stream(), np.ones(10, np.float32), int(call(driver.cuMemAlloc(40)))
    copy = driver.cuMemcpyHtoDAsync
    assert blocks(lambda: call(copy(at, x.ctypes.data, 40, stream)), stream)
    assert blocks(lambda: call(driver.cuMemcpyDtoHAsync(x.ctypes.data, at, 40, stream)), stream)
    copy_there = driver.cuMemcpyDtoDAsync
    assert not blocks(lambda: call(copy_there(at, at, 40, stream)), stream, seconds=30)


def test_memory_modules_and_first_launches_wait_for_the_device() -> None:
    stream, at = new_stream(), int(call(driver.cuMemAlloc(40)))
    assert blocks(lambda: call(driver.cuMemAlloc(40)), stream)
    assert blocks(lambda: call(driver.cuMemFree(at)), stream)
    assert blocks(lambda: call(driver.cuMemHostAlloc(40, 0)), stream)
    code = Program("", "c++", ProgramOptions(arch="sm_80", std="c++17")).compile("cubin").code
    assert blocks(lambda: call(driver.cuModuleLoadData(code)), stream)
    fresh = module.__wrapped__("copy")  # other tests have launched its kernels
    kernel = call(driver.cuModuleGetFunction(fresh, b"fill_2"))
    other = new_stream()

    def fill() -> None:
        values = ((0, 0, 0), (ctypes.c_void_p, ctypes.c_ushort, ctypes.c_longlong))
        call(driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, other, values, 0))

    assert blocks(fill, stream)
    assert not blocks(fill, stream, seconds=30)  # the second one


def test_an_event_is_the_record_before_the_wait() -> None:
    first, second, event = new_stream(), new_stream(), new_event()
    call(driver.cuStreamWaitEvent(second, event, 0))  # never recorded: no wait
    call(driver.cuEventRecord(event, first))
    call(driver.cuStreamWaitEvent(second, event, 0))
    with held(first):
        call(driver.cuEventRecord(event, first))  # later than both waits
        call(driver.cuStreamSynchronize(second))
        assert driver.cuEventQuery(event)[0] == NOT_READY
        call(driver.cuStreamWaitEvent(second, event, 0))
        assert driver.cuStreamQuery(second)[0] == NOT_READY
    call(driver.cuStreamSynchronize(second))


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    blocking, free = call(driver.cuStreamCreate(0)), new_stream()
    at = int(call(driver.cuMemAlloc(40)))
    with held(blocking):
        call(driver.cuMemsetD8Async(at, 0, 40, 0))
        assert driver.cuStreamQuery(0)[0] == NOT_READY
    with held(free):
        call(driver.cuMemsetD8Async(at, 0, 40, 0))
        call(driver.cuStreamSynchronize(0))


def test_freed_addresses_are_reused_late() -> None:
    addresses = []
    for _ in range(20):
        addresses.append(int(call(driver.cuMemAlloc(40))))
        call(driver.cuMemFree(addresses[-1]))
    assert len(set(addresses)) == len(addresses)


def alone(program: Callable[..., None], *arguments: Any, **more: str) -> Any:
    text = f"from {__name__} import {program.__name__} as f; f(*{arguments!r})"
    return subprocess.run(
        [sys.executable, "-c", text],
        env=launch.environment(2, **more),
        cwd=launch.ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def count_wrong_values(has_event: bool) -> None:
    Device(0).set_current()
    streams, wrong = (new_stream(), new_stream()), 0
    at, x = int(call(driver.cuMemAlloc(40))), pinned(10)
    for _ in range(20):
        call(driver.cuMemsetD32Async(at, 0, 10, streams[0]))
        call(driver.cuStreamSynchronize(streams[0]))
        call(driver.cuMemsetD32Async(at, 0x3F800000, 10, streams[0]))
        if has_event:
            event = new_event()
            call(driver.cuEventRecord(event, streams[0]))
            call(driver.cuStreamWaitEvent(streams[1], event, 0))
        call(driver.cuMemcpyDtoHAsync(x.ctypes.data, at, 40, streams[1]))
        call(driver.cuStreamSynchronize(streams[1]))
        wrong += bool((x != 1).any())
        call(driver.cuStreamSynchronize(streams[0]))
    print(wrong > 0)


@pytest.mark.parametrize("has_event", [True, False])
def test_a_missing_event_gives_wrong_values(has_event: bool) -> None:
    # Delays of up to 30 ms are longer than those of a busy machine's own.
    ended = alone(count_wrong_values, has_event, STANDIN_SEED="3", STANDIN_DELAY="10000")
    assert ended.stdout == f"{not has_event}\n", ended.stderr


def use_memory_of_a_peer(has_access: bool) -> None:
    Device(1).set_current()
    at, other = int(call(driver.cuMemAlloc(40))), call(driver.cuCtxGetCurrent())
    Device(0).set_current()
    if has_access:
        call(driver.cuCtxEnablePeerAccess(other, 0))
    kernel = call(driver.cuModuleGetFunction(module("copy"), b"fill_4"))
    values = ((at, 7, 10), (ctypes.c_void_p, ctypes.c_uint, ctypes.c_longlong))
    call(driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, values, 0))
    print(driver.cuCtxSynchronize()[0].name)


@pytest.mark.parametrize("has_access", [True, False])
def test_memory_of_another_device_needs_peer_access(has_access: bool) -> None:
    ended = alone(use_memory_of_a_peer, has_access)
    name = "CUDA_SUCCESS" if has_access else "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert ended.stdout == f"{name}\n", ended.stderr


def test_devices_without_peer_access() -> None:
    ended = alone(use_memory_of_a_peer, True, STANDIN_PEERS="0")
    assert "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in ended.stderr


def test_divergent_barriers_are_refused_and_named() -> None:
    """A kernel whose threads wait at different places deadlocks on a GPU."""
    text = 'extern "C" __global__ void halt(int n) { if (threadIdx.x < n) __syncthreads(); }'
    ended = alone(launch_text, text)
    assert "CUDA_ERROR_LAUNCH_FAILED" in ended.stdout, ended.stderr
    assert "deadlock: block 0; thread 0 waits at" in ended.stderr


def launch_text(text: str) -> None:
    Device(0).set_current()
    code = Program(text, "c++", ProgramOptions(arch="sm_80", std="c++17")).compile("cubin").code
    kernel = call(driver.cuModuleGetFunction(call(driver.cuModuleLoadData(code)), b"halt"))
    values = ((5,), (ctypes.c_int,))
    call(driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, values, 0))
    print(driver.cuCtxSynchronize()[0].name)
