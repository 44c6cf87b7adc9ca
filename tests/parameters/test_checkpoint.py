"""Checkpoints of any number of servers are read by any other number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allreduce as ar
from allreduce.parameters import checkpoint
from allreduce.parameters.checkpoint import Contents, Writer
from allreduce.parameters.partition import cut
from allreduce.parameters.service import TrainingJob
from allreduce.reduction import lay_out
from allreduce.server.protocol.encode import configured

LAYOUT = lay_out([("table", (100, 4)), ("bias", (3,))], "float32")
WHOLE = np.arange(LAYOUT.size, dtype=np.float32)


def written(folder: Path, servers: int, version: int, add: float = 0.0) -> None:
    for index, part in enumerate(cut(LAYOUT, servers)):
        values = {"parameters": WHOLE[part.start : part.stop] + add}
        path = checkpoint.part_path(folder, "key", index, servers)
        checkpoint.write(path, checkpoint.describe_part(part, values, version))


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_another_number_of_servers_reads_it(tmp_path: Path, before: int, after: int) -> None:
    written(tmp_path, before, 7)
    for part in cut(LAYOUT, after):
        found = checkpoint.read_part(tmp_path, "key", part)
        assert found is not None
        np.testing.assert_array_equal(found[0]["parameters"], WHOLE[part.start : part.stop])
        assert found[1] == 7
    assert checkpoint.read_part(tmp_path, "other", part) is None


def test_the_newest_complete_set_is_read_and_damage_is_noticed(tmp_path: Path) -> None:
    written(tmp_path, 2, 7)
    written(tmp_path, 1, 9, add=1.0)
    (part,) = cut(LAYOUT, 1)
    found = checkpoint.read_part(tmp_path, "key", part)
    assert found is not None
    assert found[1] == 9
    path = checkpoint.part_path(tmp_path, "key", 0, 1)
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    found = checkpoint.read_part(tmp_path, "key", part)
    assert found is not None
    assert found[1] == 7
    checkpoint.part_path(tmp_path, "key", 1, 2).unlink()
    assert checkpoint.read_part(tmp_path, "key", part) is None


def test_only_files_with_some_of_the_part_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 1, 7)
    written(tmp_path, 3, 9)
    opened: list[str] = []
    read = checkpoint.read

    def recorded(path: Path) -> Contents | None:
        opened.append(path.name)
        return read(path)

    monkeypatch.setattr(checkpoint, "read", recorded)
    found = checkpoint.read_part(tmp_path, "key", cut(LAYOUT, 3)[1])
    assert found is not None
    assert found[1] == 9
    assert opened == ["key-part-1-of-3.safetensors"]


def test_one_file_is_written_at_a_time(tmp_path: Path) -> None:
    writer = Writer()
    nothing = Contents({}, {"version": 1})
    assert writer.start(tmp_path / "a", lambda: nothing)
    writer.wait()
    assert checkpoint.read(tmp_path / "a") == nothing


def registration(folder: Path, values: bool = True) -> tuple[dict[str, Any], list[np.ndarray]]:
    (part,) = cut(LAYOUT, 1)
    fields = {
        "store": "key",
        "part": part.as_json(),
        "optimizer": configured(ar.optim.SGD(1.0, momentum=0.5)),
        "dtype": "float32",
        "servers": 1,
        "server": "/job:ps/task:0",
        "index": 0,
        "checkpoint": str(folder),
        "checkpoint_every": 2,
        "task": "worker:0",
        "slots": [],
        "version": 0,
        "newest": False,
    }
    return fields, [np.ones(part.size, np.float32)] if values else []


def test_a_service_that_restarts_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    fields, values = registration(tmp_path)
    service = TrainingJob()
    assert service.call("a", "register", fields, values)[0]["ready"]
    gradients = np.ones_like(values[0])
    for number in (1, 2):
        push = {"store": "key", "count": 1.0, "seen": 0, "number": number, "worker": "a"}
        reply, (before,) = service.call("a", "push", push, [gradients.copy()])
    assert reply["version"] == 2
    service.call("a", "save", {"store": "key"}, [])
    again = TrainingJob()
    assert again.call("a", "push", push, [gradients])[0] == {"unknown": True}
    reply, _ = again.call("a", "register", fields, values)
    assert (reply["version"], reply["restored"]) == (2, True)
    _, (after,) = again.call("a", "pull", {"store": "key", "seen": -1}, [])
    np.testing.assert_array_equal(after, before)
    _, slots = again.call("a", "slots", {"store": "key"}, [])
    assert slots[0].any()


def test_newer_values_of_workers_win_over_a_checkpoint_where_they_may(tmp_path: Path) -> None:
    written(tmp_path, 1, 7)
    fields, _ = registration(tmp_path)

    def register(version: int, value: float, *, newest: bool = True) -> tuple[int, bool]:
        given = {**fields, "version": version, "newest": newest}
        values = np.full(LAYOUT.size - LAYOUT.header, value, np.float32)
        reply, _ = service.call("a", "register", given, [values])
        return reply["version"], reply["taken"]

    service = TrainingJob()
    assert register(9, 1.0, newest=False) == (7, False)
    assert register(8, 2.0) == (8, True)
    assert register(8, 3.0) == (8, False)
    pull = {"store": "key"}
    assert service.call("b", "pull", {**pull, "seen": 9}, []) == ({"unknown": True}, ())
    assert register(9, 4.0) == (9, True)
    _, (found,) = service.call("b", "pull", {**pull, "seen": 8}, [])
    assert (found == 4.0).all()


def test_assigned_values_are_in_the_checkpoint_once_saving_returns(tmp_path: Path) -> None:
    fields, values = registration(tmp_path)
    service = TrainingJob()
    service.call("a", "register", fields, values)
    service.call("a", "assign", {"store": "key", "seen": 0}, [values[0] + 2.0])
    service.call("a", "save", {"store": "key"}, [])
    found = checkpoint.read(checkpoint.part_path(tmp_path, "key", 0, 1))
    assert found is not None
    assert (found.arrays["parameters"] == 3.0).all()


def test_a_checkpoint_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    fields, values = registration(tmp_path)
    service = TrainingJob()
    service.call("a", "register", fields, values)
    path = checkpoint.part_path(tmp_path, "key", 0, 1)
    path.mkdir()  # in the file's place
    service.call("a", "assign", {"store": "key", "seen": 0}, [values[0] + 2.0])
    service.call("a", "save", {"store": "key"}, [])
    path.rmdir()
    service.close()
    found = checkpoint.read(path)
    assert found is not None
    assert (found.arrays["parameters"] == 3.0).all()
