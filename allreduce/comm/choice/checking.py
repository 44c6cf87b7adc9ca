"""Whether a row of a table of choices says something that can be done."""

from __future__ import annotations

from allreduce import _native
from allreduce.comm.choice.table import ALGORITHMS, Row
from allreduce.errors import UsageError, unknown_name

_LEAST_CHUNK = 4096
_LARGEST_STEP = 1 << 30  # of direct or pulled work, between which other calls have their turn
_STORES = ("ordinary", "streaming")


def check(row: Row, where: str) -> None:
    """Check a row by itself.

    Args:
        row: The row.
        where: Where it stands, for the message.

    Raises:
        UsageError: It is not valid; the message says where it stands and what is wrong.
    """
    if row.transport not in ALGORITHMS:
        raise _wrong(where, unknown_name("transport", row.transport, ALGORITHMS))
    algorithms = ALGORITHMS[row.transport]
    if row.algorithm not in algorithms:
        raise _wrong(where, unknown_name("algorithm", row.algorithm, algorithms))
    for collective in row.collectives:
        if collective not in algorithms[row.algorithm]:
            known = algorithms[row.algorithm]
            raise _wrong(where, unknown_name(f"{row.algorithm} collective", collective, known))
    for name, low, (least, most) in (("members", 1, row.members), ("bytes", 0, row.bytes)):
        if least < low or (most is not None and most < least):
            raise _wrong(where, f"{name} from {least} to {most}; expected a range from {low} up")
    if row.crowded is not None and row.transport != "shared":
        raise _wrong(where, "crowded is told apart on the shared transport only")
    if row.algorithm == "exchanged" and row.members != (2, 2):
        raise _wrong(where, "an exchanged row for other than 2 members; these alone exchange")
    _check_chunk(row, where)
    if (row.stores is not None) != (row.algorithm == "staged"):
        raise _wrong(where, f"stores={row.stores!r}; a staged row, and no other, has to say which")
    if row.stores not in (None, *_STORES):
        raise _wrong(where, unknown_name("kind of stores", row.stores, _STORES))
    copies = row.transport == "shared" and row.algorithm != "small"
    if row.past is not None and (not copies or row.past < 1):
        expected = "1 or more, on rows of the shared transport that are not small"
        raise _wrong(where, f"past={row.past}; expected a number of bytes, {expected}")


def _check_chunk(row: Row, where: str) -> None:
    if row.algorithm in ("small", "mpi"):
        room = _native.SLOT_BYTES if row.transport == "shared" else _native.TCP_EAGER_BYTES
        if row.algorithm == "small" and (row.bytes[1] is None or row.bytes[1] > room):
            raise _wrong(where, f"bytes up to {row.bytes[1]}, but a small call has room for {room}")
        if row.chunk is not None:
            raise _wrong(where, f"a chunk of {row.chunk} bytes, but {row.algorithm} has no chunks")
        return
    if row.algorithm == "pulled" and row.bytes[0] <= _native.SLOT_BYTES:
        least = _native.SLOT_BYTES + 1
        raise _wrong(where, f"bytes from {row.bytes[0]}; expected {least} or more of a pulled row")
    limit = {
        "staged": _native.RING_BYTES,
        "exchanged": _native.LAP_BYTES,
        "direct": _LARGEST_STEP if row.transport == "shared" else _native.TCP_CHUNK_BYTES,
        "chain": _native.TCP_CHUNK_BYTES,
        "pulled": _LARGEST_STEP,
    }[row.algorithm]
    chunk = row.chunk or 0
    if not _LEAST_CHUNK <= chunk <= limit or chunk & (chunk - 1):
        raise _wrong(
            where,
            f"a chunk of {row.chunk} bytes; expected a power of two from {_LEAST_CHUNK} to {limit}",
        )


def _wrong(where: str, what: object) -> UsageError:
    return UsageError(
        f"{where}: {what}; correct it, or make the file anew with python -m allreduce.tune"
    )
