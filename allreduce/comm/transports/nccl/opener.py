"""Open the NCCL transport: a CPU transport, to which NCCL is added when arrays lie on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from allreduce.cluster import World
from allreduce.comm.core.transport import Transport
from allreduce.comm.transports.nccl.transport import NcclTransport
from allreduce.devices import absence, physical_devices
from allreduce.errors import UnsupportedError

# Opens the members of the control plane, as `registry.Opener`.
Control = Callable[..., Sequence[Transport]]


def open_nccl(
    world: World, local_members: int, *, name: str, timeout: float, control: Control
) -> list[NcclTransport]:
    """Open this process's members, each for one GPU.

    Args:
        world: Whose processes.
        local_members: How many members this process brings.
        name: The communicator's name.
        timeout: Seconds that meeting, and later any wait, may last.
        control: Opens the control plane.

    Raises:
        UnsupportedError: This process has no GPU.
    """
    if not physical_devices("GPU"):
        raise UnsupportedError(
            f"[nccl] {world.called()}: transport 'nccl' is for GPUs, but {absence('GPU')}"
        )
    opened = control(world, local_members, name=name, timeout=timeout)
    if world.size == 1:  # one program makes all members' calls
        return [NcclTransport(each, None, name, timeout, _nobody_else) for each in opened]
    try:
        planes = control(world, local_members, name=f"{name}/calls", timeout=timeout)
    except BaseException:
        for each in opened:
            each.close(drain=False)
        raise
    return [
        NcclTransport(each, plane, name, timeout, world.check_lives)
        for each, plane in zip(opened, planes, strict=True)
    ]


def _nobody_else(seconds: float) -> None:
    """Find no death in a world of one process."""
