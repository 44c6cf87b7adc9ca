"""Large buckets that are updated in slices and sent: the bits are those of the plain way.

Replicas of one process use here what members of a network use, and ranks see to the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.comm import Communicator
from allreduce.devices import options
from allreduce.graph.execute import executor
from allreduce.graph.update import sharded_update
from allreduce.reduction import ShardMode, lay_out, plan_buckets, sharding
from tests.graph.eager.eager_cases import NETWORKS, trained
from tests.graph.schedule.test_hazards import check_events, programs_of
from tests.graph.schedule.test_streams import Streamed
from tests.graph.update.test_sharded_update import (
    MAKERS,
    Trained,
    both_ways,
    check_overflow_is_named,
)
from tests.harness import run_ranks, run_threads

_OPS = ("reduce_scatter_bucket", "all_reduce_bucket", "update_own", "all_gather_bucket")


@pytest.fixture(params=[ShardMode.SCATTERED, ShardMode.SUMMED], ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardMode]:
    """Have replicas update two of four buckets in slices, as if none could map another's memory."""
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options(buckets=2000, shard_everywhere=True))
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 3000)
    monkeypatch.setattr(sharded_update, "updates", lambda _: False)
    monkeypatch.setattr(sharded_update, "choose_mode", lambda *_: request.param)
    yield request.param
    ar.config.passes["shard"] = True


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_bits_are_the_same(replicas: int, mode: ShardMode) -> None:
    def work(trained: Trained) -> None:
        trained.run(2)
        trained.optimizer.learning_rate /= 2
        trained.run(1, rows=1)  # none for the others
        state = trained.optimizer.state()
        trained.run(1, eagerly=True)
        trained.optimizer.load_state(state)
        trained.run(1)

    sliced = both_ways(replicas, MAKERS["adam"], work)
    counts = [sliced.operations.count(op) for op in _OPS]
    assert counts == ([2, 3, 2, 2] if mode is ShardMode.SCATTERED else [0, 5, 2, 2])


def test_replicas_of_a_process_go_on_after_an_error(mode: ShardMode) -> None:
    def work(trained: Trained) -> None:
        trained.run(2)

        @ar.function
        def wrong(labels: Any) -> Any:
            return ar.ops.one_hot(labels, 3) * trained.other[0, 0]

        with pytest.raises(ar.UsageError, match="label 7"):
            trained.strategy.run(wrong, args=(ar.PerReplica((np.zeros(1, int), np.full(1, 7))),))
        trained.run(2)
        trained.strategy.close()

    both_ways(2, MAKERS["momentum"], work)


def test_a_sum_that_is_not_finite_is_named(mode: ShardMode) -> None:
    check_overflow_is_named()


@pytest.mark.parametrize("cut", [64, 1 << 20], ids=["many", "one"])
def test_it_is_safe_and_waits_for_nothing_else(
    mode: ShardMode, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SHARDED_BYTES", 200)  # of some
    ar.config.set_buckets(cut)
    strategy = ar.MirroredStrategy(["CPU:0", "CPU:1"])
    results: list[Any] = []

    def run() -> None:
        results.append(trained(NETWORKS["dense"], strategy, eagerly=False))

    programs = programs_of(monkeypatch, run)
    assert "update_own" in {each.node.op for program in programs for each in program.instructions}
    assert check_events(programs) >= 3
    monkeypatch.setattr(executor, "BoundProgram", Streamed)
    monkeypatch.setattr(Streamed, "poisons", True)
    run()
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_count_is_added_up_as_in_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TRANSPORT", "tcp")
    layout = lay_out([("m/0", (1 << 19,)), ("m/1", (1 << 19,))], np.float32)

    def choose(comm: Communicator) -> list[ShardMode]:
        return [
            sharded_update.choose_mode(comm, layout, each) for each in plan_buckets(layout, 1 << 20)
        ]

    # By itself, it would go in another order than a ring's, and fractions add up to another number.
    assert run_threads(choose, 4) == [[ShardMode.SUMMED, ShardMode.SCATTERED]] * 4
    assert run_threads(choose, 2) == [[ShardMode.SCATTERED, ShardMode.SCATTERED]] * 2


def _ranks(hosts: str, dead: int) -> None:
    """Train in slices and plainly, and look at what each rank has of the state."""
    import json
    import os

    if hosts:
        os.environ["ALLREDUCE_HOST"] = hosts[int(os.environ["ALLREDUCE_RANK"])]
    import allreduce as ar
    from tests.graph.update import rank_cases

    ar.config.set_logical_devices("CPU", 2 if hosts else 1)
    strategy = ar.MultiWorkerMirroredStrategy()
    found, modes = rank_cases.train(strategy)
    found |= rank_cases.end(strategy, dead)
    print(json.dumps([found, modes, strategy.communicator.transport]))


@pytest.mark.parametrize(
    ("size", "hosts", "dead", "mode"),
    [(3, "", 1, "scattered"), (3, "aab", 0, "summed")],
    ids=["tcp", "hierarchical"],
)
def test_ranks_update_in_slices_over_a_network(size: int, hosts: str, dead: int, mode: str) -> None:
    env = {} if hosts else {"ALLREDUCE_TRANSPORT": "tcp"}
    results = run_ranks(_ranks, size, env=env, arguments=[hosts, dead])
    if dead:
        del results[1]
    for result in results:
        assert result.stdout, result.stderr
        found, modes, transport = json.loads(result.stdout)
        assert [name for name, well in found.items() if not well] == [], result.stderr
        assert (transport == "tcp") == (not hosts)
        assert mode in modes
