"""Where an optimizer's buckets are cut: the bits stay the same, and ranks agree."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce import events
from allreduce.devices import options
from allreduce.errors import UsageError
from allreduce.reduction import sharding
from tests.graph.update.test_sharded_update import MAKERS, Trained
from tests.harness import run_ranks


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())


@pytest.mark.parametrize("slices_from", [1, 3000, 10**9], ids=["slices", "both", "plain"])
@pytest.mark.parametrize(("name", "replicas"), [("adam", 2), ("momentum", 3), ("nesterov", 4)])
def test_the_bits_are_those_of_other_cuts(
    name: str, replicas: int, slices_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", slices_from)
    found: list[list[np.ndarray]] = []
    for buckets in (1 << 30, 2000):
        ar.config.set_buckets(buckets)
        trained = Trained(replicas, MAKERS[name])
        trained.run(2)
        trained.run(1, rows=1)  # none for the others
        trained.optimizer.load_state(trained.optimizer.state())
        trained.run(2)
        found.append(trained.values())
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_default_is_buckets_of_4_mib() -> None:
    def firsts(choice: int | None) -> list[int]:
        ar.config.set_buckets(choice)
        strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            weights = [ar.Variable(np.zeros(1 << 20, "float32"), name=f"w/{i}") for i in range(3)]
            optimizer = ar.optim.SGD(0.1)

        @ar.function
        def step(x: Any) -> None:
            optimizer.minimize(sum((ar.ops.sum(w) for w in weights), x), weights)

        for _ in range(6):  # it stays so, however long steps take
            strategy.run(step, args=(np.float32(1),))
        latest = strategy.latest(step)
        assert latest is not None
        return [each.first for each in latest.updates[0][1].buckets]

    assert firsts(None) == firsts(4 << 20) == [0, 1, 2]
    assert firsts(12 << 20) == [0]


def test_buckets_are_fixed_by_hand(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events.logger, "handlers", [caplog.handler])

    def spans(choice: Any) -> list[list[str]]:
        ar.config.set_buckets(choice)
        assert ar.config.get_buckets() == (tuple(choice) if isinstance(choice, list) else choice)
        trained = Trained(2, MAKERS["adam"])
        trained.run(6)
        latest = trained.strategy.latest(trained.step)
        assert latest is not None
        plan = latest.updates[0][1]
        return [[s.name for s in plan.layout.spans[b.first : b.last]] for b in plan.buckets]

    names = ["m/4", "m/2", "m/3", "m/0", "m/1"]
    whole = spans(1 << 30)
    assert sorted(whole[0]) == sorted(names)
    names = whole[0]
    assert spans([names[1], names[3]]) == [names[:1], names[1:3], names[3:]]
    assert spans([names[2].partition("/")[2]]) == [names[:2], names[2:]]
    assert spans(1) == [[name] for name in names]
    assert "no bucket begins" not in caplog.text
    assert spans(["m/O"]) == [names]
    assert "Adam: no bucket begins with 'm/O', as it updates no variable of such" in caplog.text
    caplog.clear()
    assert spans(["m/O", names[2], "m/other"]) == [names[:2], names[2:]]
    assert spans([names[0]]) == [names]
    assert spans([]) == [names]
    assert "no bucket begins" not in caplog.text  # some are the other optimizer's


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "m/0", [1], {"m/0"}, ["m/0", "m/1", "m/0"]])
def test_what_cuts_no_buckets_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"bucket"):
        ar.config.set_buckets(wrong)


def _ranks() -> None:
    """Choose buckets on two ranks: the same, and then others on each."""
    import json

    import numpy as np

    import allreduce as ar

    strategy = ar.MultiWorkerMirroredStrategy()
    rank = strategy.communicator.rank
    found: list[Any] = []
    for buckets in (["m/0"], 1 << 10 if rank else None, 4 << 20 if rank else None):
        ar.config.set_buckets(buckets)
        with strategy.scope():
            weights = [ar.Variable(np.eye(40) / 2, name=f"m/{i}") for i in range(2)]
            optimizer = ar.optim.Adam(0.01)

        def loss(x: ar.Tensor, weights: tuple[ar.Variable, ...]) -> ar.Tensor:
            for each in weights:
                x = ar.ops.tanh(x @ each)
            return ar.ops.sum(x, axis=1)

        step = ar.function(lambda x, o=optimizer, w=tuple(weights): o.minimize(loss(x, w), w))
        try:
            strategy.run(step, args=(np.ones((2, 40)),))
        except ar.MismatchError as error:
            found.append(str(error).partition("; ")[0])
            continue
        latest = strategy.latest(step)
        assert latest is not None
        plan = latest.updates[0][1]
        found.append([plan.layout.spans[each.first].name for each in plan.buckets])
    print(json.dumps(found))


def test_ranks_cut_alike() -> None:
    found = [json.loads(each.stdout) for each in run_ranks(_ranks, 2, timeout=60)]
    choices = [
        f"ar.config.set_buckets({size}) on rank {rank}" for rank, size in enumerate((None, 1024))
    ]
    differ = f"the choice of buckets is {' but '.join(choices)}"
    for rank, (named, refused, default) in enumerate(found):
        assert named == ["m/1", "m/0"]  # in the order of their gradients
        assert refused == f"rank {rank}: {differ}"
        assert len(default) == 1  # 4 MiB is the default
