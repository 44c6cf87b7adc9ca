"""Damaged and absurd files: refused with the file's name, or harmless."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from allreduce import nn
from allreduce.errors import UsageError
from allreduce.nn.models import saving

ROUNDS = [100, pytest.param(6000, marks=[pytest.mark.torture, pytest.mark.timeout(600)])]

# What takes the place of a part of a description. A JSON parser takes all of them.
STRANGE: list[Any] = [
    *(None, True, -1, 0, 2, 3.5, 1e308, float("nan"), 10**9, 10**12, 10**19, 10**30, -(10**30)),
    *("", "x", "relu", "float16", "int64", "zeros", "é\ud800", [], {}, [[]], [1], [3, 3], [None]),
    *({"x": 1}, [10**9, 10**9]),
]


@dataclass
class Saved:
    """A model's file, and what becomes of files like it."""

    path: Path
    contents: bytes
    weights: list[np.ndarray]

    def outcome(self, contents: bytes | None = None) -> str:
        """Load the file, with other contents if there are some; anything but a refusal raises."""
        if contents is not None:
            self.path.write_bytes(contents)
        try:
            found = nn.load_model(self.path).get_weights()
        except UsageError as error:
            return "refused" if str(self.path) in str(error) else f"a file without a name: {error}"
        same = [np.array_equal(*pair) for pair in zip(found, self.weights, strict=True)]
        return "the same" if all(same) else "another"


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    layers: list[nn.Layer] = [nn.Input((6, 6, 1)), nn.Conv2D(3, 3, activation="relu")]
    layers += [nn.BatchNorm(), nn.MaxPool2D(), nn.Flatten()]
    layers += [nn.Sequential([nn.Dense(4, "tanh"), nn.Dropout(0.2)]), nn.LayerNorm()]
    model = nn.Sequential([*layers, nn.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(np.ones((8, 6, 6, 1)), np.zeros(8, int), verbose=0)
    path = tmp_path / "model"
    model.save(path)
    return Saved(path, path.read_bytes(), model.get_weights())


def flipped(contents: bytes, bit: int) -> bytes:
    changed = bytearray(contents)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_no_flipped_bit_gives_another_model(saved: Saved, rounds: int) -> None:
    draw = random.Random(7)
    header = 8 + int.from_bytes(saved.contents[:8], "little")
    outcomes: Counter[str] = Counter()
    for number in range(rounds):
        bit = draw.randrange(8 * (len(saved.contents) if number % 2 else header))
        outcomes[saved.outcome(flipped(saved.contents, bit))] += 1
    assert outcomes.keys() <= {"refused", "the same"}
    assert outcomes["refused"] > 0.9 * rounds


@pytest.mark.parametrize("rounds", ROUNDS)
def test_files_without_a_checksum_load_or_are_refused(saved: Saved, rounds: int) -> None:
    draw = random.Random(8)
    tensors, described = saving.read(saved.path)
    metadata = {"format": saving.FORMAT, "allreduce": json.dumps(described)}
    save_file(tensors, saved.path, metadata=metadata)
    assert saved.outcome() == "the same"
    contents = saved.path.read_bytes()
    for number in range(rounds):
        if number % 3:
            changed = flipped(contents, draw.randrange(8 * len(contents)))
        else:
            changed = contents[: draw.randrange(len(contents))]
        assert saved.outcome(changed) in {"refused", "the same", "another"}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Go through the parts of a description, by how they are reached."""
    keys = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    for key in keys:
        yield (*at, key)
        yield from places(value[key], (*at, key))


def deep(depth: int, layers: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"class": "Sequential", "config": {"layers": [value]}} if layers else [value]
    return value


def changed_somewhere(described: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    changed = copy.deepcopy(described)
    for _ in range(draw.choice([1, 1, 2])):
        *way, last = draw.choice([*places(changed)])
        owner: Any = changed
        for key in way:
            owner = owner[key]
        how = draw.random()
        if how < 0.2:
            del owner[last]
        elif how < 0.3:
            owner[last] = deep(draw.choice([50, 250]), draw.random() < 0.5)
            break  # JSON itself is not written in any depth
        elif how < 0.4:
            owner[last] = copy.deepcopy(described)
        else:
            owner[last] = draw.choice(STRANGE)
    return changed


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_changed_description_is_made_or_refused(saved: Saved, rounds: int) -> None:
    draw = random.Random(9)
    tensors, described = saving.read(saved.path)
    outcomes: Counter[str] = Counter()
    for _ in range(rounds):
        saving.write(saved.path, tensors, changed_somewhere(described, draw))
        outcomes[saved.outcome()] += 1
    assert outcomes.keys() == {"refused", "the same"}


METADATA = b'"__metadata__":{"format":"allreduce-model-1","allreduce":"{}"}'


@pytest.mark.parametrize(
    "header",
    [
        b'{"x":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"F32","shape":%b,"data_offsets":[0,4]}}' % str([1] * 70).encode(),
        b'{"y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"x":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[0,0]}}',
        b"{%b" % (b'"a":{' * 10000),
    ],
)
def test_absurd_headers_are_refused(tmp_path: Path, header: bytes) -> None:
    header = b"{%b,%b" % (METADATA, header[1:])
    path = tmp_path / "model"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(UsageError, match=f"{path} is no readable model"):
        nn.load_model(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"model":' * 5000 + "1" + "}" * 5000])
def test_deep_descriptions_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model"
    save_file({"x": np.ones(3)}, path, metadata={"format": saving.FORMAT, "allreduce": text})
    with pytest.raises(UsageError, match=f"{path} is damaged: its description is no JSON"):
        nn.load_model(path)


def test_no_memory_is_taken_for_what_the_file_has_no_values_of(saved: Saved) -> None:
    tensors, described = saving.read(saved.path)
    described["model"]["config"]["layers"][1]["config"]["filters"] = 10**12
    saving.write(saved.path, tensors, described)
    said = "cannot be loaded: variable .*kernel' is described with shape .*1000000000000.* larger"
    with pytest.raises(UsageError, match=said):
        nn.load_model(saved.path)


def test_another_checksum_says_what_was_found_and_expected(saved: Saved) -> None:
    tensors, described = saving.read(saved.path)
    metadata = {"format": saving.FORMAT, "allreduce": json.dumps(described), "crc32": "12345678"}
    save_file(tensors, saved.path, metadata=metadata)
    said = r"model is damaged: .* is [0-9a-f]{8}, but 12345678 was saved with them \(a tool"
    for load in (nn.load_model, nn.Sequential([nn.Input((3,)), nn.Dense(1)]).load_weights):
        with pytest.raises(UsageError, match=said):
            load(saved.path)
