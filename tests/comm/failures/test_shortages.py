"""Missing resources raise an error on all ranks before a rank waits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import clean_environment, run_ranks, script_of
from tests.netns import hosts


def _few_files(victim: int, spare: int) -> None:
    import os
    import resource
    import time

    from allreduce import errors
    from allreduce.comm import init, world

    mine = world()
    began = time.monotonic()
    if mine.rank == victim:
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare))
    try:
        init(timeout=50)
    except errors.JoinError as error:
        print(f"{time.monotonic() - began < 25} {error}")


@pytest.mark.parametrize(
    ("transport", "victim"),
    [("shared", 0), ("shared", 1), ("tcp", 0), ("tcp", 1), ("hierarchical", 1)],
)
def test_too_few_file_descriptors_are_an_error_on_all_ranks(transport: str, victim: int) -> None:
    own = {"ALLREDUCE_TRANSPORT": transport}
    results = run_ranks(_few_files, 3, arguments=(victim, 5), env=own)
    for rank, result in enumerate(results):
        carrier, whole = transport, ""
        if transport == "hierarchical":
            carrier, whole = "tcp", f"[{transport}] rank {rank}: its part 'all' failed: "
        said = f"True {whole}[{carrier}] rank {rank}: not joined: rank {victim}: it needs "
        assert result.stdout.startswith(said), results
        assert "file descriptors, but 5 are left of the " in result.stdout
        assert "ulimit -n" in result.stdout
    assert all(result.returncode == 0 for result in results), results


def _strangers(victim: int, spare: int) -> None:
    """Join with no descriptors to spare on the victim, which strangers have called before."""
    import json
    import os
    import resource
    import socket

    from allreduce.comm import init, world

    mine = world()
    strangers = []
    if mine.rank == victim:
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare))
    elif mine.rank == mine.size - 1:
        store = mine.subset(range(mine.size), "world.1").store
        facts = json.loads(store.get(f"{mine.generation}/tcp/world.1/{victim}", 20))
        for _ in range(3 * spare):
            strangers.append(socket.create_connection((facts[2], facts[3])))
            strangers[-1].sendall(b"allreduce")
    print(init(transport="tcp", timeout=20).all_reduce(1))


def test_slow_strangers_do_not_use_up_the_members_descriptors() -> None:
    spare = 2 * 3 + 2 + 8  # of a member that is called and calls
    results = run_ranks(_strangers, 3, arguments=(1, spare))
    assert [result.stdout for result in results] == ["3\n"] * 3, results
    assert "no descriptor is left for new connections" in results[1].stderr


def _no_ports() -> None:
    import multiprocessing
    import os

    from allreduce import errors
    from allreduce.comm import init

    fork = multiprocessing.get_context("fork")
    over = fork.Barrier(4)  # rank 0 has the leader, which the others still ask

    def rank(number: int) -> None:
        try:
            init(rank=number, size=4, leader="127.0.0.1:29000", transport="tcp", timeout=20)
        except errors.AllreduceError as error:
            os.write(1, f"{number} {type(error).__name__} {error}\n".encode())  # in one piece
        over.wait(25)

    ranks = [fork.Process(target=rank, args=(number,)) for number in range(4)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()


def test_no_free_port_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(script_of(_no_ports))
    limit = "echo 41000 41004 > /proc/sys/net/ipv4/ip_local_port_range"
    with hosts(1) as (host,):
        subprocess.run(host.command("sh", "-c", limit), check=True, timeout=20)
        result = subprocess.run(
            host.command(sys.executable, str(script)),
            env={**clean_environment(), "ALLREDUCE_SECRET": "test"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    said = sorted(result.stdout.splitlines())
    assert [line.split()[0] for line in said] == ["0", "1", "2", "3"], result
    assert all("no port is free" in line for line in said), said
    assert all("ip_local_port_range" in line for line in said), said


def _short_of_memory() -> None:
    import resource

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init
    from allreduce.comm.transports.shared import memory

    comm = init().split(0)
    assert comm is not None
    memory.allocate = lambda nbytes: print("made", nbytes)  # type: ignore[assignment, return-value]
    if comm.rank == 1:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        large = np.broadcast_to(1.0, 16 << 20)  # which each of these would copy
        attempts: list[Callable[[], object]] = [
            lambda: comm.all_reduce(large),
            lambda: comm.broadcast([large, large]),
            lambda: comm.send(large, dest=0),
        ]
        for attempt in attempts:
            try:
                attempt()
            except errors.AllreduceError as error:  # before the others hear of it
                print(type(error).__name__, error)
    try:
        comm.empty(32 << 20, "float32")
    except errors.OutOfMemoryError as error:
        print(error)
    print(comm.all_reduce(np.ones(3))[0])
    comm.close()


def test_memory_that_one_rank_cannot_map_is_refused_on_all_before_it_is_made() -> None:
    results = run_ranks(_short_of_memory, 3)
    for rank, result in enumerate(results):
        assert "made" not in result.stdout
        where = f"[shared] world.1/split.1: rank {rank}: empty: no shared memory of "
        assert where in result.stdout, result
        assert "rank 1 got 'Cannot allocate memory'" in result.stdout, result
        assert "; ask for less on every rank, or run fewer ranks on this host" in result.stdout
        assert result.stdout.endswith("3.0\n")
    short = [line for line in results[1].stdout.splitlines() if "this rank has no memory" in line]
    for line, call in zip(short, ("all_reduce", "broadcast", "send"), strict=True):
        said = f"OutOfMemoryError [shared] world.1/split.1: rank 1: {call}: this rank has no memory"
        assert line.startswith(said), results[1]
        assert "pass the array in pieces" in line


def _short_at_the_start() -> None:
    import os
    import resource

    import allreduce.comm
    from allreduce import errors
    from allreduce.cluster import join

    world = allreduce.comm.world()
    assert join is not None
    if world.rank == 1:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), used + (2 << 20)))
    try:
        allreduce.comm.init()
    except errors.OutOfMemoryError as error:
        print(str(error), flush=True)
        os._exit(0)


def test_too_little_memory_for_the_communicator_is_an_error_on_all() -> None:
    for result in run_ranks(_short_at_the_start, 3):
        assert "rank 1 got 'Cannot allocate memory'" in result.stdout, result


def _without_memory_files(transport: str) -> None:
    """Join where a filter of system calls, as a container's, forbids memfd_create."""
    import ctypes
    import platform
    import struct

    import numpy as np

    from allreduce import errors
    from allreduce.comm import init

    number = {"x86_64": 319, "aarch64": 279}[platform.machine()]
    load, equal, give = 0x20, 0x15, 0x06
    rows = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, 0x00050001)]
    rows.append((give, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, program, 0, 0) == 0  # a filter of system calls
    try:
        print(init(transport=transport, timeout=20).all_reduce(np.ones(3))[0])
    except errors.UnsupportedError as error:
        print(error)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_where_memory_files_are_forbidden_the_error_names_the_call_and_the_remedy(
    transport: str,
) -> None:
    for result in run_ranks(_without_memory_files, 2, arguments=(transport,)):
        if transport == "tcp":
            assert result.stdout == "2.0\n", result
            continue
        said = "the system call memfd_create is refused to rank 0 (Operation not permitted)"
        assert said in result.stdout, result
        assert "ALLREDUCE_TRANSPORT=tcp" in result.stdout, result


def _without_proc() -> None:
    import ctypes
    import os
    import time

    from allreduce import errors
    from allreduce.comm import init

    libc = ctypes.CDLL(None)
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
        return print("not root")
    assert libc.mount(b"none", b"/proc", b"tmpfs", 0, None) == 0
    comm = init(transport="shared", timeout=20)
    x = comm.empty((5000,), "float32")
    x[:] = 1
    print(comm.all_reduce(x, out=x)[0])
    if comm.rank == 1:
        while not comm.dead:
            time.sleep(0.01)
        os._exit(0)
    try:
        comm.all_reduce(x, async_op=True).wait(timeout=0.3)
    except errors.TimeoutError as error:
        print(error)


def test_where_proc_is_hidden_ranks_meet_and_take_nobody_for_dead() -> None:
    first, second = run_ranks(_without_proc, 2)
    if first.stdout == "not root\n":
        pytest.skip("only root may hide /proc from a process of its own")
    assert first.stdout.startswith("2.0\n[shared] rank 0: gave up"), first
    assert "is dead" not in first.stdout
    assert second.stdout == "2.0\n", second
