"""Fixtures of all tests; several logical CPUs, set before the first is used."""

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from allreduce.devices import set_logical_devices

set_logical_devices("CPU", 4)
# The same examples in each run, however long a busy machine takes for them; `make torture` draws.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")
# Ending a run of tests also ends the processes that tests have started.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
# A shell's background jobs ignore these, and so would processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup: only this process ignores it
    signal.signal(signal.SIGHUP, lambda *_: None)

# Where lanes take whole files, the longest go first: left for the end, they would run while the
# other lanes have nothing to do. The first compiles on all cores, which none of the others minds.
LONGEST = (
    "tests/kernels/test_protocol.py",
    "tests/test_wheel.py",
    "tests/comm/transports/shared/test_transport.py",
    "tests/comm/transports/tcp/test_transport.py",
    "tests/comm/transports/mpi/test_transport.py",
    "tests/strategies/test_lifetime.py",
    "tests/comm/transports/hierarchical/test_transport.py",
    "tests/devices/test_budget.py",
    "tests/server/client/test_session.py",
    "tests/benchmarks/test_collectives.py",
    "tests/strategies/test_agreement.py",
)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script."""

    def write(lines: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(lines))
        return path

    return write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first where tests run in lanes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
