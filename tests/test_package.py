"""`import allreduce`: quick, and yet everything is there as if it had all been imported."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

import allreduce as ar
from tests.cluster.processes import mpirun, run

SOURCE = Path(ar.__file__)
HEAVY = ("numpy", "grpc", "rich", "importlib.metadata", "allreduce.nn", "allreduce.devices")


def python(
    *arguments: str, env: Mapping[str, str] | None = None, folder: Path | None = None
) -> tuple[int, str, str]:
    """Run Python; returns its exit code and what it wrote."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **(env or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_launcher_imports_what_it_needs_and_no_more() -> None:
    program = (
        "import sys; sys.orig_argv.append('allreduce.run'); import allreduce.run; "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert python("-c", program) == (0, "[]\n", "")


# Everything is imported that init imports, and the standard library's finalizers have their hook.
PROCESS = """
import atexit, os, signal, sys, threading, weakref

class Anything: pass

finalizer = weakref.finalize(Anything, int)
at_exit = set()  # atexit tells a count only, which includes functions that were unregistered
register, unregister = atexit.register, atexit.unregister

def count_register(function, *arguments, **named):
    at_exit.add(function)
    return register(function, *arguments, **named)

def count_unregister(function):
    at_exit.discard(function)
    unregister(function)

atexit.register, atexit.unregister = count_register, count_unregister

def process():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    system = vars(SystemExit)["code"], sys.exit, os._exit
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    return dict(os.environ), handlers, system, hooks, set(at_exit)

import numpy, logging
clean = process()
import allreduce as ar
assert process() == clean, "import"
ar.Communicator, ar.nn, ar.MirroredStrategy
import allreduce.cluster.leader.meeting, allreduce.cluster.leader.service
import allreduce.cluster.resolvers.mpi
import allreduce._native, mpi4py
clean = process()
for _ in range(2):
    comm = ar.init()
    assert sys.excepthook is not clean[3][0]
    assert len(at_exit) == len(clean[-1]) + 1
    other = comm.split(0)
    comm.close()
    assert process() != clean, "a communicator is open"
    other.close()
    assert process() == clean, "close"
print(ar.init().size)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_import_changes_nothing_in_the_process_and_close_undoes_what_init_changes(
    size: int, tmp_path: Path
) -> None:
    path = tmp_path / "process.py"
    path.write_text(PROCESS)
    command = mpirun(size, path)
    result = run(command if size > 1 else command[3:])
    assert (result.code, result.out) == (0, f"{size}\n" * size), result


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse(SOURCE.read_text())
    (checked,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == ar.__all__
    for name, (module, attribute) in seen.items():
        assert getattr(ar, name) is getattr(importlib.import_module(module), attribute), name


# Every program in a fork, in which nothing of ours is imported yet, and which ends as any program.
FIRST = """
import json, os, sys
import numpy  # the dearest of what is not ours

def start(program):
    ours, its = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(its, 1)
        os.dup2(its, 2)
        exec(program, {})
        sys.exit()
    os.close(its)
    return child, os.fdopen(ours)

said, programs = {}, sys.argv[1:]
for two in zip(programs[::2], [*programs[1::2], programs[0]]):
    for program, (child, pipe) in [(each, start(each)) for each in two]:
        said[program] = [pipe.read(), os.waitpid(child, 0)[1]]
print(json.dumps(said))
"""


@pytest.mark.torture  # a process for each name
def test_each_name_can_be_the_first_that_is_used() -> None:
    names = [*ar.__all__, "__version__", "graph", "strategies", "errors"]
    programs = [f"import allreduce as ar; ar.{n}; print({n!r} in dir(ar))" for n in names]
    # It finds names alike, but modules in its own way.
    alone = ["init", "MismatchError", "Tensor", "Strategy", "__version__"]
    alone += [name for name in names if inspect.ismodule(getattr(ar, name))]
    programs += [f"from allreduce import {name}; print(True)" for name in alone]
    code, out, err = python("-c", FIRST, *programs)
    assert code == 0, err
    assert json.loads(out) == {program: ["True\n", 0] for program in programs}


@pytest.mark.parametrize(
    ("command", "installed", "missing"),
    [
        (["-c", "import allreduce as ar; ar.init()"], False, "No module named"),
        (["-c", "import allreduce as ar; ar.init()"], True, "'_native'"),
        (["-c", "import allreduce as ar; ar.MirroredStrategy()"], True, "allreduce.strategies'"),
        (["-m", "allreduce.run", "-n", "2", "train.py"], False, "No module named 'typer'"),
    ],
)
def test_a_clone_that_is_not_installed_says_so(
    tmp_path: Path, command: list[str], installed: bool, missing: str
) -> None:
    for name in ("allreduce", "pyproject.toml"):
        (tmp_path / name).symlink_to(SOURCE.parent.parent / name)
    packages = sysconfig.get_path("purelib") if installed else ""
    code, _, err = python("-S", *command, folder=tmp_path, env={"PYTHONPATH": packages})
    assert code == 1
    assert missing in err.splitlines()[-1]
    assert f"from {tmp_path}, a clone that is not installed" in err.splitlines()[-1]
    assert "run `make .venv/.installed` there and use .venv/bin/python" in err.splitlines()[-1]


def test_a_star_import_brings_the_public_names() -> None:
    program = "from allreduce import *; print(sorted(n for n in dir() if not n.startswith('__')))"
    code, out, err = python("-c", program)
    assert (code, ast.literal_eval(out)) == (0, ar.__all__), err


def test_dir_lists_what_has_not_been_used() -> None:
    code, out, err = python("-c", "import allreduce; print(dir(allreduce))")
    assert code == 0, err
    assert set(ast.literal_eval(out)) >= {*ar.__all__, "__version__"}


def test_dir_lists_nothing_that_is_not_for_users() -> None:
    code, out, err = python("-c", "import allreduce as ar; ar.nn; print(dir(ar), '|', dir(ar.nn))")
    assert code == 0, err
    package, rooms = (set(ast.literal_eval(listed)) for listed in out.split("|"))
    assert rooms == set(ar.nn.__all__)
    assert not package.intersection(("sys", "import_module", "TYPE_CHECKING"))


def test_an_unknown_operator_is_one_of_ar_ops() -> None:
    code, _, err = python("-c", "import allreduce as ar; ar.ops.addd")
    assert code == 1
    assert err.endswith("AttributeError: ar.ops has no operator 'addd'; did you mean 'add'?\n")


def test_public_classes_can_be_pickled() -> None:
    for each in (ar.MismatchError, ar.Variable, ar.Communicator, ar.MirroredStrategy, ar.nn.Dense):
        assert pickle.loads(pickle.dumps(each)) is each


def test_an_unknown_name_is_an_attribute_error_that_suggests_the_nearest() -> None:
    assert not hasattr(ar, "Varable")
    code, _, err = python("-c", "import allreduce as ar; ar.Varable")
    assert code == 1
    assert "module 'allreduce' has no attribute 'Varable'. Did you mean: 'Variable'?" in err
    code, _, err = python("-c", "from allreduce import nothing_of_ours")
    assert code == 1
    assert "ImportError: cannot import name 'nothing_of_ours' from 'allreduce'" in err


@pytest.mark.parametrize("moment", ["typer", "allreduce.cluster.launcher.job"])
def test_ctrl_c_while_the_launcher_is_imported_leaves_no_traceback(
    tmp_path: Path, moment: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {moment!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    found = python("-m", "allreduce.run", "-n", "1", "absent.py", env={"PYTHONPATH": str(tmp_path)})
    assert found == (-signal.SIGINT, "", "")


def test_ctrl_c_is_the_programs_own_where_it_is_not_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import allreduce, signal, sys\n"
        "print(signal.getsignal(signal.SIGINT) == signal.default_int_handler)\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    assert python("-m", "program", "allreduce.run", env=env) == (0, "True\n", "")


def test_an_interrupt_waits_for_what_is_being_imported() -> None:
    program = (
        "import os, signal, sys\n"
        "import allreduce as ar\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'allreduce.comm.core.transport': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "try:\n"
        "    ar.init\n"
        "except KeyboardInterrupt:\n"
        "    print('allreduce.comm' in sys.modules, ar.init.__name__)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "True init\n", ended
