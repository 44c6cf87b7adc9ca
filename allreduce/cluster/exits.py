"""The status with which the interpreter is about to end, which Python tells no atexit function.

When a SystemExit has come out of the program, the interpreter reads its `code`, and it alone does
so without a Python frame above. Hence the property in the place of that attribute: with it, it
does not matter who raised the exception, how, and of which class.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from typing import Any, NoReturn

_code = vars(SystemExit)["code"]
_raised_by_c = sys.version_info < (3, 12)  # sys.exit's then is no exception yet, without a `code`
_exit = sys.exit
_watching = 0
_status = 0
_ending: SystemExit | None = None


def status() -> int:
    """Return the exit status of the SystemExit that ends this program, and 0 where none does."""
    return _status


def ending() -> SystemExit | None:
    """Return the SystemExit that ends this program with that status."""
    return _ending


def watch() -> None:
    """Note such statuses from now on, until `unwatch` has been called as often."""
    global _watching, _exit
    _watching += 1
    if _watching == 1:
        _replace(property(_read, _code.__set__, _code.__delete__))
        if _raised_by_c:
            _exit, sys.exit = sys.exit, _raise


def unwatch() -> None:
    """Note them no longer."""
    global _watching
    _watching -= 1
    if _watching == 0:
        _replace(_code)
        if sys.exit is _raise:
            sys.exit = _exit


def _replace(attribute: object) -> None:
    """Put an attribute into the place of `SystemExit.code`; Python's own classes refuse setattr."""
    (attributes,) = gc.get_referents(vars(SystemExit))
    attributes["code"] = attribute
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def _read(error: SystemExit) -> Any:
    global _status, _ending
    found = _code.__get__(error)
    if threading.current_thread() is threading.main_thread():
        try:
            sys._getframe(1)
        except ValueError:
            number = found if isinstance(found, int) else int(found is not None)
            _status, _ending = number & 0xFF, error  # as the system cuts it off
    return found


def _raise(status: object = None, /) -> NoReturn:
    raise SystemExit(status)
