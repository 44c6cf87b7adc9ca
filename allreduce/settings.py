"""All `ALLREDUCE_…` environment variables, typed and checked, in one table.

Variables of schedulers (MPI's, Slurm's) are declared by their resolvers.
"""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from allreduce.errors import UsageError, did_you_mean

PREFIX = "ALLREDUCE_"
GRACE = 30.0  # seconds, as Kubernetes gives a pod between SIGTERM and SIGKILL
LONGEST_SECONDS = 1e6  # a socket's timeout ends at 2**31 ms


class Setting(NamedTuple):
    """One row: `ALLREDUCE_<NAME>`, its parser, default and purpose."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    expects: str
    doc: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name


def _checked(kind: Callable[[str], Any], valid: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return a parser of texts whose value is valid."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not valid(value):
            raise ValueError(text)
        return value

    return parse


def _integer(low: int, high: float = math.inf) -> Callable[[str], Any]:
    return _checked(int, lambda value: low <= value <= high)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise ValueError(text)
    return text == "on"


_text = _checked(str, bool)
_secret = _checked(str.encode, bool)
_seconds = _checked(float, lambda value: 0 < value <= LONGEST_SECONDS)
_patience = _checked(float, lambda value: 0 <= value <= LONGEST_SECONDS)
_level = _checked(str.upper, ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL").__contains__)


def _address(text: str) -> str:
    if text.startswith("/job:"):  # a task of the cluster
        return text
    host, colon, port = text.rpartition(":")
    if not (host and colon and 0 < int(port) < 65536):
        raise ValueError(text)
    return text


TABLE: tuple[Setting, ...] = (
    Setting("RANK", _integer(0), None, "an integer from 0", "this process's rank"),
    Setting("SIZE", _integer(1), None, "an integer from 1", "how many ranks the job has"),
    Setting("LEADER", _address, None, "host:port or a task", "where the group leader listens"),
    Setting("SECRET", _secret, None, "any non-empty text", "the job's shared secret"),
    Setting("TRANSPORT", _text, None, "a transport's name", "which transport carries collectives"),
    Setting("ACROSS", _text, "tcp", "a transport's name", "what hierarchical uses between hosts"),
    Setting("TCP_CONNECTIONS", _integer(1, 16), 1, "1 to 16", "data sockets per pair"),
    Setting("TCP_INTERFACE", _text, None, "an interface or address", "where hosts reach another"),
    Setting("SHARE_GPUS", _switch, False, "on or off", "whether ranks of a host share GPUs"),
    Setting("SHARED_PULL", _switch, True, "on or off", "whether ranks read each other's memory"),
    Setting("HOST", _text, None, "any non-empty text", "a name for this host, in its own's place"),
    Setting("CLUSTER", _text, None, "JSON, or a file's path", "the cluster's tasks and addresses"),
    Setting("TASK", _text, None, "job:number, such as worker:0", "this process's task"),
    Setting("TIMEOUT", _seconds, 300.0, "seconds above 0, up to 1e6", "how long a wait may last"),
    Setting("GRACE", _patience, GRACE, "seconds from 0, up to 1e6", "what an ending rank may take"),
    Setting("LOG_LEVEL", _level, None, "DEBUG, INFO, WARNING, ERROR or CRITICAL", "log verbosity"),
    Setting("LAUNCHED", _integer(0), None, "a process id", "set by the launcher, for its children"),
    Setting("JOINED", str, None, "process:rank", "set by a rank, for its children to be refused"),
)


@dataclass(frozen=True)
class Settings:
    """The values of all variables; None if unset and without a default."""

    rank: int | None
    size: int | None
    leader: str | None
    secret: bytes | None = field(repr=False)
    transport: str | None
    across: str
    tcp_connections: int
    tcp_interface: str | None
    share_gpus: bool
    shared_pull: bool
    host: str | None
    cluster: str | None
    task: str | None
    timeout: float
    grace: float
    log_level: str | None
    launched: int | None
    joined: str | None
    unknown: tuple[str, ...]  # one warning text per unknown ALLREDUCE_ name


def check(name: str, value: object) -> Any:
    """Check an argument that corresponds to the setting `name`; return its value, as `load` does.

    Numbers must be numbers here; their texts are accepted from variables only.

    Raises:
        UsageError: The value is not valid for the setting.
    """
    row = next(row for row in TABLE if row.name == name)
    try:
        if isinstance(value, bytes) and row.parse is _secret and value:
            return value
        return row.parse(_as_text(row, value))
    except (TypeError, ValueError):
        shown = "<hidden>" if name == "SECRET" else repr(value)
        raise UsageError(
            f"{name.lower()}={shown} is not valid: expected {row.expects} ({row.doc})"
        ) from None


def _as_text(row: Setting, value: object) -> str:
    if isinstance(value, bool):
        raise TypeError
    if row.parse is _seconds:
        if not isinstance(value, numbers.Real):
            raise TypeError
        return repr(float(value))
    if row.name in ("RANK", "SIZE"):
        return str(operator.index(value))  # type: ignore[arg-type]  # raises if it is no integer
    if not isinstance(value, str):
        raise TypeError
    return value


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check all `ALLREDUCE_…` variables.

    Raises:
        UsageError: A value is not valid; the message names the variable.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for row in TABLE:
        text = environ.get(row.variable)
        if text is None:
            values[row.name.lower()] = row.default
            continue
        try:
            values[row.name.lower()] = row.parse(text)
        except ValueError:
            shown = "<hidden>" if row.name == "SECRET" else repr(text)
            raise UsageError(
                f"{row.variable}={shown} is not valid: expected {row.expects} ({row.doc})"
            ) from None
    return Settings(**values, unknown=_unknown(environ))


def _unknown(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = [row.variable for row in TABLE]
    warnings = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            warnings.append(f"unknown environment variable {name}{did_you_mean(name, known)}")
    return tuple(warnings)
