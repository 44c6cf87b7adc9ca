"""The one seed behind initial values, shuffling and dropout."""

from __future__ import annotations

import secrets
from typing import Any

from allreduce import events
from allreduce.errors import UsageError

_seed: int | None = None
_times_set = 0
_drawn = False
_untold = False  # whether it was drawn, and nobody was told


def set_seed(seed: int) -> None:
    """Fix initial values, shuffling and dropout.

    Args:
        seed: From 0 to 2**63 - 1; the same on every rank.

    Raises:
        UsageError: The seed is not such an integer.
    """
    global _seed, _times_set, _drawn, _untold
    _seed, _drawn, _untold = checked(seed), False, False
    _times_set += 1


def checked(seed: Any) -> int:
    """Read a seed.

    Raises:
        UsageError: It is no integer from 0 to 2**63 - 1.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise UsageError(f"the seed is an integer from 0 to 2**63 - 1, not {seed!r}")
    return seed


def times_set() -> int:
    """Count the calls of `set_seed`; what numbers names starts anew after each."""
    return _times_set


def is_set() -> bool:
    """Tell whether the program has set a seed; one that was drawn does not count."""
    return _times_set > 0


def adopt(seed: int) -> None:
    """Use the seed that all ranks have agreed on; names go on counting where they are."""
    global _seed, _drawn
    _seed, _drawn = seed, False


def fixed() -> int | None:
    """Return the seed if it was set or agreed on; one that a first trace drew is its own."""
    return None if _drawn else _seed


def chosen() -> int:
    """Return the seed for ranks to compare; one is drawn if none was set.

    The program may still set one before anything comes of it, so nothing is said of it yet.
    """
    global _seed, _drawn, _untold
    if _seed is None:
        _seed, _drawn, _untold = secrets.randbits(31), True, True
    return _seed


def get_seed() -> int:
    """Return the seed for something that comes of it; one that was drawn is logged then."""
    global _untold
    seed = chosen()
    if _untold:
        _untold = False
        text = "no seed was set: drew %d; ar.set_seed(%d) repeats this run"
        events.logger.info(text, seed, seed)
    return seed
