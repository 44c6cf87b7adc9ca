"""What the members of an NCCL communicator must know of each other before they make it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from allreduce.devices import Device
from allreduce.errors import AllreduceError, UnsupportedError
from allreduce.events import logger

FACT_BYTES = 512
_TEXT = 200  # characters of a reason
_LEAVE = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID")  # variables that let members share a GPU


class Facts(NamedTuple):
    """One member's facts.

    Attributes:
        gpu: The UUID of its GPU.
        version: Of its NCCL; empty without one.
        missing: Why there is no NCCL.
        part: The name of its GPU, if that is a part of a physical one (MIG).
    """

    gpu: str
    version: str
    missing: str
    part: str

    def pack(self) -> NDArray[np.uint8]:
        """Encode in `FACT_BYTES`."""
        missing = self.missing[:_TEXT].encode("ascii", "replace").decode()  # a byte each
        data = json.dumps([self.gpu, self.version, missing, self.part]).encode()
        return np.frombuffer(data.ljust(FACT_BYTES)[:FACT_BYTES], np.uint8)

    @staticmethod
    def unpack(data: NDArray[np.uint8]) -> Facts:
        return Facts(*json.loads(data.tobytes().decode()))


def facts_of(device: Device) -> Facts:
    """Find this member's facts; loads NCCL."""
    version, missing = "", ""
    try:
        from allreduce.comm.transports.nccl import library

        version = library.version()
    except (ImportError, OSError, RuntimeError) as error:  # the package, or the library
        missing = " ".join(str(error).split())
    partial: str = getattr(device, "partition", "")
    return Facts(device.identity, version, missing, partial)


def check(
    where: str, found: Sequence[Facts], called: Callable[[int], str], *, one_process: bool = False
) -> None:
    """Refuse members that NCCL cannot connect; log different versions.

    Args:
        where: A prefix for messages.
        found: The members' facts; the same on all members.
        called: Names a member.
        one_process: Whether all members are replicas of this process.

    Raises:
        UnsupportedError: A member has no NCCL, or a slice of a GPU, or two share one.
    """
    if len(found) == 1 and found[0].version:
        return
    error = _missing(where, found, called) or _sliced(where, found, called)
    error = error or _shared(where, found, called, one_process)
    if error is not None:
        error.everywhere = True  # all members have the same facts
        raise error
    versions: dict[str, list[str]] = {}
    for member, each in enumerate(found):
        versions.setdefault(each.version, []).append(called(member))
    if len(versions) > 1:
        shown = "; ".join(f"{version} on {', '.join(who)}" for version, who in versions.items())
        logger.warning(
            "%s: members use different NCCL libraries, which may not work together: %s; install "
            "the same one for all ranks",
            *(where, shown),
        )


def _missing(
    where: str, found: Sequence[Facts], called: Callable[[int], str]
) -> AllreduceError | None:
    lacking = [(member, each.missing) for member, each in enumerate(found) if not each.version]
    if not lacking:
        return None
    first, why = lacking[0]
    who = ", ".join(called(member) for member, _ in lacking)
    return UnsupportedError(
        f"{where}: NCCL cannot be used on {who}: {why or called(first)}; "
        "pip install 'allreduce[cuda12]' (or [cuda13]) for all ranks, or pass arrays on the host"
    )


def _sliced(
    where: str, found: Sequence[Facts], called: Callable[[int], str]
) -> AllreduceError | None:
    parts = [(member, each.part) for member, each in enumerate(found) if each.part]
    if not parts:
        return None
    shown = ", ".join(f"{called(member)} ({part})" for member, part in parts)
    return UnsupportedError(
        f"{where}: NCCL does not connect slices of GPUs (MIG), which {shown} uses; give "
        "ranks whole GPUs, or train on one slice with one rank"
    )


def _shared(
    where: str, found: Sequence[Facts], called: Callable[[int], str], one_process: bool
) -> AllreduceError | None:
    gpus = [each.gpu for each in found]
    second = next((i for i, each in enumerate(gpus) if each in gpus[:i]), None)
    if second is None or any(os.environ.get(name) for name in _LEAVE):
        return None
    first = gpus.index(gpus[second])
    remedy = (
        "give each a GPU of its own (one logical device for each physical one), or set "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 where NCCL supports it"
    )
    if one_process:
        remedy = (
            f"there are {len(gpus)} replicas on {len(set(gpus))} GPUs: make one logical device for "
            "each GPU, or put all replicas on one GPU, where they need no NCCL (hide the others "
            "with CUDA_VISIBLE_DEVICES=0)"
        )
    return UnsupportedError(
        f"{where}: {called(first)} and {called(second)} use one GPU, which NCCL refuses; {remedy}"
    )
