"""Turn optional passes on and off, to find which one causes a wrong result.

An optional pass only makes a program faster or smaller; results are equal up to rounding.
"""

from __future__ import annotations

from allreduce.devices import options
from allreduce.errors import UsageError, unknown_name

OPTIONAL = ("prune", "fold", "simplify", "narrow", "fuse", "bucket", "shard", "plan_buffers")

_off: frozenset[str] = frozenset()


def is_on(name: str) -> bool:
    """Return whether an optional pass runs."""
    # A chain would hide which of its operations made a NaN, folding would hide that one did, and a
    # value written over its input would hide the input.
    chosen = options.current()
    looks = chosen.check_numerics or chosen.sync_errors
    hides = looks and name in ("fold", "fuse", "plan_buffers")
    return name not in _off and not hides


def switch(name: str, on: bool) -> None:
    """Turn an optional pass on or off for later traces."""
    global _off
    if name not in OPTIONAL:
        raise unknown_name("pass", name, OPTIONAL)
    if not isinstance(on, bool):
        raise UsageError(f"pass {name!r} is on (True) or off (False), not {on!r}")
    _off = _off - {name} if on else _off | {name}


def switched_off() -> frozenset[str]:
    """Return the names of the optional passes that are off."""
    return _off
