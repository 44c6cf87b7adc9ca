"""The table of choices in force: its file, and that all members have loaded the same."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allreduce import files, settings
from allreduce.cluster import World
from allreduce.comm.choice.choosing import BUILT_IN, Table
from allreduce.comm.choice.table import Row
from allreduce.errors import AllreduceError, JoinError, UsageError, did_you_mean
from allreduce.events import counted, logger

FORMAT = 1
_KEYS = ("format", "cpu", "cores", "date", "rows")
_REMEDY = "correct it, or make it anew with python -m allreduce.tune"
_override: list[Table] = []


def default_path() -> Path:
    """Return where tables are stored unless somebody says otherwise."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home) / "allreduce" / "choices.json"


def current() -> Table:
    """Return the table in force; its file is read once.

    `ALLREDUCE_CHOICES` names the file, or "built-in" for none; without it there is the user's own.

    Raises:
        UsageError: The file cannot be read, or is not valid.
    """
    if _override:
        return _override[-1]
    named = settings.load().choices
    if named == BUILT_IN:
        return Table()
    path = default_path() if named is None else Path(named)
    return _read_once(str(path.absolute()), named is not None)


@contextmanager
def override(table: Table) -> Iterator[None]:
    """Put another table in force for the communicators that this process makes in the block."""
    _override.append(table)
    try:
        yield
    finally:
        _override.remove(table)


@functools.lru_cache(maxsize=8)
def _read_once(path: str, named: bool) -> Table:
    if not named and not _is_there(path):
        return Table()
    try:
        table = read(Path(path))
    except UsageError as error:
        where = "ALLREDUCE_CHOICES: " if named else ""
        raise UsageError(f"{where}{error}") from None
    logger.info("choices: %s of %s in force", counted(len(table.stored), "stored row"), path)
    return table


def _is_there(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # another user's home, say
        logger.warning("cannot look for choices in %s: %s", path, error.strerror)
        return False
    return True


def read(path: Path) -> Table:
    """Read a table from its file.

    Raises:
        UsageError: It cannot be read, or is not valid; the message names the file and the row.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the choices in {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: it is damaged ({error}); {_REMEDY}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise UsageError(f"{path}: its format is {version!r}, not {FORMAT}; {_REMEDY}")
    _check_keys(found, _KEYS, str(path))
    rows = found.get("rows")
    if not isinstance(rows, list):
        raise UsageError(f"{path}: rows={rows!r} is no list; {_REMEDY}")
    stored = tuple(_row(row, f"{path}: row {number}") for number, row in enumerate(rows, 1))
    return Table(stored, str(path))


def write(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Store rows, in place of what was there; `facts` are about the machine and the moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"format": FORMAT, **facts, "rows": [row._asdict() for row in rows]}
    files.replace(path, f"{json.dumps(body, indent=1)}\n".encode())


def _check_keys(found: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in found:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}{did_you_mean(key, known)}; {_REMEDY}")


def _row(found: Any, where: str) -> Row:
    if not isinstance(found, dict):
        raise UsageError(f"{where}: {found!r} is no row; {_REMEDY}")
    _check_keys(found, Row._fields, where)
    for key in ("transport", "collectives", "algorithm"):
        if key not in found:
            raise UsageError(f"{where}: it has no {key!r}; {_REMEDY}")
    for key, value in found.items():
        if not _CHECKS[key](value):
            raise UsageError(f"{where}: {key}={value!r} is not valid; {_REMEDY}")
    lists: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in found.items()
    }
    return Row(**lists)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_range(value: Any) -> bool:
    whole = isinstance(value, list) and len(value) == 2 and _is_whole(value[0])
    return whole and (value[1] is None or _is_whole(value[1]))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "transport": _is_text,
    "collectives": _are_texts,
    "algorithm": _is_text,
    "members": _is_range,
    "bytes": _is_range,
    "crowded": lambda value: value is None or isinstance(value, bool),
    "chunk": lambda value: value is None or _is_whole(value),
    "stores": lambda value: value is None or _is_text(value),
    "past": lambda value: value is None or _is_whole(value),
}


def offer() -> list[str]:
    """Return what this process tells the others of its table: hash, source, and what is wrong."""
    try:
        table = current()
    except AllreduceError as error:
        return ["", "", str(error)]
    return [table.digest, table.source, ""]


def agree(where: str, world: World, told: Sequence[Sequence[str]]) -> None:
    """Compare what all processes of a world have told, by rank.

    Raises:
        UsageError: A process could not load its table.
        JoinError: Two have loaded different ones; all raise the same.
    """
    for rank, (_, _, trouble) in enumerate(told):
        if trouble and rank == world.rank:
            raise UsageError(f"{where}: {trouble}")
        if trouble:
            known = world.members[rank].world_rank
            raise UsageError(f"{where}: not joined: rank {known} has no choices: {trouble}")
    first = told[0]
    for rank, other in enumerate(told):
        if other[0] != first[0]:
            raise JoinError(
                f"{where}: all ranks have to choose alike, but {_whose(world, 0, first)} and "
                f"{_whose(world, rank, other)}; copy one file to all hosts and name it in "
                f"ALLREDUCE_CHOICES, or set that to {BUILT_IN!r} everywhere"
            )


def _whose(world: World, rank: int, told: Sequence[str]) -> str:
    member = world.members[rank]
    source = "the built-in table" if told[1] == BUILT_IN else f"the choices in {told[1]}"
    return f"rank {member.world_rank} on {member.host} has {source} (hash {told[0][:12]})"
