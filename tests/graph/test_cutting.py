"""Buckets that are cut anew from measured times: the bits stay, whoever has which slice."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce import events
from allreduce.devices import options
from allreduce.errors import UsageError
from allreduce.graph import cutting, probing
from allreduce.graph.arena_plan import ArenaPlan
from allreduce.reduction import Arena, Costs, Gradients, sharding
from tests.graph.test_slices import MAKERS, Trained
from tests.harness import run_ranks


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())
    monkeypatch.setattr(cutting, "_WORTH_CUTTING", 1)
    monkeypatch.setattr(cutting, "_LEAST_GAIN", -1e9)  # whatever was measured here
    measure, usual = probing.costs_of, Costs(1e-5, 1e-9, 0.0, 0.0)
    monkeypatch.setattr(cutting, "costs_of", lambda *args: measure(*args) or usual)


def _buckets(trained: Trained) -> int:
    return trained.operations.count("update_slices") + trained.operations.count("update_bucket")


def _both(
    replicas: int,
    make: Callable[[], ar.optim.Optimizer],
    work: Callable[[Trained], object],
    monkeypatch: pytest.MonkeyPatch,
) -> Trained:
    """Do the same with one bucket, and with those that are cut behind the fourth update."""
    monkeypatch.setattr(cutting, "choose_cuts", lambda *_: (1, 3))
    found = []
    for buckets in (1 << 30, None):
        ar.config.set_buckets(buckets)
        found.append(Trained(replicas, make))
        work(found[-1])
    for mine, theirs in zip(*(each.values() for each in found), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    return found[-1]


@pytest.mark.parametrize("slices_from", [1, 3000, 10**9], ids=["slices", "both", "plain"])
@pytest.mark.parametrize(("name", "replicas"), [("adam", 2), ("momentum", 3), ("nesterov", 4)])
def test_the_bits_are_those_of_other_cuts(
    name: str, replicas: int, slices_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", slices_from)
    counts: list[int] = []

    def work(trained: Trained) -> None:
        for _ in range(4):
            trained.run(1)
        counts.append(_buckets(trained))
        trained.run(1, rows=1)  # none for the others
        counts.append(_buckets(trained))
        state = trained.optimizer.state()
        trained.run(2)
        trained.optimizer.load_state(state)
        trained.run(1)

    _both(replicas, MAKERS[name], work, monkeypatch)
    # The second optimizer has one variable; the header goes by itself before slices.
    header = {1: 2, 3000: 1, 10**9: 0}[slices_from]
    assert counts == [2 + header, 2 + header, 2 + header, 4 + header]


def test_what_was_loaded_before_the_change_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)

    def work(trained: Trained) -> None:
        trained.run(2)
        state = trained.optimizer.state()
        trained.run(2)
        monkeypatch.setattr(sharding, "SHARDED_BYTES", 1 << 30)  # none is large any more
        trained.optimizer.load_state(state)
        trained.run(1)
        state = trained.optimizer.state()
        trained.run(1)
        trained.optimizer.load_state(state)
        trained.run(2)
        monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)

    _both(3, MAKERS["adam"], work, monkeypatch)


def test_what_was_loaded_holds_after_an_interrupt_in_the_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)
    settled: list[object] = []

    def work(trained: Trained) -> None:
        trained.run(2)
        state = trained.optimizer.state()
        trained.run(2)
        trained.optimizer.load_state(state)
        if ar.config.get_buckets() is None:
            with monkeypatch.context() as patches:
                patches.setattr(ArenaPlan, "_set_loaded", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    trained.run(1)
        trained.run(3)

    def interrupted(plan: ArenaPlan, arena: Arena) -> None:
        settled.append(arena)
        if len(settled) == 2:
            raise KeyboardInterrupt
        real(plan, arena)

    real = ArenaPlan._set_loaded
    _both(2, MAKERS["adam"], work, monkeypatch)
    assert len(settled) == 2


def test_replicas_go_on_after_an_error_behind_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)

    def work(trained: Trained) -> None:
        trained.run(5)

        @ar.function
        def wrong(labels: Any) -> Any:
            return ar.ops.one_hot(labels, 3) * trained.other[0, 0]

        with pytest.raises(UsageError, match="label 7"):
            trained.strategy.run(wrong, args=(ar.PerReplica((np.zeros(1, int), np.full(1, 7))),))
        trained.run(3)
        assert _buckets(trained) > 3

    _both(2, MAKERS["adam"], work, monkeypatch)


def test_first_steps_are_measured_and_the_choice_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(events.logger, "handlers", [caplog.handler])  # strategies add theirs
    known: list[tuple[Gradients, Costs, int]] = []

    def choose(step: Gradients, costs: Costs, limit: int) -> tuple[int, ...]:
        known.append((step, costs, limit))
        return (2,) if len(step.ready) > 1 else ()

    monkeypatch.setattr(cutting, "choose_cuts", choose)
    trained = Trained(2, MAKERS["adam"])
    with caplog.at_level("INFO", "allreduce"):
        trained.run(6)
    ((step, costs, limit),) = known
    assert 0 < min(step.ready) <= max(step.ready) <= step.computed
    assert step.ready[0] <= step.ready[-1]  # the arena is laid out in the order of gradients
    assert costs.latency + costs.per_byte > 0
    assert costs.update_per_byte > 0
    assert 0 <= costs.beside <= 1
    assert limit == 4 << 20
    latest = trained.strategy.latest(trained.step)
    assert latest is not None
    first, _, begins, *_ = (span.name for span in latest.updates[0][1].layout.spans)
    assert "Adam: from update 5 on, 2 buckets instead of 1, as a step should take" in caplog.text
    assert f"ar.config.set_buckets(['{first}', '{begins}']) fixes them" in caplog.text
    ar.observe.explain(trained.strategy, trained.step)
    assert "2 buckets, as a step should take " in capsys.readouterr().out


def test_a_graph_that_is_asked_for_has_the_latest_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "choose_cuts", lambda *_: (1, 3))
    trained = Trained(2, MAKERS["adam"])
    trained.run(4)
    trained.run(1, eagerly=True)
    assert _buckets(trained) == 2
    (batch,) = trained.strategy.distribute_dataset([(trained.x,)])
    with trained.strategy.scope():
        shown = trained.step.graph(*batch)
    assert str(shown).count("update_bucket") == _buckets(trained) == 4


def test_what_only_noise_speaks_for_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events.logger, "handlers", [caplog.handler])
    seconds = count(100, -1)  # the later, the less: a small collective comes first
    monkeypatch.setattr(probing, "_exposed", lambda *_: next(seconds))
    monkeypatch.setattr(cutting, "costs_of", probing.costs_of)
    monkeypatch.setattr(cutting, "choose_cuts", lambda *_: (1,))
    trained = Trained(2, MAKERS["adam"])
    with caplog.at_level("INFO", "allreduce"):
        trained.run(6)
    assert next(seconds) < 80
    assert _buckets(trained) == 2
    said = "Adam: from update 5 on, 1 bucket as before, as a large collective took no longer than a"
    assert said in caplog.text


def test_what_is_not_worth_it_stays(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(events.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(cutting, "_LEAST_GAIN", 0.05)
    trained = Trained(2, MAKERS["adam"])
    monkeypatch.setattr(cutting, "choose_cuts", lambda *_: (1,))
    monkeypatch.setattr(cutting, "modelled_end", lambda step, costs, cuts: 1.0 - 0.04 * len(cuts))
    with caplog.at_level("INFO", "allreduce"):
        trained.run(6)
    assert _buckets(trained) == 2
    why = "as others promise too little beside the 1000.00 ms that a step should take (a collective"
    assert f"Adam: from update 5 on, 1 bucket as before, {why} takes " in caplog.text
    ar.observe.explain(trained.strategy, trained.step)
    assert f"1 bucket, {why} takes " in capsys.readouterr().out


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
        assert plan.cutting is None
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
    """Cut buckets anew on several ranks, of which only rank 0 has measured anything."""
    import json

    import numpy as np

    import allreduce as ar
    from allreduce.graph import cutting, probing
    from allreduce.reduction import Costs, sharding

    cutting._WORTH_CUTTING, cutting._LEAST_GAIN, sharding.SHARDED_BYTES = 1, -1e9, 1
    strategy = ar.MultiWorkerMirroredStrategy()
    rank = strategy.communicator.rank
    vars(cutting)["choose_cuts"] = lambda *_: (1,) if rank == 0 else (2,)
    measure, usual = probing.costs_of, Costs(1e-5, 1e-9, 0.0, 0.0)
    vars(cutting)["costs_of"] = lambda *args: measure(*args) or usual
    found: list[list[Any]] = []

    def choose_none(*_: object) -> None:
        raise ValueError("no choice")

    for buckets in (None, 1 << 30, 4 << 20 if rank else None, None):
        ar.config.set_buckets(buckets)
        if len(found) == 5:
            vars(cutting)["choose_cuts"] = choose_none
        with strategy.scope():
            weights = [ar.Variable(np.eye(40) / 2, name=f"m/{i}") for i in range(3)]
            optimizer = ar.optim.Adam(0.01)

        def loss(x: ar.Tensor, weights: tuple[ar.Variable, ...]) -> ar.Tensor:
            for each in weights:
                x = ar.ops.tanh(x @ each)
            return ar.ops.sum(x, axis=1)

        step = ar.function(lambda x, o=optimizer, w=tuple(weights): o.minimize(loss(x, w), w))
        x = np.random.default_rng(rank).normal(size=(2 + rank, 40))
        try:
            for count in range(7):  # one rank looks at one of them
                strategy.run(step, args=(x,), eagerly=rank == 0 and count == 2)
        except ar.MismatchError as error:
            found.append([count, str(error).partition("; ")[0]])
            continue
        except (ValueError, ar.PeerLostError) as error:
            print(json.dumps([*found, [count, "no choice" in str(error)]]))
            return
        latest = strategy.latest(step)
        assert latest is not None
        found.append([each.first for each in latest.updates[0][1].buckets])
        state = optimizer.state() if rank == 0 else {}
        strategy.communicator.barrier()
        values = [*state.values(), *(each.numpy() for each in weights)]
        found.append([float(value.sum()) for value in values])


def test_all_ranks_do_what_rank_0_has_chosen() -> None:
    first, second = (json.loads(each.stdout) for each in run_ranks(_ranks, 2, timeout=60))
    assert first[0] == second[0] == [0, 1]
    assert first[2] == second[2] == [0]
    assert first[1] == first[3]
    assert second[1] == second[3]
    none, size = (f"ar.config.set_buckets({each})" for each in (None, 4 << 20))
    differ = f"{none} holds on rank 0 but {size} on rank 1"
    assert [first[4], second[4]] == [[0, f"rank {rank}: {differ}"] for rank in range(2)]
    assert first[5] == second[5] == [4, True]  # what goes wrong as rank 0 chooses, all hear of
