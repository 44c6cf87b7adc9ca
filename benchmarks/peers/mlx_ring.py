"""MLX's ring over TCP, as one of its ranks: python -m peers.mlx_ring."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from measure.cases import Array, Case
from measure.contest import Contestant

from peers import PEERS
from peers.own_processes import run


class Ring:
    """MLX's group of all ranks; its arrays are immutable, so that results are new ones."""

    about = f"the ring of MLX {version('mlx')}"

    def __init__(self, rank: int, ports: list[int]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            hosts = Path(folder) / "hosts.json"
            hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
            os.environ |= {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
            self._group = mx.distributed.init(strict=True, backend="ring")
        self._x = self._out = mx.zeros(1)

    def contestant(self, case: Case) -> Contestant:
        """Make MLX's contestant."""
        return Contestant(
            PEERS["mlx"].title,
            case,
            refill=self._refill,
            barrier=self._barrier,
            call=self._all_reduce,
            result=lambda: np.asarray(self._out),
        )

    def slowest(self, seconds: Array) -> Array:
        """Return the element-wise maximum of the ranks' arrays, in MLX's float32."""
        flat = mx.array(seconds.ravel().astype(np.float32))
        every = np.asarray(mx.distributed.all_gather(flat[None], group=self._group))
        longest: Array = every.max(axis=0)
        return longest.astype(np.float64).reshape(seconds.shape)

    def _refill(self, source: Array) -> None:
        self._x = mx.array(source)
        mx.eval(self._x)

    def _barrier(self) -> None:
        mx.eval(mx.distributed.all_sum(mx.ones(1), group=self._group))

    def _all_reduce(self) -> None:
        self._out = mx.distributed.all_sum(self._x, group=self._group)
        mx.eval(self._out)


if __name__ == "__main__":
    run("mlx", Ring)
