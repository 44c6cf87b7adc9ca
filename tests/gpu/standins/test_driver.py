"""The stand-in driver is as strict as the strictest reading of CUDA's documentation."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions
from cuda.core import launch as launch_kernel

from tests.gpu import launch
from tests.gpu.kernels.calls import call
from tests.harness import script_of

SIMULATED = pytest.mark.skipif(launch.has_driver(), reason="only a simulated GPU is this strict")
SOURCE = """
extern "C" __global__ void add_one(float* x, long long n) {
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
       i += (long long)gridDim.x * blockDim.x)
    x[i] += 1.0f;
}
extern "C" __global__ void overrun(float* x, long long n) { x[n] = 1.0f; }
"""


def run(program: Callable[[], None], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a function in a process of its own, on simulated GPUs."""
    return subprocess.run(
        [sys.executable, "-c", script_of(program)],
        env=launch.environment(2, **environment),
        capture_output=True,
        text=True,
        timeout=100,
        cwd=launch.ROOT,
    )


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device(0)
    made.set_current()
    yield made
    call(driver.cuCtxSynchronize())


def compiled(name: str) -> Any:
    options = ProgramOptions(arch="sm_80", std="c++17")
    return Program(SOURCE, "c++", options).compile("cubin").get_kernel(name)


def test_a_kernel_computes_and_copies_come_back(device: Device) -> None:
    stream, x = device.create_stream(), np.arange(1000, dtype=np.float32)
    at = int(call(driver.cuMemAlloc(x.nbytes)))
    out = np.empty_like(x)
    call(driver.cuMemcpyHtoDAsync(at, x.ctypes.data, x.nbytes, stream.handle))
    config = LaunchConfig(grid=4, block=64)
    launch_kernel(stream, config, compiled("add_one"), at, ctypes.c_longlong(1000))
    call(driver.cuMemcpyDtoHAsync(out.ctypes.data, at, x.nbytes, stream.handle))
    stream.sync()
    call(driver.cuMemFree(at))
    np.testing.assert_array_equal(out, x + 1)


@SIMULATED
def test_new_memory_is_poisoned(device: Device) -> None:
    at, out = int(call(driver.cuMemAlloc(400))), np.zeros(100, np.float32)
    call(driver.cuMemcpyDtoH(out.ctypes.data, at, 400))
    call(driver.cuMemFree(at))
    assert np.isnan(out).all()


@SIMULATED
def test_the_host_must_not_touch_device_memory() -> None:
    def program() -> None:
        import ctypes

        from cuda.bindings import driver
        from cuda.core import Device

        Device(1).set_current()
        _, at = driver.cuMemAlloc(400)
        ctypes.string_at(int(at) + 40, 4)

    ended = run(program)
    assert ended.returncode == -11
    assert "the host touched device memory" in ended.stderr
    assert "byte 40 of the 400 bytes of allocation #1 on device 1" in ended.stderr


@SIMULATED
def test_an_error_of_a_kernel_comes_at_a_later_call() -> None:
    def program() -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        from tests.gpu.standins.test_driver import launch_late_error

        Device(0).set_current()
        assert launch_late_error() == driver.CUresult.CUDA_SUCCESS
        late = driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        assert driver.cuCtxSynchronize() == (late,)
        assert driver.cuMemAlloc(4)[0] == late  # and at every later one

    ended = run(program)
    assert ended.returncode == 0, ended.stderr
    assert "in parameter 0 of kernel add_one" in ended.stderr


def launch_late_error() -> driver.CUresult:
    """Launch a kernel on freed memory; return what the launch itself returns."""
    at = int(call(driver.cuMemAlloc(400)))
    call(driver.cuMemFree(at))
    values = ((at, 1), (ctypes.c_void_p, ctypes.c_longlong))
    function = driver.CUfunction(int(compiled("add_one").handle))
    return driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, values, 0)[0]


@SIMULATED
def test_a_kernel_that_writes_beyond_its_memory_fails() -> None:
    def program() -> None:
        import ctypes

        from cuda.bindings import driver
        from cuda.core import Device

        from tests.gpu.standins.test_driver import compiled

        Device(0).set_current()
        _, at = driver.cuMemAlloc(400)
        values = ((int(at), 100), (ctypes.c_void_p, ctypes.c_longlong))
        function = driver.CUfunction(int(compiled("overrun").handle))
        driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, values, 0)
        assert driver.cuCtxSynchronize() == (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)

    ended = run(program)
    assert ended.returncode == 0, ended.stderr
    assert "kernel overrun wrote outside of allocation #1" in ended.stderr


@SIMULATED
def test_memory_runs_out_at_the_limit_and_comes_back() -> None:
    def program() -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        Device(0).set_current()
        _, at = driver.cuMemAlloc(900)
        assert driver.cuMemAlloc(200)[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        driver.cuMemFree(at)
        assert driver.cuMemAlloc(200)[0] == driver.CUresult.CUDA_SUCCESS

    ended = run(program, STANDIN_MEMORY="1000")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        ("1", [2]),
        ("1,0", [2, 1]),
        ("", []),
        ("0,7,1", [1]),
        ("GPU-5ca1ab1e-0000-4000-8000-000000000002", [2]),
    ],
)
@SIMULATED
def test_visible_devices_count(visible: str, numbers: list[int]) -> None:
    def program() -> None:
        from cuda.bindings import driver

        driver.cuInit(0)
        count = driver.cuDeviceGetCount()[1] or 0
        print([driver.cuDeviceGetUuid_v2(i)[1].bytes[-1] for i in range(count)])

    ended = run(program, CUDA_VISIBLE_DEVICES=visible)
    assert ended.stdout == f"{numbers}\n", ended.stderr


@SIMULATED
def test_every_call_fails_in_a_child_made_by_fork(device: Device) -> None:
    child = os.fork()
    if not child:
        code = driver.cuMemAlloc(4)[0]
        os._exit(code == driver.CUresult.CUDA_ERROR_NOT_INITIALIZED)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
