"""The native protocol with ranks as threads, and its kernels, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness import ROOT

CPU = ROOT / "kernels" / "cpu"
_SHARED = "direct engine exchanged group member p2p p2p_mail pulled region remote small staged"
SOURCES = {  # of each test program, besides the kernels
    "protocol_test": _SHARED,
    "p2p_test": _SHARED,
    "update_test": _SHARED,
    "tcp_test": "tcp_agreement tcp_connection tcp_diagnostics tcp_endings tcp_engine tcp_execution "
    "tcp_fold tcp_member tcp_messages tcp_plan tcp_small tcp_staging tcp_words",
}
LEVELS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"],
}
COMMON = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
COMMON += ["-ffp-contract=off", "-fwrapv", f"-I{CPU}", "-pthread"]
SANITIZERS = ("thread", "address,undefined")

Builder = Callable[[str, str], Path]  # (program, sanitizer) -> the executable


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Compile a test program with the native sources; skips if this machine cannot."""
    made: dict[tuple[str, str], Path] = {}  # of sanitizer and source
    parts: dict[str, list[Path]] = {}

    def program(name: str, sanitizer: str) -> Path:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        folder = tmp_path_factory.mktemp("native")
        flags = [compiler, *COMMON, f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        probe = folder / "probe.cpp"
        probe.write_text("int main() { return 0; }\n")
        if subprocess.run([*flags, probe, "-o", folder / "probe"], capture_output=True).returncode:
            pytest.skip(f"{compiler} lacks -fsanitize={sanitizer}")
        if sanitizer not in parts:
            parts[sanitizer] = compile_kernels(folder, flags, sanitizer)
        sources = [CPU / f"{one}.cpp" for one in SOURCES.get(name, "").split()]
        sources.append(Path(__file__).parent / f"{name}.cpp")
        missing = [one for one in sources if (sanitizer, one.name) not in made]
        for one in missing:
            made[sanitizer, one.name] = folder / f"{one.stem}.o"
        flags.append("-g1")  # lines for the reports; more would take half as long again
        run_together([*flags, "-c", one, "-o", made[sanitizer, one.name]] for one in missing)
        objects = [made[sanitizer, one.name] for one in sources]
        run([*flags, *objects, *parts[sanitizer], "-o", folder / name])
        return folder / name

    return program


def compile_kernels(folder: Path, flags: list[str], sanitizer: str) -> list[Path]:
    """Compile the kernels: for races one instruction set is as good as all."""
    several = os.uname().machine == "x86_64" and sanitizer != "thread"
    if sanitizer != "thread":  # 20 s of compiling instead of 64, and none more of running
        flags = [*flags, "-O0"]
    objects = [folder / "kernel_table.o"]
    dispatch = ["-DALLREDUCE_X86_LEVELS"] if several else []
    commands: list[list[str | Path]] = []
    commands.append([*flags, *dispatch, "-c", CPU / "kernel_table.cpp", "-o", objects[0]])
    for level, own in LEVELS.items() if several else [("baseline", [])]:
        if level != "baseline":  # the same operations; checking them triples the time to compile
            own = [*own, "-fno-sanitize=undefined"]
        objects.append(folder / f"{level}.o")
        source = CPU / "reduce_kernels.cpp"
        commands.append([*flags, *own, f"-DKERNEL_LEVEL={level}", "-c", source, "-o", objects[-1]])
    run_together(commands)
    return objects


def run_together(commands: Iterable[list[str | Path]]) -> None:
    """Run commands that have to succeed, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(run, commands):
            pass


def run(command: list[str | Path], timeout: float = 400) -> str:
    """Run a command that has to succeed; returns its output."""
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **options}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(600)  # compiling takes most of it
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_protocol(build: Builder, sanitizer: str) -> None:
    assert run([build("protocol_test", sanitizer), "1"]) == "ok\n"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_updates(build: Builder, sanitizer: str) -> None:
    assert run([build("update_test", sanitizer), "3"]) == "ok\n"


@pytest.mark.timeout(600)
def test_kernels(build: Builder) -> None:
    assert run([build("kernels_test", "address,undefined")]) == "ok\n"


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_protocol_for_long(build: Builder, sanitizer: str) -> None:
    assert run([build("protocol_test", sanitizer), "25"], timeout=1100) == "ok\n"
