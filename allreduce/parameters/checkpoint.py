"""Checkpoints of parameter servers: each writes its part, and any number of servers can read them.

A part is a safetensors file with parameters and slots; its metadata have the place in the arena,
the version and a checksum. Files are replaced as a whole.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from allreduce import files
from allreduce.errors import UsageError
from allreduce.events import logger
from allreduce.parameters.partition import Part

_FORMAT = "allreduce-parameters-1"


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file has: arrays by name, and a description of them as plain data."""

    arrays: dict[str, np.ndarray]
    described: dict[str, Any]


def check_folder(folder: Path, server: str) -> None:
    """Make a folder if it is missing, and try to write there.

    Raises:
        UsageError: The system does not take it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"[parameter server] {server} cannot write checkpoints to {folder}: {error.strerror}; "
            "pass a checkpoint= folder in which every server may write"
        ) from error


def write(path: Path, contents: Contents) -> None:
    """Write or replace a file.

    Raises:
        OSError: The system does not take it; an old file is as it was.
    """
    text = json.dumps(contents.described)
    metadata = {"format": _FORMAT, "described": text, "crc32": _checksum(contents.arrays, text)}
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, save(contents.arrays, metadata=metadata))


def remove(path: Path) -> None:
    """Remove a file, if it is there; warns if the system does not let it."""
    try:
        path.unlink(missing_ok=True)
    except NotADirectoryError:  # nor is it there
        return
    except OSError as error:
        logger.warning("[parameter server] %s could not be removed: %s", path, error.strerror)


def read(path: Path) -> Contents | None:
    """Read a file; warns and returns None if it is damaged or no checkpoint."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        logger.warning("[parameter server] the checkpoint %s is ignored: %s", path, error)
        return None
    text = metadata.get("described", "")
    if metadata.get("format") != _FORMAT or metadata.get("crc32") != _checksum(arrays, text):
        logger.warning(
            "[parameter server] the checkpoint %s is ignored: its checksum is wrong", path
        )
        return None
    return Contents(arrays, json.loads(text))


def _checksum(arrays: Mapping[str, np.ndarray], text: str) -> str:
    state = crc32(text.encode())
    for name in sorted(arrays):
        state = crc32(name.encode(), state)
        state = crc32(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data, state)
    return f"{state:08x}"


# --- parts of an arena ---


def part_path(folder: Path, key: str, index: int, servers: int) -> Path:
    """Return the file of one server's part."""
    return folder / f"{key}-part-{index}-of-{servers}.safetensors"


def describe_part(part: Part, arrays: dict[str, np.ndarray], version: int) -> Contents:
    """Return the contents of the file of one server's part."""
    described = {"start": part.start, "stop": part.stop, "version": version}
    return Contents(arrays, described)


def read_part(folder: Path, key: str, part: Part) -> tuple[dict[str, np.ndarray], int] | None:
    """Read a part from the files of any number of servers, one after the other.

    Files without an element of the part are not read, as all together may not fit into memory.

    Returns:
        Its arrays and their version, the lowest of the files'; of several sets of files the newest
        one. None if there is no complete one.
    """
    sets: dict[str, list[tuple[Path, dict[str, Any]]]] = defaultdict(list)
    for path in sorted(folder.glob(f"{key}-part-*-of-*.safetensors")):
        described = _described(path)
        if described is not None and _overlap(described, part).size:
            sets[path.stem.rpartition("-")[2]].append((path, described))

    def version(found: Sequence[tuple[Path, dict[str, Any]]]) -> int:
        return min(int(described["version"]) for _, described in found)

    for each in sorted(sets.values(), key=version, reverse=True):
        if sum(_overlap(described, part).size for _, described in each) == part.size:
            found = _joined([path for path, _ in each], part)
            if found is not None:
                return found
    return None


def _described(path: Path) -> dict[str, Any] | None:
    """Read the description in a file; warns and returns None if there is none."""
    try:
        with safe_open(path, framework="numpy") as file:
            found: dict[str, Any] = json.loads((file.metadata() or {})["described"])
            return found
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        logger.warning("[parameter server] the checkpoint %s is ignored: %r", path, error)
        return None


def _overlap(described: Mapping[str, Any], part: Part) -> Part:
    """Return what a file has of a part, without spans."""
    low, high = max(described["start"], part.start), min(described["stop"], part.stop)
    return Part(low, max(low, high), ())


def _joined(paths: Sequence[Path], part: Part) -> tuple[dict[str, np.ndarray], int] | None:
    arrays: dict[str, np.ndarray] = {}
    versions = []
    for path in paths:
        found = read(path)
        if found is None:
            return None
        here, start = _overlap(found.described, part), found.described["start"]
        versions.append(found.described["version"])
        for name, array in found.arrays.items():
            whole = arrays.setdefault(name, np.empty(part.size, array.dtype))
            own = array[here.start - start : here.stop - start]
            whole[here.start - part.start : here.stop - part.start] = own
    return arrays, min(versions)


# --- writing beside the updates ---


class Writer:
    """Writes files in a thread, one at a time; what comes while it is busy is left out."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._refused = ""  # why the latest file could not be written; said once

    def start(
        self,
        path: Path,
        contents: Callable[[], Contents],
        written: Callable[[], None] = lambda: None,
    ) -> bool:
        """Write a file, unless another one is being written.

        Args:
            path: The file.
            contents: Returns what to write, which must not change any more; called at once.
            written: Called when the file is there; not if the system does not take it.

        Returns:
            Whether it will be written.
        """
        if not self._busy.acquire(blocking=False):
            return False
        made = self._made(contents)
        threading.Thread(target=self._write, args=(path, made, written), daemon=True).start()
        return True

    def write(
        self,
        path: Path,
        contents: Callable[[], Contents],
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a file, after the one that is being written; blocks until it is.

        The arguments are those of `start`.
        """
        self._busy.acquire()
        self._write(path, self._made(contents), written)

    def _made(self, contents: Callable[[], Contents]) -> Contents:
        try:
            return contents()
        except BaseException:
            self._busy.release()
            raise

    def _write(self, path: Path, contents: Contents, written: Callable[[], None]) -> None:
        try:
            write(path, contents)
            written()
            self._refused = ""
        except OSError as error:
            before, self._refused = self._refused, files.refusal(error)
            if self._refused != before:
                logger.warning("[parameter server] no checkpoint %s: %s", path, self._refused)
        finally:
            self._busy.release()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        with self._busy:
            pass
