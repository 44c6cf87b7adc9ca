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

KERNELS = ROOT / "kernels"
FOLDER = {  # whose sources each test program needs, besides the kernels
    "protocol_test": "shm",
    "p2p_test": "shm",
    "shutdown_test": "shm",
    "bounds_test": "shm",
    "update_test": "shm",
    "tcp_test": "tcp",
}
STANDARD = (
    "algorithm array atomic chrono condition_variable cstring deque functional map memory mutex "
    "optional string thread vector"
)
LEVELS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"],
}
COMMON = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
COMMON += ["-ffp-contract=off", "-fwrapv", f"-I{KERNELS}", "-pthread", "-fno-sanitize-recover=all"]
SANITIZERS = ("thread", "address,undefined")
# Races in every test run; the other sanitizers, which compile all sources anew, in the long one.
RACES_FIRST = ("thread", pytest.param("address,undefined", marks=pytest.mark.torture))
LINES = "-g1"  # for the reports; more would take half as long again
# Checks for undefined behaviour take twice as long to compile where they are then optimized, and
# what is checked runs no faster for it.
LIBRARY = {"thread": (LINES,), "address,undefined": (LINES, "-O0")}
# What is to be checked are the sources and not what tests them. Races have two sides: what a test
# does with its arrays has to be seen beside what the sources do with them.
TEST = {"thread": (LINES,), "address,undefined": (LINES, "-fno-sanitize=all")}

Builder = Callable[[str, str], Path]  # (program, sanitizer) -> the executable
Command = list[str | Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Compile a test program with the native sources; skips if this machine cannot."""
    made: dict[tuple[str, Path], Path] = {}  # of sanitizer and source
    parts: dict[str, list[Path]] = {}

    def program(name: str, sanitizer: str) -> Path:
        folder = tmp_path_factory.mktemp("native")
        flags = compiler_of(sanitizer, folder)
        sources = sorted((KERNELS / FOLDER[name]).rglob("*.cpp")) if name in FOLDER else []
        missing = [one for one in sources if (sanitizer, one) not in made]
        for one in missing:
            made[sanitizer, one] = folder / f"{one.stem}.o"
        target = folder / f"{name}.o"
        source = Path(__file__).parent / f"{name}.cpp"
        commands: list[Command] = [[*flags, *TEST[sanitizer], "-c", source, "-o", target]]
        if missing:
            standard = precompiled([*flags, *LIBRARY[sanitizer]], folder)
            commands += [[*standard, "-c", one, "-o", made[sanitizer, one]] for one in missing]
        if sanitizer not in parts:
            parts[sanitizer], kernels = kernel_commands(folder, flags, sanitizer)
            commands = [*kernels, *commands]
        run_together(commands)
        objects = [*(made[sanitizer, one] for one in sources), target, *parts[sanitizer]]
        run([*flags, *objects, "-o", folder / name])
        return folder / name

    return program


def has_levels(sanitizer: str) -> bool:
    """Say whether kernels are compiled for several instruction sets: for races one will do."""
    return os.uname().machine == "x86_64" and sanitizer != "thread"


def compiler_of(sanitizer: str, folder: Path) -> list[str]:
    """Return the command that compiles for a sanitizer, or skip the test."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = [compiler, *COMMON, f"-fsanitize={sanitizer}"]
    if has_levels(sanitizer):
        flags.append("-DALLREDUCE_X86_LEVELS")
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    if subprocess.run([*flags, probe, "-o", folder / "probe"], capture_output=True).returncode:
        pytest.skip(f"{compiler} lacks -fsanitize={sanitizer}")
    return flags


def precompiled(flags: list[str], folder: Path) -> list[str]:
    """Compile the standard headers, half of the sources' time, once for all of them."""
    header = folder / "standard.h"
    header.write_text("".join(f"#include <{name}>\n" for name in STANDARD.split()))
    run([*flags, "-x", "c++-header", header, "-o", folder / "standard.h.gch"])
    return [*flags, "-include", str(header)]


def kernel_commands(
    folder: Path, flags: list[str], sanitizer: str
) -> tuple[list[Path], list[Command]]:
    """Return the kernels' objects and what compiles them."""
    if sanitizer != "thread":  # 20 s of compiling instead of 64, and none more of running
        flags = [*flags, "-O0"]
    objects: list[Path] = []
    commands: list[Command] = []
    for level, own in LEVELS.items() if has_levels(sanitizer) else [("baseline", [])]:
        if level != "baseline":  # the same operations; checking them triples the time to compile
            own = [*own, "-fno-sanitize=undefined"]
        objects.append(folder / f"{level}.o")
        source = KERNELS / "cpu/reduce/reduce_kernels.cpp"
        commands.append([*flags, *own, f"-DKERNEL_LEVEL={level}", "-c", source, "-o", objects[-1]])
    return objects, commands


def run_together(commands: Iterable[Command]) -> None:
    """Run commands that have to succeed, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(run, commands):
            pass


def run(command: Command, timeout: float = 400) -> str:
    """Run a command that has to succeed; returns its output."""
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **options}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.timeout(600)  # compiling takes most of it
@pytest.mark.parametrize("sanitizer", RACES_FIRST)
def test_protocol(build: Builder, sanitizer: str) -> None:
    assert run([build("protocol_test", sanitizer), "1"]) == "ok\n"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", RACES_FIRST)
def test_shutdown(build: Builder, sanitizer: str) -> None:
    assert run([build("shutdown_test", sanitizer), "1"]) == "ok\n"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sanitizer", RACES_FIRST)
def test_updates(build: Builder, sanitizer: str) -> None:
    assert run([build("update_test", sanitizer), "3"]) == "ok\n"


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_bounds(build: Builder) -> None:
    assert run([build("bounds_test", "address,undefined")]) == "ok\n"


@pytest.mark.timeout(600)
def test_kernels(build: Builder) -> None:
    assert run([build("kernels_test", "address,undefined")]) == "ok\n"


@pytest.mark.torture
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_protocol_for_long(build: Builder, sanitizer: str) -> None:
    assert run([build("protocol_test", sanitizer), "25"], timeout=1100) == "ok\n"
