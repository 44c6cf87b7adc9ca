"""Kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu import launch

pytestmark = [
    pytest.mark.torture,
    pytest.mark.timeout(900),
    pytest.mark.skipif(launch.has_driver(), reason="only host builds can be sanitized"),
]
LIBRARIES = {"address,undefined": "libasan.so", "thread": "libtsan.so"}
TESTS = [
    f"tests/gpu/kernels/test_{kernels}.py"
    for kernels in ("elementwise", "rows", "optimizers", "gather", "images")
]


def run(sanitizers: str, *command: str) -> Any:
    """Run Python with a sanitizer's library before all others."""
    compiler = os.environ.get("CXX", "g++")
    library = subprocess.check_output(
        [compiler, f"-print-file-name={LIBRARIES[sanitizers]}"], text=True
    ).strip()
    own = dict(launch.environment(2, STANDIN_SANITIZE=sanitizers))
    own["LD_PRELOAD"] = f"{library}:{own['LD_PRELOAD']}"
    own["XDG_CACHE_HOME"] += f"-{sanitizers.replace(',', '-')}"
    own["ASAN_OPTIONS"] = "detect_leaks=0:handle_segv=0"
    own["TSAN_OPTIONS"] = "report_signal_unsafe=0:exitcode=66"
    return subprocess.run(
        [sys.executable, *command],
        env=own,
        cwd=launch.ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("sanitizers", LIBRARIES)
@pytest.mark.parametrize("tests", TESTS)
def test_kernels_under_sanitizers(tests: str, sanitizers: str) -> None:
    ended = run(sanitizers, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-s", tests)
    assert not ended.returncode, (ended.stdout + ended.stderr)[-6000:]


def launch_wrong(body: str) -> None:
    """Launch a kernel of 64 threads on 64 elements."""
    import numpy as np
    from cuda.bindings import driver
    from cuda.core import Device, Program, ProgramOptions

    from tests.gpu.kernels import calls

    Device(0).set_current()
    source = f'extern "C" __global__ void wrong(float* x) {{ {body} }}'
    options = ProgramOptions(arch="sm_80", std="c++17")
    code = Program(source, "c++", options).compile("cubin").code
    loaded = calls.call(driver.cuModuleLoadData(code))
    calls.module = lambda _: loaded  # type: ignore[assignment]
    calls.run("wrong", "wrong", np.zeros(64, np.float32), grid=1, block=64)
    print("ran")


@pytest.mark.parametrize(
    ("sanitizers", "body", "report"),
    [
        ("address,undefined", "x[threadIdx.x + 1] = 1;", "heap-buffer-overflow"),
        (
            "address,undefined",
            "__shared__ float s[32]; s[threadIdx.x] = 1; __syncthreads(); x[0] = s[1];",
            "index 32 out of bounds",
        ),
        ("address,undefined", "x[0] = 1 << (threadIdx.x + 31);", "runtime error: shift exponent"),
        ("thread", "x[threadIdx.x / 2] = threadIdx.x;", "data race"),
        (
            "thread",
            "__shared__ float s[64]; s[threadIdx.x] = 1; x[threadIdx.x] = s[threadIdx.x ^ 32];",
            "data race",
        ),
    ],
)
def test_a_wrong_kernel_is_found(sanitizers: str, body: str, report: str) -> None:
    text = f"from {__name__} import launch_wrong; launch_wrong({body!r})"
    ended = run(sanitizers, "-c", text)
    assert report in ended.stderr, ended.stdout + ended.stderr
    assert ended.returncode


@pytest.mark.parametrize("sanitizers", LIBRARIES)
def test_a_right_kernel_is_not(sanitizers: str) -> None:
    body = (
        "__shared__ float s[64]; s[threadIdx.x] = 1; __syncthreads(); "
        "x[threadIdx.x] = s[threadIdx.x ^ 32];"
    )
    ended = run(sanitizers, "-c", f"from {__name__} import launch_wrong; launch_wrong({body!r})")
    assert ended.stdout == "ran\n", ended.stderr
    assert not ended.returncode, ended.stderr
