"""Deal the GPUs of a host out to its ranks, when they join.

Ranks of one host that see the same GPUs get equal shares; ranks that a launcher has given GPUs of
their own keep these. GPUs are compared by their UUIDs: numbers mean others in other processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from allreduce import devices, settings
from allreduce.cluster import World
from allreduce.cluster.store import ranks_text
from allreduce.errors import UsageError, everywhere
from allreduce.events import counted, logger

KIND = "GPU"


def share_devices(world: World, timeout: float) -> None:
    """Take this rank's share of its host's GPUs; all ranks call it when they have joined.

    A rank that sees no GPU tells the others, and waits for nobody.

    Raises:
        UsageError: The ranks' GPUs overlap in part, or are too few; on all ranks of the host.
    """
    mine = devices.identities(KIND)
    if world.local_size == 1:
        return
    key = f"{world.generation}/{KIND}"
    world.store.set(f"{key}/{world.rank}", json.dumps(mine).encode())
    if not mine:
        return
    ranks = next(each for each in world.hosts if world.rank in each)
    seen = {rank: tuple(json.loads(world.store.get(f"{key}/{rank}", timeout))) for rank in ranks}
    share = plan(seen, settings.load().share_gpus)[world.rank]
    numbers = [mine.index(each) for each in share]
    if len(numbers) < len(mine):
        logger.info(
            "rank %d uses %s of the %d on this host: %s",
            *(world.rank, counted(len(numbers), KIND), len(mine), numbers),
        )
    devices.take_share(KIND, numbers)


def plan(seen: dict[int, tuple[str, ...]], shared: bool) -> dict[int, tuple[str, ...]]:
    """Return which GPUs each rank of a host gets.

    Args:
        seen: The UUIDs that each rank sees.
        shared: Whether several ranks may use one GPU.

    Raises:
        UsageError: Two ranks see GPUs that overlap in part; or there are more ranks than GPUs, and
            they may not be shared.
    """
    groups: dict[frozenset[str], list[int]] = {}
    for rank, own in seen.items():
        if own:
            groups.setdefault(frozenset(own), []).append(rank)
    _check_apart(groups)
    found: dict[int, tuple[str, ...]] = dict.fromkeys(seen, ())
    for ranks in groups.values():
        all_of_them = seen[ranks[0]]
        if len(ranks) > len(all_of_them) and not shared:
            raise everywhere(
                UsageError(
                    f"{ranks_text(ranks)} of this host see {counted(len(all_of_them), KIND)}, "
                    f"too few for one each; start {counted(len(all_of_them), 'rank')} here, or let "
                    "ranks share GPUs with ALLREDUCE_SHARE_GPUS=on"
                )
            )
        for place, rank in enumerate(ranks):
            found[rank] = _part(all_of_them, place, len(ranks))
    return found


def _part(gpus: Sequence[str], place: int, ranks: int) -> tuple[str, ...]:
    """Return the share of one of several ranks: earlier ones take what does not divide."""
    if ranks > len(gpus):
        return (gpus[place % len(gpus)],)
    each, more = divmod(len(gpus), ranks)
    first = place * each + min(place, more)
    return tuple(gpus[first : first + each + (place < more)])


def _check_apart(groups: dict[frozenset[str], list[int]]) -> None:
    pairs = list(groups.items())
    for at, (own, ranks) in enumerate(pairs):
        for other, others in pairs[at + 1 :]:
            common = own & other
            if common:
                raise everywhere(
                    UsageError(
                        f"rank {ranks[0]} sees {counted(len(own), KIND)} and rank {others[0]} "
                        f"{len(other)}, of which {len(common)} are the same "
                        f"({', '.join(sorted(common))}); expected the same GPUs on all ranks of a "
                        "host, or different ones on each: set CUDA_VISIBLE_DEVICES so"
                    )
                )
