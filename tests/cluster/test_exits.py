"""The status with which a program ends, as its last functions learn it."""

from __future__ import annotations

import sys

import pytest

from allreduce.cluster import exits
from tests.cluster.processes import run

PROGRAM = """
import atexit, sys, threading
from allreduce.cluster import exits

class Mine(SystemExit):
    pass

def function(error):
    raise error

def elsewhere(error):
    thread = threading.Thread(target=function, args=(error,))
    thread.start()
    thread.join()

def caught(error):
    try:
        raise error
    except SystemExit as same:
        assert same.code == error.args[0]

atexit.register(lambda: print(exits.status()))
exits.watch()
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("raise SystemExit", 0),
        ("raise SystemExit(0)", 0),
        ("raise SystemExit('why')", 1),
        ("raise SystemExit(-1)", 255),
        ("raise SystemExit(256)", 0),
        ("function(SystemExit(True))", 1),
        ("function(Mine(4))", 4),
        ("sys.exit(5)", 5),
        ("sys.exit()", 0),
        ("exit(6)", 6),
        ("elsewhere(SystemExit(7))", 0),
        ("caught(SystemExit(8))", 0),
        ("caught(SystemExit(8)); raise SystemExit(9)", 9),
        ("exits.unwatch(); raise SystemExit(3)", None),
        ("exits.watch(); exits.unwatch(); raise SystemExit(3)", 3),
        ("", 0),
    ],
)
def test_it_is_what_the_process_returns(ending: str, status: int | None) -> None:
    result = run([sys.executable, "-c", PROGRAM + ending])
    assert (result.code, result.out) == ((3, "0\n") if status is None else (status, f"{status}\n"))
    assert "Traceback" not in result.err


def test_watching_leaves_nothing_behind() -> None:
    code, leave = vars(SystemExit)["code"], sys.exit
    exits.watch()
    try:
        error = SystemExit(3)
        error.code = 4
        assert (error.code, exits.status()) == (4, 0)
    finally:
        exits.unwatch()
    assert (vars(SystemExit)["code"], sys.exit) == (code, leave)
    assert error.code == 4
