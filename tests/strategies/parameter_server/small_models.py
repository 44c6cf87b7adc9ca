"""Small models and data for tests of parameter servers, and the processes of their launcher."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import allreduce as ar

Worker = Callable[..., ar.ParameterServerStrategy]  # with so many servers in this process


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return 230 rows: ten batches of 24, the last one of 14."""
    random = np.random.default_rng(0)
    x = random.standard_normal((230, 6)).astype(np.float32)
    return x, (x.sum(axis=1) > 0).astype(np.int32)


def model_in(strategy: ar.Strategy) -> ar.nn.Sequential:
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Dense(16, activation="relu"), ar.nn.Dense(2)])
        loss = ar.nn.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=ar.optim.Adam(1e-2), loss=loss)
    return model


def words() -> tuple[np.ndarray, np.ndarray]:
    """Return 200 rows of 5 words out of 40, and targets."""
    random = np.random.default_rng(1)
    x = random.integers(0, 40, (200, 5)).astype(np.int32)
    return x, (x.sum(axis=1) > 100).astype(np.int32)


def with_table(strategy: Any, optimizer: Any) -> Any:
    ar.set_seed(5)
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = [ar.nn.Embedding(40, 6), ar.nn.Flatten(), ar.nn.Dense(2)]
        model = ar.nn.Sequential(layers)
        loss = ar.nn.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss)
    return model


def trained(strategy: Any, optimizer: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Train a small model; returns it and its history."""
    ar.set_seed(5)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = ar.nn.Sequential([ar.nn.Dense(8, activation="relu"), ar.nn.Dense(2)])
        loss = ar.nn.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    x, y = data()
    given = {"batch_size": 32, "epochs": 3, "verbose": 0, "validation_data": (x[:50], y[:50])}
    return model, model.fit(**{"x": x, "y": y, **given, **options}).history


def with_averages(strategy: Any) -> Any:
    ar.set_seed(5)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = ar.nn.Sequential([ar.nn.BatchNorm(), ar.nn.Dense(2, activation="softmax")])
        model.compile(ar.optim.SGD(0.1), "sparse_categorical_crossentropy")
    return model


def pid_of(task: str) -> int:
    """Return the process of a task that this process's launcher has started."""
    own = f"ALLREDUCE_TASK={task}".encode()
    command = ["ps", "-o", "pid=", "--ppid", str(os.getppid())]
    for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split():
        environment = Path(f"/proc/{pid}/environ")
        if environment.exists() and own in environment.read_bytes().split(b"\0"):
            return int(pid)
    raise AssertionError(f"no process of {task}")
