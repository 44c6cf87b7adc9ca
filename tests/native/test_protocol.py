"""The native protocol with ranks as threads, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness import ROOT

CPU = ROOT / "kernels" / "cpu"
NAMES = "direct engine group kernel_table member region small staged"
LEVELS = {
    "baseline": [],
    "avx2": ["-mavx2"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
COMMON = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
COMMON += ["-ffp-contract=off", "-fwrapv", f"-I{CPU}", "-pthread"]


def build(folder: Path, sanitizer: str) -> Path:
    """Compile the test program; skips if this machine cannot."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = [*COMMON, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    if subprocess.run(
        [compiler, *flags, probe, "-o", folder / "probe"], capture_output=True
    ).returncode:
        pytest.skip(f"{compiler} lacks -fsanitize={sanitizer}")
    levels = LEVELS if os.uname().machine == "x86_64" else {"baseline": []}
    if len(levels) > 1:
        flags.append("-DALLREDUCE_X86_LEVELS")
    objects = []
    for level, own in levels.items():
        objects.append(folder / f"{level}.o")
        source = CPU / "reduce_kernels.cpp"
        define = f"-DKERNEL_LEVEL={level}"
        run([compiler, *flags, *own, define, "-c", source, "-o", objects[-1]])
    program = folder / "protocol_test"
    sources = [CPU / f"{name}.cpp" for name in NAMES.split()]
    test = Path(__file__).parent / "protocol_test.cpp"
    run([compiler, *flags, *sources, test, *objects, "-o", program])
    return program


def run(command: list[str | Path], timeout: float = 250) -> str:
    """Run a command that has to succeed; returns its output."""
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **options}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


SANITIZERS = ("thread", "address,undefined")


@pytest.mark.timeout(300)  # compiling takes most of it
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_protocol(tmp_path: Path, sanitizer: str) -> None:
    assert run([build(tmp_path, sanitizer), "1"]) == "ok\n"


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_protocol_for_long(tmp_path: Path, sanitizer: str) -> None:
    assert run([build(tmp_path, sanitizer), "25"], timeout=1100) == "ok\n"
