"""Every error this library raises on purpose, as one tree.

    AllreduceError
    ├── UsageError            a call, argument or setting is wrong (is a ValueError)
    │   ├── ShapeError        shapes or dtypes that do not fit together
    │   ├── DeviceError       a device name that is malformed or does not exist
    │   └── ClosedError       use of something after close() or after an error killed it
    ├── JoinError             this process cannot join the job it says it belongs to
    ├── TimeoutError          a wait ran out (is a builtins.TimeoutError)
    ├── PeerLostError         a member died or left while needed (is a ConnectionError)
    ├── MismatchError         members disagree about a call or about data (is a ValueError)
    ├── UnsupportedError      what nothing here implements (is a NotImplementedError)
    ├── OutOfMemoryError      memory for a buffer or region is not to be had (is a MemoryError)
    ├── NumericsError         a value that must be finite is not (is an ArithmeticError)
    └── InternalError         our own bug: please report it

A message names the rank, the object, what was expected, what came, and what to do.
"""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Iterable, Sequence


class AllreduceError(Exception):
    """Root of the tree; catch it to catch everything raised here on purpose."""


class UsageError(AllreduceError, ValueError):
    """A call, an argument or a setting is wrong."""


class ShapeError(UsageError):
    """Shapes or dtypes do not fit together."""


class DeviceError(UsageError):
    """A device name is malformed, or names a device that does not exist."""


class ClosedError(UsageError):
    """Something was used after `close()`, or after an error made it unusable."""


class JoinError(AllreduceError):
    """This process cannot join the job it says it belongs to."""


class TimeoutError(AllreduceError, builtins.TimeoutError):
    """A wait ran out of time."""


class PeerLostError(AllreduceError, ConnectionError):
    """A member died or left while the others still needed it."""


class MismatchError(AllreduceError, ValueError):
    """Members disagree about a call or about the data they brought."""


class UnsupportedError(AllreduceError, NotImplementedError):
    """A combination that nothing here implements."""


class OutOfMemoryError(AllreduceError, MemoryError):
    """Memory for a buffer or a shared region is not to be had."""


class NumericsError(AllreduceError, ArithmeticError):
    """A value that has to be finite is not."""


class InternalError(AllreduceError):
    """A bug of this library."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """Build the error for a name that is not in a table: what exists, and the nearest.

    Args:
        kind: What the name stands for, as people say it: "loss", "optimizer".
        name: What was given.
        known: The names that exist.
    """
    names = sorted(known)
    near = _nearest(str(name), names)
    hint = f"; did you mean {near!r}?" if near else ""
    return UsageError(f"unknown {kind} {name!r}: there are {', '.join(names)}{hint}")


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """Find the name that was meant: in another case, cut short, or with letters mistaken."""
    by_folded = {each.casefold(): each for each in reversed(names)}
    folded = name.casefold()
    near = difflib.get_close_matches(folded, by_folded, n=1)
    if not near and len(folded) > 1:
        near = [each for each in sorted(by_folded) if each.startswith(folded)]
    return by_folded[near[0]] if near else None
