"""The seed of initial values, shuffling and dropout."""

from __future__ import annotations

import secrets
from typing import Any

from allreduce import events
from allreduce.errors import UsageError
from allreduce.keywords import explain

_seed: int | None = None
_times_set = 0
_drawn = False
_untold = False  # whether it was drawn and not yet logged


@explain()
def set_seed(seed: int) -> None:
    """Set the seed of initial values, shuffling and dropout.

    Args:
        seed: An integer from 0 to 2**63 - 1; the same on every rank.

    Raises:
        UsageError: The seed is not such an integer.
    """
    global _seed, _times_set, _drawn, _untold
    _seed, _drawn, _untold = checked(seed), False, False
    _times_set += 1


def checked(seed: Any) -> int:
    """Refuse a seed that is no integer from 0 to 2**63 - 1."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise UsageError(f"the seed is an integer from 0 to 2**63 - 1, not {seed!r}")
    return seed


def times_set() -> int:
    """Return how often `set_seed` was called; each call restarts numbered names."""
    return _times_set


def is_set() -> bool:
    """Return whether the program has set a seed; a drawn one does not count."""
    return _times_set > 0


def adopt(seed: int) -> None:
    """Use the seed that all ranks have agreed on; numbered names continue."""
    global _seed, _drawn
    _seed, _drawn = seed, False


def fixed() -> int | None:
    """Return the seed if it was set or agreed on; None if it was drawn or there is none."""
    return None if _drawn else _seed


def chosen() -> int:
    """Return the seed for comparison between ranks; draws one if none was set.

    A drawn seed is not logged yet, since the program may still set another before its use.
    """
    global _seed, _drawn, _untold
    if _seed is None:
        _seed, _drawn, _untold = secrets.randbits(31), True, True
    return _seed


def get_seed() -> int:
    """Return the seed for use; a drawn one is logged at its first use."""
    global _untold
    seed = chosen()
    if _untold:
        _untold = False
        text = "no seed was set: drew %d; ar.set_seed(%d) repeats this run"
        events.logger.info(text, seed, seed)
    return seed
