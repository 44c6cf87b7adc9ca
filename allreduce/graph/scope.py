"""What surrounds the user's code on this thread: `device` scopes, and the line that runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from allreduce.devices.names import DeviceName

# Of this package and of NumPy, which calls back what was passed to it.
_NOT_THE_USERS = tuple(
    f"{Path(file).resolve()}/" for file in (Path(__file__).parents[1], Path(np.__file__).parent)
)


class _Surroundings(threading.local):
    device: DeviceName | None = None
    line: str | None = None  # of the user's where this thread was started, if one of ours


_here = _Surroundings()


def current_device() -> DeviceName | None:
    """Return what the surrounding `device` scopes ask for, merged; None outside of any."""
    return _here.device


@contextmanager
def device(name: str | DeviceName) -> Iterator[None]:
    """Place the operators that the block calls on a device.

    Scopes nest: a part of the name that an inner scope leaves out is taken from the outer one.

    Args:
        name: A device name in full or in part: `"/job:worker/task:1/GPU:0"`, `"CPU:1"`.

    Raises:
        DeviceError: The name is malformed, or no text.
    """
    asked = DeviceName.parse(name)
    outer = _here.device
    _here.device = asked.merge(outer) if outer else asked
    try:
        yield
    finally:
        _here.device = outer


def take_along() -> Callable[[], None]:
    """Return what gives a thread of ours the surroundings of this one."""
    device, line = _here.device, users_line()

    def settle() -> None:
        _here.device, _here.line = device, line

    return settle


def users_line() -> str:
    """Find the innermost caller outside of this package and NumPy, as "file:line"."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame.f_code.co_filename == threading.__file__ and _here.line is not None:
        return _here.line
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
