"""MultiWorkerMirroredStrategy: a replica on every device of every rank."""

from __future__ import annotations

import numpy as np
from allreduce.strategies.base import Strategy
from allreduce.strategies.mirrored import deal_out, local_devices

from allreduce import events
from allreduce.comm import Communicator, exchange, init
from allreduce.errors import MismatchError
from allreduce.graph.core import seed
from allreduce.training.facts import check_equal, option, raising_on_all_ranks

_NAME = "MultiWorkerMirroredStrategy"


class MultiWorkerMirroredStrategy(Strategy):
    """Replicates over all ranks' devices; ranks are found as `ar.init` finds them.

    All ranks construct it together. Unless `ar.set_seed` was called, rank 0 draws the seed.

    Args:
        devices_per_replica: Of how many of a rank's devices, one after the other, a replica is
            made: its step can place layers on each.
        collective_group_leader: The task of the cluster (`ALLREDUCE_CLUSTER`, `TF_CONFIG`) that
            hosts the group leader, such as "/job:worker/task:0"; or `host:port`. By default as for
            `ar.init`.

    Raises:
        UsageError: This rank's devices cannot be dealt out evenly.
        MismatchError: Ranks have set different seeds, or numbers of devices per replica, or another
            one cannot deal its devices out; on all ranks.
    """

    def __init__(
        self, *, devices_per_replica: int = 1, collective_group_leader: str | None = None
    ) -> None:
        communicator = init(leader=collective_group_leader)
        with raising_on_all_ranks(communicator, _NAME):
            owned = deal_out(local_devices(), devices_per_replica)
        check_equal(communicator, _NAME, {"devices_per_replica": option(devices_per_replica)})
        here = np.asarray([len(owned)], np.int64)
        counts = exchange(communicator, "the replicas of a strategy", here)[:, 0]
        first = int(counts[: communicator.rank].sum())
        super().__init__(owned, first, int(counts.sum()))
        self._communicator = communicator
        _agree_on_seed(communicator)
        events.logger.info(
            "%s on %s; %s carries collectives",
            events.counted(self.num_replicas_in_sync, "replica"),
            events.counted(communicator.size, "rank"),
            communicator.transport,
        )


def _agree_on_seed(communicator: Communicator) -> None:
    mine = seed.chosen() if communicator.rank == 0 or seed.is_set() else -1
    gathered = exchange(communicator, "the seed", np.asarray([mine], np.int64))
    seeds = [int(each) for each in gathered[:, 0]]
    differing = [rank for rank, each in enumerate(seeds) if each not in (-1, seeds[0])]
    if differing:
        raise MismatchError(
            f"rank {differing[0]} has seed {seeds[differing[0]]} but rank 0 has {seeds[0]}; call "
            "ar.set_seed with one number on all ranks, or on none"
        )
    seed.adopt(seeds[0])
