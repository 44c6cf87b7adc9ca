"""The real NVRTC compiles every kernel file by itself, as C++17, for the architectures we name."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from allreduce.devices.cuda.kernels import rows
from allreduce.devices.cuda.modules import BLOCK
from tests.gpu import launch
from tests.gpu.kernels.calls import SOURCES
from tests.harness import script_of

FILES = sorted(SOURCES.glob("*.cu"))
pytestmark = pytest.mark.skipif(
    find_spec("nvidia") is None or find_spec("nvidia.cuda_nvrtc") is None,
    reason="needs the wheel nvidia-cuda-nvrtc-cu12",
)


def compile_all(path: str, includes: list[str], architectures: list[int]) -> None:
    """Print, for each architecture, how many kernels there are and how many bytes they spill.

    Then the threads that they are compiled for: attribute EIATTR_MAX_THREADS of a cubin.
    """
    import re
    import struct
    from pathlib import Path

    from cuda.bindings import nvrtc

    source = Path(path).read_text().encode()
    for architecture in architectures:
        _, program = nvrtc.nvrtcCreateProgram(source, b"kernel.cu", 0, [], [])
        options = [f"-arch=sm_{architecture}", "-std=c++17", "--ptxas-options=-v"]
        options += [f"-I{folder}" for folder in includes]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
        cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        nvrtc.nvrtcGetCUBIN(program, cubin)
        threads = [
            struct.unpack("<3I", each)
            for each in re.findall(rb"\x04\x05\x0c\x00(.{12})", cubin, re.DOTALL)
        ]
        kernels = len(re.findall(rb"Used \d+ registers", log))
        spilled = sum(map(int, re.findall(rb"(\d+) bytes spill", log)))
        print(kernels, spilled, *(x for x, y, z in threads if (y, z) == (1, 1)))


def compiled(path: str, architectures: list[int]) -> list[list[int]]:
    includes = [str(SOURCES), str(launch.include("cuda_runtime"))]
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-c", script_of(compile_all, path, includes, architectures)]
    ended = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert not ended.returncode, ended.stderr
    return [[int(word) for word in line.split()] for line in ended.stdout.splitlines()]


def test_all_files_are_found() -> None:
    assert {path.stem for path in FILES} >= {"copy", "elementwise", "loss", "optimizers", "reduce"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "architectures", [[70], pytest.param([75, 80, 90, 100], marks=pytest.mark.torture)], ids=str
)
@pytest.mark.timeout(600)
def test_a_file_compiles_without_spills(path: Path, architectures: list[int]) -> None:
    block = rows._THREADS if path.stem == "loss" else BLOCK
    for kernels, spilled, *threads in compiled(str(path), architectures):
        assert kernels > 0
        assert not spilled
        assert set(threads) == {block}
        assert len(threads) % kernels == 0  # a cubin may repeat them


def test_headers_say_how_many_bytes_are_moved() -> None:
    for path in FILES:
        assert "Bytes moved per element" in path.read_text().split("#include")[0], path
