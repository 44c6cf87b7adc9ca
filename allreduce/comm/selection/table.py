"""The table that chooses the algorithm, chunk size and kind of stores of a call.

A communicator uses the rows that hold for its transport, members and cores. Of these the first that
holds for a call's collective and bytes decides. `bytes` are, on the shared transport, those of the
largest input of any member, and on tcp those of the largest share that one member has for another;
a call whose sizes no member knows completely (all_to_all with counts) takes the row for the
largest.

Unless stated otherwise, the measurements are of 2 processes on 2 cores of a Zen 4 machine.
"""

from __future__ import annotations

from typing import NamedTuple

KIB = 1 << 10
MIB = 1 << 20

_DATA = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter", "broadcast"),
    "all_to_all",
)
_ALL = ("barrier", *_DATA)
_MESSAGES = ("send", "recv")
# Where tcp can send along a chain of members; the others have but one hop.
_CHAINS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast")
# Collectives with a path for symmetric memory. In the others the root alone decides which arrays it
# passes.
_IN_PLACE = ("all_reduce", "reduce_scatter", "all_gather", "gather", "broadcast", "all_to_all")
# A copy that goes past the caches does not read the output first. 64 MiB, speed beside MPICH's in
# the same run: all_gather on comm.empty 1.5 instead of 0.87, on ordinary arrays 1.2 instead of
# 0.88; all_to_all 1.3 instead of 0.93, and 1.1 instead of 0.97.
_PAST = 4 * MIB


class Row(NamedTuple):
    """One choice, and the calls that it holds for.

    Args:
        transport: "shared" or "tcp".
        collectives: Their names.
        algorithm: One of the transport's. On shared, "direct" is for symmetric memory only, and
            "cross_process" for members who may read each other's memory; else the next row holds.
            "pairwise" is for two members.
        members: From how many members to how many; None is no limit.
        bytes: From how many to how many, both included.
        crowded: Whether members outnumber the cores they share (shared only); None is either.
        chunk: Bytes that one step moves at most; 0 where all goes at once.
        stores: How a staged chunk is written: "ordinary", or "streaming", past the caches.
        past: How long what one member gives to another is at least where it is copied to the output
            past the caches; None is nowhere. (shared, collectives that reduce nothing, all ways but
            the eager one; for cross_process copies, the kernel decides)
    """

    transport: str
    collectives: tuple[str, ...]
    algorithm: str
    members: tuple[int, int | None] = (1, None)
    bytes: tuple[int, int | None] = (0, None)
    crowded: bool | None = None
    chunk: int = 0
    stores: str = "ordinary"
    past: int | None = None


# A row's `Row.bytes` of (0, 4 KiB) ends where a slot's page, or a post's room, ends.
TABLE: tuple[Row, ...] = (
    # --- shared -------------------------------------------------------------------------------
    # One synchronisation instead of two: all_reduce of 4 KiB takes 1.2 us.
    Row("shared", _ALL, "eager", bytes=(0, 4 * KIB)),
    # No copies: all_reduce of 1 MiB 15 us, of 16 MiB 850. A step takes some tens of microseconds,
    # after which other calls have their turn.
    Row("shared", _IN_PLACE, "direct", chunk=256 * KIB, past=_PAST),
    # One copy instead of two, but by the kernel, page by page, and no member has to keep pace with
    # another. Members who share their cores: 4 on 2 of them, broadcast of 4 MiB 2.5 ms instead of
    # 12, of 16 MiB 11 instead of 42; scatter of 16 MiB 4.7 instead of 7.7.
    Row(
        *("shared", ("broadcast", "scatter"), "cross_process"),
        members=(3, None),
        bytes=(1 * MIB, None),
        crowded=True,
        chunk=1 * MIB,
        past=_PAST,
    ),
    # Each line crosses once, no member waits for free slots, and received, sent and own parts move
    # in one pass: 16 MiB 1.43 ms instead of 1.62 by the kernel, 64 MiB 6.0 instead of 7.4; on one
    # core 4 MiB 1.01 instead of 1.14, and 16 MiB 4.0 either way. Past the caches 4 MiB take 435 us
    # instead of 536, but 2 MiB 177 instead of 149.
    Row(
        *("shared", ("all_to_all",), "pairwise"),
        members=(2, 2),
        chunk=64 * KIB,
        past=2 * MIB,
    ),
    # As all_to_all: 256 KiB 45 us instead of 63 staged (Zen 3); 8 MiB 1.50 ms instead of 1.89 by
    # the kernel, 16 MiB 3.0 instead of 4.0, 64 MiB 12.1 instead of 15.2. On one core all ways take
    # as long. The members keep step, and where another program takes part of a core both wait for
    # it: 16 MiB 8.9 instead of 6.3 by the kernel, and all_to_all 5.3 instead of 4.0.
    Row(
        *("shared", ("all_gather",), "pairwise"),
        members=(2, 2),
        chunk=64 * KIB,
        past=_PAST,
    ),
    # One synchronisation instead of two for the only chunk of equal shares: 64 KiB 2.8 us instead
    # of 3.2; 256 KiB 9.9 instead of 9.3, 1 MiB 41 instead of 36, 16 MiB 2.1 ms instead of 1.6.
    Row(
        *("shared", ("reduce_scatter",), "pairwise"),
        members=(2, 2),
        bytes=(0, 128 * KIB),
        chunk=64 * KIB,
    ),
    # One synchronisation instead of two, but all is reduced twice: 8 KiB 4.2 us instead of 5.5, 32
    # KiB 7.7 instead of 8.5; 64 KiB 10.1 instead of 8.2 (halves of one core, Zen 3).
    Row(
        *("shared", ("all_reduce",), "pairwise"),
        members=(2, 2),
        bytes=(0, 32 * KIB),
        chunk=64 * KIB,
    ),
    # all_to_all of two is pairwise above. gather of 16 MiB, while other programs ran, 3.9 ms
    # instead of 6.9; of 4 MiB, much of which is in the caches, it is no gain.
    Row(
        *("shared", ("gather", "scatter", "all_to_all"), "cross_process"),
        bytes=(4 * MIB + 1, None),
        chunk=1 * MIB,
        past=_PAST,
    ),
    # The owner has its results out of the ring and the next chunk in at once, so one chunk that
    # fills the ring is best: 16 MiB 1.25 ms; in chunks of 256 KiB 1.4 ms. Streaming stores, which
    # take the lines from both caches: 2.1 ms.
    Row("shared", ("all_reduce",), "staged", chunk=512 * KIB, stores="ordinary"),
    # Several members read what one has staged, so its next store there would have to take the line
    # from all of their caches, at 60 ns a line; a streaming store costs 1.5 to 5 ns.
    Row(
        *("shared", ("all_gather", "broadcast"), "staged"),
        members=(3, None),
        chunk=256 * KIB,
        stores="streaming",
        past=_PAST,
    ),
    # The root fills the ring while the other one empties it: 256 KiB 18 us instead of 21 in one
    # chunk, and 38 by the kernel; from 1 MiB on the chunk makes no difference (Zen 3).
    Row(
        *("shared", ("broadcast",), "staged"),
        members=(2, 2),
        bytes=(0, 512 * KIB),
        chunk=64 * KIB,
        stores="ordinary",
    ),
    # By the kernel 64 MiB take 8.0 ms instead of 5.6. Past the caches 4 MiB take 295 us instead of
    # 238, and 16 MiB 1.32 ms instead of 1.41 (Zen 3).
    Row(
        *("shared", ("broadcast",), "staged"),
        members=(2, 2),
        chunk=256 * KIB,
        stores="ordinary",
        past=8 * MIB,
    ),
    # One member stages a chunk while the others read the one before it: half of the ring.
    Row("shared", _DATA, "staged", chunk=256 * KIB, stores="ordinary", past=_PAST),
    # --- tcp ----------------------------------------------------------------------------------
    # Sending the data with the post saves the round trip in which members compare the call.
    Row("tcp", (*_ALL, *_MESSAGES), "eager", bytes=(0, 4 * KIB)),
    # One hop to every member beats a chain of hops, whose latencies add up; the bytes that each
    # member sends are the same for all but broadcast. A chunk is large against a system call, and
    # small against the level-2 cache, where it is reduced.
    Row("tcp", _CHAINS, "direct", bytes=(0, 256 * KIB), chunk=256 * KIB),
    # Every link carries the same amount in both directions, and no member sends to all: n - 1
    # connections into one port would share its rate.
    Row("tcp", _CHAINS, "chain", chunk=256 * KIB),
    Row("tcp", (*_DATA, *_MESSAGES), "direct", chunk=256 * KIB),
)
