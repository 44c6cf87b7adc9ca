"""Options of the whole process; `ar.config` is their public face."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import SupportsIndex

from allreduce import events, settings
from allreduce.devices.integers import integer, switch
from allreduce.errors import UsageError, unknown_name

FLOATS = ("float32", "float64")
SHORT_FLOATS = ("bfloat16",)


@dataclass(frozen=True)
class Options:
    """The current options; setters replace the object."""

    soft_device_placement: bool = False  # fall back where a device is missing, with a warning
    log_device_placement: bool = False  # log each op's device and why
    check_numerics: bool = False  # look for NaN and Inf in every operation's value
    sync_errors: bool = False  # let each instruction end before the next
    buckets: int | tuple[str, ...] | None = None  # bytes, or first names; None: 4 MiB
    shard_everywhere: bool = False  # sharded updates also without shared memory
    strict_collectives: bool = False  # compare calls of GPUs' arrays before they start
    tf32: bool = False  # of GPUs' products of float32
    pipelining: bool = True  # start collectives and prepare batches before they are awaited
    functions_run_eagerly: bool = False  # compute steps op by op, with values to look at
    floatx: str = "float32"  # the default dtype of layers
    mixed_precision: str | None = None  # of products' operands and exchanged gradients
    intra_op_threads: int | None = None  # BLAS threads per process; None: the library chooses
    inter_op_threads: int = 1  # that run operations of one replica


_current = Options()


def current() -> Options:
    """Return the current options."""
    return _current


def set_soft_device_placement(enabled: bool) -> None:
    """Choose whether an op whose device is missing falls back instead of failing."""
    _replace(soft_device_placement=switch("soft_device_placement", enabled))


def set_log_device_placement(enabled: bool) -> None:
    """Choose whether each op's device is logged, with the reason."""
    _replace(log_device_placement=switch("log_device_placement", enabled))
    if enabled:
        start_logging()


def enable_check_numerics(enabled: bool = True) -> None:
    """Choose whether the first operation that makes a NaN or Inf raises NumericsError.

    The error names the operation, its line, the step, and its inputs. Applies to steps traced
    afterwards, and reads every value.
    """
    _replace(check_numerics=switch("check_numerics", enabled))


def enable_sync_errors(enabled: bool = True) -> None:
    """Choose whether each instruction of a step completes, and raises its errors, before the next.

    Collectives complete, too, so that an error names its operator. Applies to steps traced
    afterwards. It costs memory and time: values do not share memory, and nothing overlaps.
    """
    _replace(sync_errors=switch("sync_errors", enabled))


def set_buckets(cuts: SupportsIndex | Sequence[str] | None) -> None:
    """Choose where an optimizer's gradients are cut into buckets, each reduced by one collective.

    It holds for optimizers whose first step is traced from then on, and is the same on all ranks.

    Args:
        cuts: An integer: a bucket has as many bytes at most, or one variable. None: the default,
            4 MiB. Names of variables, of all optimizers, each once: a bucket begins with each of
            them, and an optimizer with none is cut by the default size; with [] it is one bucket.

    Raises:
        UsageError: It is none of these.
    """
    if isinstance(cuts, str) or not isinstance(cuts, SupportsIndex | Sequence | None):
        raise UsageError(
            f"buckets are cut by a number of bytes, or by a list of variables' names, not {cuts!r}"
        )
    if not isinstance(cuts, Sequence):
        _replace(buckets=None if cuts is None else integer("a bucket's bytes", cuts, 1))
        return
    strange = [each for each in cuts if not isinstance(each, str)]
    if strange:
        raise UsageError(f"buckets begin with variables, by their names, not with {strange[0]!r}")
    twice = [each for each in cuts if cuts.count(each) > 1]
    if twice:
        raise UsageError(f"one bucket begins with each name, and {twice[0]!r} is there twice")
    _replace(buckets=tuple(cuts))


def set_shard_everywhere(enabled: bool) -> None:
    """Choose whether large buckets get sharded updates over any transport, not only on one host.

    Each replica then has only its own slices of the optimizer's slots. `optimizer.consolidate()`,
    on all ranks, makes them whole before a rank saves them; `fit` ends with it. Applies to
    optimizers whose first step is traced afterwards, and must be equal on all ranks. Results have
    the same bits.
    """
    _replace(shard_everywhere=switch("shard_everywhere", enabled))


def set_pipelining(enabled: bool) -> None:
    """Choose whether the streams of a step, and the preparation of its batches, overlap.

    Without overlap, and with one inter-op thread, a collective completes before the next
    instruction begins, and a batch is prepared when the step needs it. Use it to find errors that
    only occur with overlap, and to measure the time saved (`ar.observe.explain` shows it). Applies
    from the next step, and the next pass over a dataset. Results have the same bits. Ranks may
    differ.
    """
    _replace(pipelining=switch("pipelining", enabled))


def set_strict_collectives(enabled: bool) -> None:
    """Choose whether members compare each call of arrays on GPUs before it is enqueued.

    NCCL does not find out that members made different calls, and waits for ever. Members therefore
    compare them in the background, and raise a MismatchError that names both calls. With this, no
    call starts before it was compared; it costs one message per call. Choose it on all ranks. Calls
    of arrays on the host are always compared before they start.
    """
    _replace(strict_collectives=switch("strict_collectives", enabled))


def set_tf32(enabled: bool) -> None:
    """Choose whether GPUs round the operands of float32 products to TensorFloat-32.

    Tensor cores of sm_80 and later multiply such numbers, with 10 bits of mantissa, several times
    as fast; sums stay float32. It holds for products and convolutions from the next step on.
    """
    _replace(tf32=switch("tf32", enabled))


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Choose whether steps run op by op instead of being traced and replayed.

    Every operation is computed where it is called, so that tensors have values there: to print, to
    look at in a debugger, to decide on. Results are the same, and it takes longer.
    """
    _replace(functions_run_eagerly=switch("run_functions_eagerly", run_eagerly))


def set_floatx(dtype: str) -> None:
    """Choose the dtype of layers that are made without one: `float32` or `float64`."""
    if dtype not in FLOATS:
        raise unknown_name("floatx", dtype, FLOATS)
    _replace(floatx=dtype)


def set_mixed_precision(dtype: str | None) -> None:
    """Choose a shorter type for matrix products, convolutions and the exchange of gradients.

    Variables, gradients and optimizers stay float32. Operands of products are rounded to bfloat16,
    and their results are sums in float32; other operators compute in float32. Gradients are reduced
    as bfloat16. It holds for steps that are traced from then on, and is the same on all ranks.

    Args:
        dtype: "bfloat16", or None for none.

    Raises:
        UsageError: It is another type, or the package ml_dtypes is not installed.
    """
    if dtype not in (None, *SHORT_FLOATS):
        raise unknown_name("mixed precision", str(dtype), SHORT_FLOATS)
    if dtype is not None and find_spec("ml_dtypes") is None:
        raise UsageError(f"mixed precision of {dtype} needs ml_dtypes: pip install ml_dtypes")
    _replace(mixed_precision=dtype)


def set_intra_op_threads(count: int | None) -> None:
    """Choose how many threads BLAS may use in this process; None lets the library choose."""
    chosen = None if count is None else integer("an op's number of threads", count, 1)
    _replace(intra_op_threads=chosen)


def set_inter_op_threads(count: int) -> None:
    """Choose how many threads run a replica's operations that do not depend on each other."""
    _replace(inter_op_threads=integer("the number of inter-op threads", count, 1))


def _replace(**changes: bool | str | int | tuple[str, ...] | None) -> None:
    global _current
    _current = replace(_current, **changes)  # type: ignore[arg-type]  # each setter checks its own


@functools.cache
def start_logging() -> None:
    """Let records be seen, at the level that ALLREDUCE_LOG_LEVEL says, unless joining did so.

    Raises:
        UsageError: An `ALLREDUCE_…` variable is not valid.
    """
    if events.current_rank() is None:
        events.configure_logging(None, settings.load().log_level)
