"""Timelines: what all ranks did, on one clock, in a file that trace viewers read."""

from __future__ import annotations

import json
import re
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce import events
from allreduce.errors import UsageError
from tests.harness import run_ranks


def _recorded(folder: str) -> None:
    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Input((6,)), ar.nn.Dense(4), ar.nn.Dense(3)])
        model.compile("adam", ar.nn.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((16, 6), np.float32), np.zeros(16, np.int64)
    with ar.observe.timeline(f"{folder}/trace.json"):
        model.fit(x, y, batch_size=8, verbose=0)
    rank = strategy.communicator.rank
    try:
        with ar.observe.timeline(f"{folder}/failed.json"):
            model.fit(x, y, batch_size=8, verbose=0)
            raise RuntimeError("enough")
    except RuntimeError:
        print("raised")
    try:
        with ar.observe.timeline(f"{folder}/{rank}.json"):
            print("entered")
    except ar.MismatchError as error:
        print(rank, error)
    try:
        with ar.observe.timeline(f"{folder}/none/trace.json"):
            print("entered")
    except (ar.UsageError, ar.MismatchError) as error:
        print(rank, error)
    ar.observe.explain(strategy, model.train_step)


def test_a_timeline_has_all_ranks_instructions_in_order(tmp_path: Path) -> None:
    first, second = run_ranks(_recorded, 2, arguments=[str(tmp_path)])
    assert first.returncode == second.returncode == 0, (first, second)
    for rank, result in enumerate((first, second)):
        raised, others, _, *explained = result.stdout.splitlines()
        # A process does its part of calls in shared memory while it waits for them, never before.
        hidden = [each for each in explained if "; 0% of its 384 B was hidden behind" in each]
        assert len(hidden) == (rank == 0)
        assert raised == "raised"
        assert others.startswith(f"{rank} timeline on rank {rank}: the path ")
        assert "0.json" in others and "1.json" in others  # noqa: PT018 - both of them
    assert "\n0 timeline on rank 0: cannot write " in first.stdout
    assert "\n1 timeline on rank 1: rank 0 raised UsageError" in second.stdout
    lanes = _lanes(tmp_path / "trace.json")
    names = {
        f"replica {rank} CPU:0 {stream}" for rank in (0, 1) for stream in ("compute", "collective")
    }
    assert names < set(lanes)
    for rank in (0, 1):
        compute, reduced = (lanes[f"replica {rank} CPU:0 {s}"] for s in ("compute", "collective"))
        assert [each["args"]["step"] for each in reduced] == [1, 2]
        assert {"matmul", "update_bucket", "wait for all_reduce_bucket"} < _names(compute)
        for one, other in pairwise(compute):
            assert one["ts"] + one["dur"] <= other["ts"] + 1  # microseconds, as rounded
        waits = [each for each in compute if each["name"] == "wait for all_reduce_bucket"]
        for whole, wait in zip(reduced, waits, strict=True):
            assert whole["ts"] <= wait["ts"] <= whole["ts"] + whole["dur"] + 1
            assert whole["args"]["exposed"] * 1e6 == pytest.approx(wait["dur"], abs=1)
            assert whole["args"]["bytes"] == (16 + 32 + 16 + 16 + 16) * 4  # with the header
        parts = {each["args"].get("part", "") for each in compute}
        assert {"sequential/0", "gradient of sequential/0", "gradient of the loss"} < parts
    begun = [lanes[f"replica {rank} CPU:0 collective"][0] for rank in (0, 1)]
    assert begun[0]["ts"] < begun[1]["ts"] + begun[1]["dur"]  # one clock: they overlap
    assert begun[1]["ts"] < begun[0]["ts"] + begun[0]["dur"]
    for rank in (0, 1):
        assert f"replica {rank} CPU:0 compute" in _lanes(tmp_path / f"failed.rank{rank}.json")
    assert not (tmp_path / "failed.json").exists()


def _lanes(path: Path) -> dict[str, list[dict[str, Any]]]:
    events = json.loads(path.read_text())["traceEvents"]
    named = [each for each in events if each["name"] == "thread_name"]
    found: dict[str, list[dict[str, Any]]] = {}
    for lane in named:
        place = lane["pid"], lane["tid"]
        own = [each for each in events if each["ph"] == "X" and (each["pid"], each["tid"]) == place]
        found[lane["args"]["name"]] = sorted(own, key=lambda each: each["ts"])
    return found


def _names(events: list[dict[str, Any]]) -> set[str]:
    return {each["name"] for each in events}


def test_a_timeline_of_threads_has_all_that_they_did(tmp_path: Path) -> None:
    ar.config.threading.set_inter_op_parallelism_threads(2)
    try:

        @ar.function
        def step(x: ar.Tensor) -> ar.Tensor:
            return ar.ops.exp(x) @ x + ar.ops.tanh(x) @ x

        x = np.ones((2, 2))
        step(x)
        with ar.observe.timeline(tmp_path / "trace.json"):
            step(x)
    finally:
        ar.config.threading.set_inter_op_parallelism_threads(1)
    lanes = _lanes(tmp_path / "trace.json").values()
    assert {"exp", "tanh"} <= {name for lane in lanes for name in _names(lane)}
    for lane in lanes:
        for one, other in pairwise(lane):
            assert one["ts"] + one["dur"] <= other["ts"] + 1  # viewers show no overlaps


def test_only_what_a_span_contains_lies_in_its_lane(tmp_path: Path) -> None:
    with ar.observe.timeline(tmp_path / "trace.json"):
        with events.span("compile", replica=0, stream="compute"):
            for name in ("trace", "place"):
                with events.span(name, replica=0, stream="compute"):
                    pass
            helper = threading.Thread(target=_reported, args=("exp", "compute", 0.0))
            helper.start()
            helper.join()
        _reported("long", "collective", 2.0)
        _reported("short", "collective", 1.0)  # while the other one is under way
    lanes = {name: _names(lane) for name, lane in _lanes(tmp_path / "trace.json").items()}
    assert lanes == {
        "replica 0 compute": {"compile", "trace", "place"},
        "replica 0 compute 2": {"exp"},
        "replica 0 collective": {"long"},
        "replica 0 collective 2": {"short"},
    }


def _reported(name: str, stream: str, seconds: float) -> None:
    events.report(name, time.perf_counter(), seconds, {"replica": 0, "stream": stream})


def test_the_error_of_the_block_is_raised_whatever_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()

    def fail() -> None:
        folder.rmdir()
        raise ValueError("the block's")

    with pytest.raises(ValueError, match="the block's"), ar.observe.timeline(folder / "trace.json"):
        fail()
    assert "cannot write the timeline" in caplog.text


def test_paths_that_are_none_are_refused(tmp_path: Path) -> None:
    for path, said in ((3, "to a file; name one, not 3"), ("trace.txt", "call the file .json")):
        with pytest.raises(UsageError, match=said):
            ar.observe.timeline(path)  # type: ignore[arg-type]
    (tmp_path / "folder.json").mkdir()
    for name in ("folder.json", f"{'long' * 99}.json", "none/trace.json"):
        refused = ar.observe.timeline(tmp_path / name)
        with pytest.raises(UsageError, match=r"^cannot write the timeline.*: .*; "):
            refused.__enter__()  # before the block runs
    timeline = ar.observe.timeline(tmp_path / "trace.json")
    with timeline, pytest.raises(UsageError, match="is being recorded already"):
        timeline.__enter__()


def test_a_full_disk_is_told_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.symlink_to("/dev/full")
    said = f"cannot write the timeline {path}: No space left on device; make room there"
    with pytest.raises(UsageError, match=re.escape(said)), ar.observe.timeline(path):
        pass
