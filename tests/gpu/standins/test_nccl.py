"""The stand-in NCCL, through nccl4py: results of all calls, and what NCCL leaves undefined."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device
from nccl import core
from nccl.bindings import nccl

from tests.gpu import launch
from tests.gpu.kernels.calls import call

SIMULATED = pytest.mark.skipif(launch.has_driver(), reason="only simulated GPUs are this strict")
FLOAT16, FLOAT32, BFLOAT16 = 6, 7, 9
SUM, PRODUCT, MAX, MIN, MEAN = range(5)
N = 100_003  # more than one chunk of the stand-in
Rank = Callable[["Member"], Any]


class Member:
    """A rank: a thread with a device, a stream and a communicator."""

    def __init__(self, rank: int, size: int, unique: Any) -> None:
        self.rank, self.size = rank, size
        self.device = Device(rank)
        self.device.set_current()
        self.stream = self.device.create_stream()
        self.handle = int(self.stream.handle)
        self.communicator = core.Communicator.init(size, rank, unique)
        self.comm = self.communicator._comm

    def put(self, values: np.ndarray) -> int:
        at = int(call(driver.cuMemAlloc(max(values.nbytes, 4))))
        call(driver.cuMemcpyHtoD(at, values.ctypes.data, values.nbytes))
        return at

    def get(self, at: int, like: np.ndarray) -> np.ndarray:
        self.stream.sync()
        out = np.empty_like(like)
        call(driver.cuMemcpyDtoH(out.ctypes.data, at, out.nbytes))
        return out


def run(fn: Rank, size: int = 2) -> list[Any]:
    """Call `fn` as each rank of one process, with a device each."""
    unique, results = core.get_unique_id(), [None] * size
    errors: list[BaseException] = []

    def start(rank: int) -> None:
        try:
            results[rank] = fn(Member(rank, size, unique))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


def values(rank: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(rank).integers(-8, 8, n).astype(np.float32)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (SUM, values(0) + values(1)),
        (PRODUCT, values(0) * values(1)),
        (MAX, np.maximum(values(0), values(1))),
        (MIN, np.minimum(values(0), values(1))),
        (MEAN, (values(0) + values(1)) / 2),
    ],
)
def test_all_reduce(op: int, expected: np.ndarray) -> None:
    def rank(me: Member) -> np.ndarray:
        x = values(me.rank)
        at = me.put(x)
        nccl.all_reduce(at, at, N, FLOAT32, op, me.comm, me.handle)
        return me.get(at, x)

    for result in run(rank):
        np.testing.assert_array_equal(result, expected)


def test_half_types_are_reduced() -> None:
    def rank(me: Member) -> tuple[np.ndarray, np.ndarray]:
        half = values(me.rank).astype(np.float16)
        brain = (values(me.rank).view(np.uint32) >> 16).astype(np.uint16)
        first, second = me.put(half), me.put(brain)
        nccl.all_reduce(first, first, N, FLOAT16, SUM, me.comm, me.handle)
        nccl.all_reduce(second, second, N, BFLOAT16, SUM, me.comm, me.handle)
        return me.get(first, half), me.get(second, brain)

    expected = values(0) + values(1)
    for half, brain in run(rank):
        np.testing.assert_array_equal(half, expected)
        np.testing.assert_array_equal((brain.astype(np.uint32) << 16).view(np.float32), expected)


def test_a_scaled_sum() -> None:
    def rank(me: Member) -> np.ndarray:
        x, factor = values(me.rank), np.array([0.25], np.float32)
        at = me.put(x)
        op = nccl.red_op_create_pre_mul_sum(factor.ctypes.data, FLOAT32, 1, me.comm)
        nccl.all_reduce(at, at, N, FLOAT32, int(op), me.comm, me.handle)
        nccl.red_op_destroy(int(op), me.comm)
        return me.get(at, x)

    for result in run(rank):
        np.testing.assert_array_equal(result, (values(0) + values(1)) / 4)


def test_the_other_collectives_and_messages() -> None:
    def rank(me: Member) -> dict[str, np.ndarray]:
        x, both = values(me.rank), np.zeros(2 * N, np.float32)
        at, out, wide = me.put(x), me.put(x), me.put(both)
        got = {}
        nccl.broadcast(at, out, N, FLOAT32, 1, me.comm, me.handle)
        got["broadcast"] = me.get(out, x)
        nccl.reduce(at, out, N, FLOAT32, SUM, 0, me.comm, me.handle)
        got["reduce"] = me.get(out, x)
        nccl.all_gather(at, wide, N, FLOAT32, me.comm, me.handle)
        got["all_gather"] = me.get(wide, both)
        nccl.reduce_scatter(wide, out, N, FLOAT32, SUM, me.comm, me.handle)
        got["reduce_scatter"] = me.get(out, x)
        nccl.group_start()
        nccl.send(at, N, FLOAT32, 1 - me.rank, me.comm, me.handle)
        nccl.recv(out, N, FLOAT32, 1 - me.rank, me.comm, me.handle)
        nccl.group_end()
        got["exchanged"] = me.get(out, x)
        return got

    for rank_number, got in enumerate(run(rank)):
        own, other = values(rank_number), values(1 - rank_number)
        np.testing.assert_array_equal(got["broadcast"], values(1))
        total = values(0) + values(1)
        np.testing.assert_array_equal(got["reduce"], total if rank_number == 0 else values(1))
        np.testing.assert_array_equal(got["all_gather"], np.concatenate([values(0), values(1)]))
        np.testing.assert_array_equal(got["reduce_scatter"], 2 * own)
        np.testing.assert_array_equal(got["exchanged"], other)


@SIMULATED
def test_a_host_that_does_not_wait_sees_nothing() -> None:
    seen = threading.Event()

    def rank(me: Member) -> tuple[np.ndarray, np.ndarray]:
        x, other = values(me.rank), me.device.create_stream()
        at, before = me.put(x), np.empty_like(x)
        if me.rank == 1:
            assert seen.wait(20)
        nccl.all_reduce(at, at, N, FLOAT32, SUM, me.comm, me.handle)
        if me.rank == 0:  # the call has returned
            call(driver.cuMemcpyDtoHAsync(before.ctypes.data, at, x.nbytes, int(other.handle)))
            other.sync()
            seen.set()
        return before, me.get(at, x)

    (before, after), _ = run(rank)
    np.testing.assert_array_equal(before, values(0))
    np.testing.assert_array_equal(after, values(0) + values(1))


def test_a_group_takes_effect_at_its_end() -> None:
    both = threading.Barrier(2)

    def rank(me: Member) -> tuple[np.ndarray, np.ndarray]:
        x = values(me.rank)
        at = me.put(x)
        nccl.group_start()
        nccl.all_reduce(at, at, N, FLOAT32, SUM, me.comm, me.handle)
        before = me.get(at, x)
        both.wait(20)
        nccl.group_end()
        return before, me.get(at, x)

    for number, (before, after) in enumerate(run(rank)):
        np.testing.assert_array_equal(before, values(number))
        np.testing.assert_array_equal(after, values(0) + values(1))


def test_split_orders_by_key_and_leaves_out_who_has_no_color() -> None:
    def rank(me: Member) -> tuple[int, int]:
        child = nccl.comm_split(me.comm, 0, -me.rank, 0)
        return int(nccl.comm_user_rank(child)), int(nccl.comm_count(child))

    assert run(rank) == [(1, 2), (0, 2)]


def test_set_up_that_does_not_block() -> None:
    unique = core.get_unique_id()

    def rank(number: int, out: list[Any]) -> None:
        Device(number).set_current()
        config = core.NCCLConfig(blocking=False)
        communicator = core.Communicator.init(2, number, unique, config)
        out.append(communicator)

    first: list[Any] = []
    rank(0, first)  # alone: rank 1 has not come
    assert first[0].get_async_error() == nccl.Result.InProgress
    second: list[Any] = []
    rank(1, second)
    deadline = time.monotonic() + 20
    while any(each.get_async_error() for each in (*first, *second)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@SIMULATED
def test_an_abort_frees_a_collective_that_waits_for_a_rank() -> None:
    aborted = threading.Event()

    def rank(me: Member) -> bool:
        if me.rank == 1:
            assert aborted.wait(30)  # it never calls, and lives while rank 0 aborts
            return True
        at = me.put(values(0))
        nccl.all_reduce(at, at, N, FLOAT32, SUM, me.comm, me.handle)
        time.sleep(0.05)
        event = me.stream.record()
        assert not event.is_done
        aborting = threading.Thread(target=nccl.comm_abort, args=(me.comm,))
        aborting.start()
        event.sync()
        aborting.join()
        aborted.set()
        return True

    assert run(rank) == [True, True]


@SIMULATED
@pytest.mark.parametrize("ends", ["finalize", "destroy"])
def test_a_rank_ends_with_the_last_one(ends: str) -> None:
    """Both calls wait for the other ranks, unless all have finalized before."""
    left = threading.Event()

    def rank(me: Member) -> bool:
        if me.rank == 1:
            time.sleep(0.3)
            assert not left.is_set()
            me.communicator.finalize()
        elif ends == "finalize":
            me.communicator.finalize()
        me.communicator.destroy()
        if me.rank == 0:
            left.set()
        return True

    assert run(rank) == [True, True]


def command(program: Callable[..., None], *arguments: Any) -> list[str]:
    """Return the command that calls a function of this file."""
    text = f"from {__name__} import {program.__name__} as f; f(*{arguments!r})"
    return [sys.executable, "-c", text]


def alone(program: Callable[..., None], *arguments: Any, **more: str) -> Any:
    """Run a function of this file in a process of its own."""
    return subprocess.run(
        command(program, *arguments),
        env=launch.environment(2, **more),
        cwd=launch.ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )


def call_differently(case: str) -> None:
    def rank(me: Member) -> None:
        at, n = me.put(values(me.rank)), 1000
        is_other = me.rank == 1
        if case == "call" and is_other:
            nccl.broadcast(at, at, n, FLOAT32, 0, me.comm, me.handle)
        elif case == "root":
            nccl.broadcast(at, at, n, FLOAT32, me.rank, me.comm, me.handle)
        elif case == "order":
            for count in (n, 500) if is_other else (500, n):
                nccl.all_reduce(at, at, count, FLOAT32, SUM, me.comm, me.handle)
        else:
            count = n - 1 if case == "count" and is_other else n
            op = MAX if case == "operator" and is_other else SUM
            kind = 2 if case == "type" and is_other else FLOAT32  # int32
            nccl.all_reduce(at, at, count, kind, op, me.comm, me.handle)
        me.stream.sync()

    run(rank)


@SIMULATED
@pytest.mark.parametrize("case", ["call", "count", "type", "operator", "root", "order"])
def test_a_mismatch_hangs(case: str) -> None:
    environment = launch.environment(2, STANDIN_NCCL_TIMEOUT="60")
    with subprocess.Popen(
        command(call_differently, case),
        env=environment,
        cwd=launch.ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said = []
            for line in process.stderr or ():
                said.append(line)
                if "they hang" in line:
                    break
            assert "they hang" in said[-1], said
            time.sleep(0.2)
            assert process.poll() is None
        finally:
            process.kill()


def use_two_communicators(is_crossed: bool) -> None:
    second = core.get_unique_id()

    def rank(me: Member) -> None:
        other = core.Communicator.init(2, me.rank, second)._comm
        streams = [int(me.stream.handle), int(call(driver.cuStreamCreate(1)))]
        calls = list(
            zip((me.comm, other), (me.put(values(0)), me.put(values(1))), streams, strict=True)
        )
        for comm, at, stream in reversed(calls) if is_crossed and me.rank else calls:
            before = call(driver.cuEventCreate(0))
            call(driver.cuEventRecord(before, stream))
            nccl.all_reduce(at, at, N, FLOAT32, SUM, comm, stream)
            call(driver.cuEventSynchronize(before))
            time.sleep(0.2)  # it has begun before the next one is enqueued
        for stream in streams:
            call(driver.cuStreamSynchronize(stream))

    run(rank)
    print("ended")


@SIMULATED
@pytest.mark.parametrize("is_crossed", [False, True])
def test_a_collective_holds_its_device(is_crossed: bool) -> None:
    """Two communicators that ranks use in different orders block each other."""
    timeout = "2" if is_crossed else "60"
    ended = alone(use_two_communicators, is_crossed, STANDIN_NCCL_TIMEOUT=timeout)
    assert ended.stdout == ("" if is_crossed else "ended\n"), ended.stderr
    assert ended.returncode == (86 if is_crossed else 0)


def call_after_abort() -> None:
    def rank(me: Member) -> None:
        nccl.comm_abort(me.comm)
        nccl.comm_count(me.comm)

    run(rank, 1)


@SIMULATED
def test_a_call_after_an_abort_ends_the_process() -> None:
    ended = alone(call_after_abort)
    assert ended.returncode == -6
    assert "uses a communicator after its abort" in ended.stderr


def share_a_device() -> None:
    unique, errors = core.get_unique_id(), []

    def rank(number: int) -> None:
        Device(0).set_current()
        try:
            core.Communicator.init(2, number, unique)
        except Exception as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(errors))


@SIMULATED
@pytest.mark.parametrize("allowed", [False, True])
def test_two_ranks_on_one_device_need_leave(allowed: bool) -> None:
    more = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if allowed else {}
    ended = alone(share_a_device, **more)
    assert ended.stdout == ("0\n" if allowed else "2\n"), ended.stderr
    assert ("Duplicate GPU detected" in ended.stderr) != allowed


def lose_a_rank() -> None:
    unique = core.get_unique_id()
    text = f"from {__name__} import die_after_set_up as f; f({unique.as_bytes!r})"
    child = subprocess.Popen([sys.executable, "-c", text])
    me = Member(0, 2, unique)
    at = me.put(values(0))
    nccl.all_reduce(at, at, N, FLOAT32, SUM, me.comm, me.handle)
    child.wait()
    deadline = time.monotonic() + 20
    while me.communicator.get_async_error() != nccl.Result.RemoteError:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    nccl.comm_abort(me.comm)
    me.stream.sync()


def die_after_set_up(unique: bytes) -> None:
    Member(1, 2, core.UniqueId.from_bytes(unique))
    os._exit(1)


@SIMULATED
def test_the_death_of_a_rank_is_an_asynchronous_error() -> None:
    ended = alone(lose_a_rank)
    assert ended.returncode == 0, ended.stderr
