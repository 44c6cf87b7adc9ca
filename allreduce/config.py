"""`ar.config`: choices for the whole process, under TensorFlow's names."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from allreduce import devices
from allreduce.devices import Device, PhysicalDevice, options
from allreduce.devices.options import (
    enable_check_numerics,
    enable_sync_errors,
    run_functions_eagerly,
    set_buckets,
    set_floatx,
    set_log_device_placement,
    set_mixed_precision,
    set_pipelining,
    set_shard_everywhere,
    set_soft_device_placement,
    set_strict_collectives,
    set_tf32,
)
from allreduce.errors import UsageError, unknown_name
from allreduce.graph.core import pass_switches
from allreduce.keywords import explain_all

__all__ = [
    "enable_check_numerics",
    "enable_sync_errors",
    "floatx",
    "functions_run_eagerly",
    "get_buckets",
    "get_log_device_placement",
    "get_memory_info",
    "get_mixed_precision",
    "get_pipelining",
    "get_shard_everywhere",
    "get_soft_device_placement",
    "get_strict_collectives",
    "get_tf32",
    "list_logical_devices",
    "list_physical_devices",
    "passes",
    "run_functions_eagerly",
    "set_buckets",
    "set_floatx",
    "set_log_device_placement",
    "set_logical_devices",
    "set_mixed_precision",
    "set_pipelining",
    "set_shard_everywhere",
    "set_soft_device_placement",
    "set_strict_collectives",
    "set_tf32",
    "threading",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def list_physical_devices(kind: str | None = None) -> list[PhysicalDevice]:
    """List the devices that this process can use, of one kind ("CPU") or of all.

    It lists none of a kind that this version has no runtime for.

    Raises:
        DeviceError: There is no such kind.
    """
    return devices.physical_devices(kind)


def list_logical_devices(kind: str | None = None) -> list[Device]:
    """List the devices that strategies and `ar.device` place on; fixes their number."""
    return devices.logical_devices(kind)


def set_logical_devices(kind: str, count: int, memory_limit: int | None = None) -> None:
    """Have `count` logical devices of one kind, so that one CPU can hold several replicas.

    Args:
        kind: "CPU".
        count: How many there are to be.
        memory_limit: The bytes that steps may use on each, for variables, gradients, slots and
            values (of eager steps, no values). Exceeding it raises an OutOfMemoryError. None: the
            machine's memory.

    Raises:
        UsageError: Logical devices are in use already, in another number or with another limit.
    """
    devices.set_logical_devices(kind, count, memory_limit)


def get_memory_info(device: str) -> dict[str, int]:
    """Return how many bytes steps use on a logical device: "current", and "peak" so far."""
    memory = devices.lookup(device).memory
    return {"current": memory.used, "peak": memory.peak}


def get_tf32() -> bool:
    """Return whether GPUs round operands of float32 products to TensorFloat-32."""
    return options.current().tf32


def get_strict_collectives() -> bool:
    """Return whether members compare calls of arrays on GPUs before these are enqueued."""
    return options.current().strict_collectives


def get_soft_device_placement() -> bool:
    """Return whether an op whose device is missing falls back instead of failing."""
    return options.current().soft_device_placement


def get_log_device_placement() -> bool:
    """Return whether each op's device is logged, with the reason."""
    return options.current().log_device_placement


def get_buckets() -> int | tuple[str, ...] | None:
    """Return how gradients are cut into buckets: by bytes, at names, or None for 4 MiB."""
    return options.current().buckets


def get_shard_everywhere() -> bool:
    """Return whether large buckets are updated in slices over any transport."""
    return options.current().shard_everywhere


def get_pipelining() -> bool:
    """Return whether a step's streams and the preparation of batches may overlap."""
    return options.current().pipelining


def get_mixed_precision() -> str | None:
    """Return what operands of products, and gradients that ranks exchange, are rounded to."""
    return options.current().mixed_precision


def functions_run_eagerly() -> bool:
    """Return whether steps run op by op."""
    return options.current().functions_run_eagerly


def floatx() -> str:
    """Return the dtype of layers that are made without one."""
    return options.current().floatx


class _Threading:
    """`ar.config.threading`: how many threads do the work."""

    def set_intra_op_parallelism_threads(self, count: int) -> None:
        """Set the number of BLAS threads of an operation of this process, from now on.

        Takes precedence over OMP_NUM_THREADS and similar variables, and over the library's choice.
        """
        options.set_intra_op_threads(count)
        devices.limit_blas_threads(count)

    def get_intra_op_parallelism_threads(self) -> int:
        """Return the number that was set; 0 when the library chooses."""
        return options.current().intra_op_threads or 0

    def set_inter_op_parallelism_threads(self, count: int) -> None:
        """Set how many independent operations of a step may run at once.

        Applies to steps traced afterwards. The default, 1, is a replica's own thread; the replicas
        of a process share the others. Results have the same bits. Values then share no memory, so a
        step needs more of it. Matrix products also use the intra-op threads. Under
        `enable_check_numerics` one thread runs all operations, so that one is the first.
        """
        options.set_inter_op_threads(count)

    def get_inter_op_parallelism_threads(self) -> int:
        """Return the number that was set, or 1."""
        return options.current().inter_op_threads


threading = _Threading()


class _UnknownPassError(UsageError, KeyError):
    """An unknown pass; a KeyError, so that `in` and `get` work as for any mapping."""

    __str__ = Exception.__str__  # KeyError's puts the message in quotes


class _Passes(MutableMapping[str, bool]):
    """`ar.config.passes`: switches of the optional passes, as in `passes["fuse"] = False`.

    They apply to steps traced afterwards; without them results are equal up to rounding.
    """

    def __getitem__(self, name: str) -> bool:
        if name not in pass_switches.OPTIONAL:
            raise _UnknownPassError(str(unknown_name("pass", name, pass_switches.OPTIONAL)))
        return name not in pass_switches.switched_off()

    def __setitem__(self, name: str, on: bool) -> None:
        pass_switches.switch(name, on)

    def __delitem__(self, name: str) -> None:
        raise UsageError(f'a pass cannot be deleted; ar.config.passes["{name}"] = False')

    def __iter__(self) -> Iterator[str]:
        return iter(pass_switches.OPTIONAL)

    def __len__(self) -> int:
        return len(pass_switches.OPTIONAL)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"


passes = _Passes()

explain_all(globals(), __all__)
