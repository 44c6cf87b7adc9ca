"""JAX's collectives between CPU processes, as one of its ranks: python -m peers.jax_gloo."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from measure.cases import Array, Case
from measure.contest import Contestant

from peers import PEERS
from peers.own_processes import run


class Jax:
    """One device per process; arrays are immutable, so that results are new ones."""

    about = f"JAX {jax.__version__}, gloo"

    def __init__(self, rank: int, ports: list[int]) -> None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{ports[0]}", len(ports), rank)
        mesh = Mesh(np.array(jax.devices()), ("rank",))
        self._spread = NamedSharding(mesh, PartitionSpec("rank"))
        total = partial(jax.lax.psum, axis_name="rank")
        rows, same = PartitionSpec("rank"), PartitionSpec()
        self._sum = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=rows, out_specs=same))
        self._x: Any = None
        self._out: Any = None

    def contestant(self, case: Case) -> Contestant:
        """Make JAX's contestant."""
        return Contestant(
            PEERS["jax"].title,
            case,
            refill=self._refill,
            barrier=lambda: multihost_utils.sync_global_devices("run"),
            call=self._all_reduce,
            result=lambda: np.asarray(self._out.addressable_shards[0].data)[0],
        )

    def slowest(self, seconds: Array) -> Array:
        """Return the element-wise maximum of the ranks' arrays, as float32 like all of JAX."""
        every = np.asarray(multihost_utils.process_allgather(seconds.astype(np.float32)))
        longest: Array = every.reshape(-1, *seconds.shape).max(axis=0)
        return longest.astype(np.float64)

    def _refill(self, source: Array) -> None:
        mine = jax.device_put(source[None], jax.local_devices()[0])
        shape = (jax.process_count(), len(source))
        self._x = jax.make_array_from_single_device_arrays(shape, self._spread, [mine])
        self._x.block_until_ready()

    def _all_reduce(self) -> None:
        self._out = self._sum(self._x).block_until_ready()


if __name__ == "__main__":
    run("jax", Jax)
