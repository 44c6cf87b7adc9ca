"""Programs on real streams: a thread each, ordered by nothing but the program's events."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.devices import options
from allreduce.graph.execute import executor
from allreduce.graph.execute.bound_program import BoundProgram
from allreduce.graph.execute.reports import end
from allreduce.graph.schedule.program_facts import ProgramFacts
from allreduce.graph.schedule.streams import StreamName
from allreduce.reduction import sharding
from tests.graph.eager.eager_cases import NETWORKS, trained
from tests.graph.execute.test_inter_op_threads import Split
from tests.graph.schedule.footprint import footprints
from tests.graph.schedule.test_hazards import Recurrent

DEADLINE = 40.0  # seconds that an event may take


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ar.config.set_logical_devices("CPU", 4)
    monkeypatch.setattr(options, "_current", options.Options())


class Streamed(BoundProgram):
    """Runs each stream in a thread, which dawdles; values that nothing needs any more are poisoned.

    Poison needs a place for each value of its own: what is shared poisons itself.
    """

    poisons = False
    seed = 0

    def __init__(self, facts: ProgramFacts, *rest: Any, **named: Any) -> None:
        if self.poisons:
            facts = ProgramFacts(replace(facts.program, blocks=None))
        super().__init__(facts, *rest, **named)

    def _in_order(self, made: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        self._random = random.Random(self.seed)
        self._uses = footprints(self.program)
        return [lambda: self._run_streams(made)]

    def _run_streams(self, made: Sequence[Callable[[], None]]) -> None:
        over = [threading.Event() for _ in made]
        left = Counter(use.region for each in self._uses for use in each)
        failures: list[BaseException] = []
        guard = threading.Lock()

        def run(stream: StreamName) -> None:
            try:
                with np.errstate(all="ignore"):
                    for index, instruction in enumerate(self.program.instructions):
                        if instruction.stream == stream and not failures:
                            for i in instruction.waits:
                                assert over[i].wait(DEADLINE), f"{instruction} waits for {i}"
                            time.sleep(self._random.choice((0.0, 0.0, 1e-4, 1e-3)))
                            made[index]()
                            end(self.frame, instruction.node.id)
                            self._poison(index, left, guard)
                            over[index].set()
            except BaseException as error:
                failures.append(error)
                for each in over:
                    each.set()

        streams = {each.stream for each in self.program.instructions}
        threads = [threading.Thread(target=run, args=(each,)) for each in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _poison(self, index: int, left: Counter[Any], guard: threading.Lock) -> None:
        """Overwrite values when their last use is over."""
        with guard:
            for use in self._uses[index]:
                left[use.region] -= 1
                kind, number = use.region[:2]  # type: ignore[index]
                if self.poisons and kind == "value" and not left[use.region]:
                    array = self.frame.values.get(number)
                    if array is not None and not array.flags.owndata:
                        array.reshape(-1).view(np.uint8).fill(0xFF)  # NaN, or -1


@pytest.mark.parametrize("poisons", [False, True], ids=["shared memory", "poisoned"])
@pytest.mark.parametrize("network", [*NETWORKS, "split", "scan", "sliced", "many buckets"])
def test_training_gives_the_same_bits(
    network: str, poisons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if network == "sliced":
        monkeypatch.setattr(sharding, "SHARDED_BYTES", 1)
    elif network == "many buckets":
        monkeypatch.setattr(sharding, "SHARDED_BYTES", 200)  # of some
        ar.config.set_buckets(64)
    split = network == "split"
    makers: dict[str, Callable[[], Any]] = {**NETWORKS, "split": Split, "scan": Recurrent}
    make = makers.get(network, NETWORKS["dense"])
    owned = [f"CPU:{i}" for i in range(4 if split else 2)]
    strategy = ar.MirroredStrategy(owned, devices_per_replica=2 if split else 1)
    wanted = trained(make, strategy, eagerly=False)
    monkeypatch.setattr(executor, "BoundProgram", Streamed)
    monkeypatch.setattr(Streamed, "poisons", poisons)
    for seed in range(2):
        monkeypatch.setattr(Streamed, "seed", seed)
        for one, other in zip(trained(make, strategy, eagerly=False), wanted, strict=True):
            np.testing.assert_array_equal(one, other)
