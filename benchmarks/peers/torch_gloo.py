"""PyTorch's gloo, as one of its ranks: python -m peers.torch_gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measure.cases import Array, Case
from measure.contest import Contestant

from peers import PEERS
from peers.own_processes import run


class Gloo:
    """The default process group."""

    about = f"gloo of PyTorch {torch.__version__}"

    def __init__(self, rank: int, ports: list[int]) -> None:
        meeting = f"tcp://127.0.0.1:{ports[0]}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=len(ports))

    def contestant(self, case: Case) -> Contestant:
        """Make gloo's contestant; its tensors share the memory of NumPy arrays."""
        x = np.empty(case.count, case.numpy_dtype)
        out = x if case.in_place else np.empty(case.out_count, case.numpy_dtype)
        return Contestant(
            PEERS["gloo"].title,
            case,
            refill=lambda source: np.copyto(x, source),
            barrier=dist.barrier,
            call=_call(case.collective, torch.from_numpy(x), torch.from_numpy(out)),
            result=lambda: out,
        )

    def slowest(self, seconds: Array) -> Array:
        """Return the element-wise maximum of the ranks' arrays."""
        every = torch.from_numpy(seconds.copy())
        dist.all_reduce(every, op=dist.ReduceOp.MAX)
        return np.asarray(every)


def _call(collective: str, x: Any, out: Any) -> Callable[[], Any]:
    if collective == "all_reduce":
        return lambda: dist.all_reduce(out)
    if collective == "broadcast":
        return lambda: dist.broadcast(out, src=0)
    act = {
        "reduce_scatter": dist.reduce_scatter_tensor,
        "all_gather": dist.all_gather_into_tensor,
        "all_to_all": dist.all_to_all_single,
    }[collective]
    return lambda: act(out, x)


if __name__ == "__main__":
    run("gloo", Gloo)
    dist.destroy_process_group()
