"""Worlds of one, and properties that a World derives from its members."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading

import pytest

from allreduce import cluster, settings
from allreduce.cluster.store import LocalStore
from allreduce.cluster.world import Member, World
from allreduce.errors import ClosedError, TimeoutError


def test_alone_without_any_word() -> None:
    world = cluster.join()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert world.source == "single"
    assert world.exchange("key", b"mine", 1) == [b"mine"]
    world.close()
    world.close()
    with pytest.raises(ClosedError):
        world.store.set("key", b"")


def test_alone_does_not_import_grpc_or_mpi() -> None:
    code = (
        "import sys; from allreduce import cluster; cluster.join();"
        "print([m for m in ('grpc', 'mpi4py', 'google.protobuf') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "[]", out.stderr


def test_local_store_blocks_until_another_thread_sets() -> None:
    store = LocalStore()
    threading.Timer(0.1, store.set, ("key", b"value")).start()
    assert store.get("key", 25) == b"value"


def test_local_store_times_out_naming_the_key() -> None:
    with pytest.raises(TimeoutError, match="'missing'"):
        LocalStore().get("missing", 0.1)


def test_local_store_closing_wakes_a_waiting_get() -> None:
    store = LocalStore()
    threading.Timer(0.1, store.close).start()
    with pytest.raises(ClosedError):
        store.get("key", 30)


@pytest.mark.parametrize(
    ("source", "launched", "warning"),
    [("mpi", None, [0, 1]), ("leader", 7, [0, 1]), ("leader", None, [0, 1, 2, 3])],
)
def test_one_rank_warns_of_what_its_launcher_gave_to_all_on_its_host(
    source: str, launched: int | None, warning: list[int]
) -> None:
    members = tuple(Member(rank, "name", 1, host) for rank, host in enumerate("abab"))
    read = dataclasses.replace(settings.load({}), launched=launched)
    told = [
        World(1, rank, 4, members, source, "", "", b"", LocalStore())
        for rank in range(len(members))
    ]
    assert [world.rank for world in told if cluster._warns(world, read)] == warning


def test_local_ranks_count_members_of_one_host() -> None:
    members = tuple(Member(rank, "name", 1, host) for rank, host in enumerate("abab"))

    def world(rank: int) -> World:
        return World(1, rank, 4, members, "leader", "", "job", b"", LocalStore())

    assert [(world(r).local_rank, world(r).local_size) for r in range(4)] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ]
