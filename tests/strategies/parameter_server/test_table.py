"""Two workers' views of one table, whose updates take a share of each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from allreduce.strategies.server_options import Worker
from allreduce.strategies.server_table import ServerTable

import allreduce as ar
from allreduce.cluster.host import waiting
from allreduce.cluster.spec import ClusterSpec
from allreduce.errors import TimeoutError
from allreduce.server.client.parameter_client import connect_all
from tests.server.clusters import describe

ROWS = np.asarray([1, 2])


@pytest.fixture
def spec() -> ClusterSpec:
    return describe({"ps": 1, "worker": 2})


@pytest.fixture
def server(spec: ClusterSpec) -> Iterator[ar.Server]:
    with ar.Server(spec, "ps", 0) as made:
        yield made


@pytest.fixture
def tables(spec: ClusterSpec, server: ar.Server) -> Iterator[list[ServerTable]]:
    """Return two workers' views of a table of zeros."""
    servers = [connect_all(spec, f"worker:{n}", b"", 20.0) for n in range(2)]
    yield [
        ServerTable(
            *(connected, "table", (10, 2), np.dtype("float32")),
            lambda *_: np.zeros((10, 2), np.float32),
            worker=Worker(f"worker:{n}", n == 0, 2.0, None, 0),
            turn="0",
        )
        for n, connected in enumerate(servers)
    ]
    for connected in servers:
        connected[0].close()


def read(each: ServerTable) -> np.ndarray:
    out = np.empty((2, 2), np.float32)
    each.read(ROWS, out)
    return out


def contribute(each: ServerTable, update: int, share: int) -> None:
    each.add_gradient(ROWS, np.ones((2, 2), np.float32))
    each.contribute(ar.optim.SGD(1.0), 0.5, update, share, 2)
    each.after = update


def test_a_lookup_waits_for_the_rows_of_all_workers(tables: list[ServerTable]) -> None:
    first, second = tables
    contribute(first, 7, share=0)
    with pytest.raises(TimeoutError, match="other workers have not sent their rows"):
        read(first)
    contribute(second, 7, share=1)
    for each in tables:
        assert (read(each) == -2.0).all()


def test_a_worker_names_the_chief_while_a_table_has_no_values(
    tables: list[ServerTable], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "WARN_SECONDS", 0.5)
    with pytest.raises(TimeoutError, match=r"has not initialised table 'table' .* within 2 s"):
        read(tables[1])
    assert "waiting for the chief to initialise table 'table' on /job:ps/task:0" in caplog.text


def test_rows_that_a_restart_without_a_checkpoint_has_lost_are_named(
    spec: ClusterSpec,
    server: ar.Server,
    tables: list[ServerTable],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for share, each in enumerate(tables):
        contribute(each, 7, share)
    assert (read(tables[0]) == -2.0).all()
    server.close()
    with ar.Server(spec, "ps", 0):
        assert (read(tables[0]) == 0.0).all()
    assert "rows 0 to 9 of table 'table' have their initial values again" in caplog.text


def test_lookups_go_on_after_a_restart_that_lost_a_share(
    spec: ClusterSpec, server: ar.Server, tables: list[ServerTable]
) -> None:
    for each in tables:
        assert (read(each) == 0.0).all()
    contribute(tables[0], 7, share=0)
    server.close()
    with ar.Server(spec, "ps", 0):
        contribute(tables[1], 7, share=1)
        for each in tables:
            assert (read(each) == 0.0).all()
        for share, each in enumerate(tables):
            contribute(each, 8, share)
        for each in tables:
            assert (read(each) == -2.0).all()


def test_each_place_of_a_number_gets_its_row_from_the_server_that_has_it() -> None:
    spec = describe({"ps": 2, "worker": 1})
    with ar.Server(spec, "ps", 0), ar.Server(spec, "ps", 1):
        servers = connect_all(spec, "worker:0", b"", 20.0)
        table = ServerTable(
            *(servers, "table", (10, 2), np.dtype("float32")),
            lambda *_: np.arange(20, dtype=np.float32).reshape(10, 2),
            worker=Worker("worker:0", True, 2.0, None, 0),
            turn="0",
        )
        expected = np.arange(20, dtype=np.float32).reshape(10, 2)
        for numbers in (np.asarray([7, 0, 9, 7, 4, 0, 7], np.uint8), np.asarray([6, 5])):
            out = np.full((len(numbers), 2), -1.0, np.float32)
            table.read(numbers, out)
            np.testing.assert_array_equal(out, expected[numbers])
            table.add_gradient(numbers, np.ones_like(out))
            table.push(ar.optim.SGD(1.0), 1.0)
            expected -= np.bincount(numbers, minlength=10)[:, None]
        for server in servers:
            server.close()


def push(each: ServerTable, rate: float) -> None:
    """Look rows up and send their gradients, as a step does."""
    read(each)
    each.add_gradient(ROWS, np.ones((2, 2), np.float32))
    each.push(ar.optim.SGD(rate), 1.0)


def test_the_settings_of_the_chiefs_optimizer_count(
    spec: ClusterSpec, server: ar.Server, tables: list[ServerTable]
) -> None:
    chief, other = tables
    chief.push(ar.optim.SGD(1.0), 1.0)  # of a step without rows
    push(chief, 1.0)
    push(other, 5.0)  # it comes late, or again, and does not know the chief's changes
    assert (read(chief) == -2.0).all()
    server.close()
    with ar.Server(spec, "ps", 0):
        push(other, 5.0)
        push(chief, 1.0)
        push(other, 5.0)
        assert (read(chief) == -7.0).all()
