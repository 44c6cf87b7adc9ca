"""Trains on the digits and prints what it saw as JSON; run under every launcher by a test.

python tests/strategies/steps.py multi|mirrored:N  float32|float64  BATCH  DROPOUT  DIGITS.npz
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

import allreduce as ar

EPOCHS = 5


def main(which: str, dtype: str, batch_size: int, dropout: float, path: str) -> None:
    ar.set_seed(7)
    ar.config.set_floatx(dtype)
    strategy = make_strategy(which)
    with np.load(path) as digits:
        images, labels = (digits["data"] / 16).astype(dtype), digits["target"]
    with strategy.scope():
        model = make_model(dropout)
    # 1,797 rows: the last batch is uneven for every number of replicas, and too small for many.
    history = model.fit(images, labels, batch_size=batch_size, epochs=EPOCHS, verbose=0)
    weights = b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())
    copies = strategy.communicator.all_gather(
        np.frombuffer(hashlib.blake2b(weights, digest_size=8).digest(), np.int64)
    )
    replicas = [variable.storage for variable in model.trainable_variables]
    report = {
        "replicas": strategy.num_replicas_in_sync,
        "loss": history.history["loss"],
        "accuracy": history.history["accuracy"],
        "weights": [int(each) for each in copies],
        "equal": all(np.array_equal(copy, each[0]) for each in replicas for copy in each),
        "predicted": hashlib.blake2b(model.predict(images, verbose=0).tobytes()).hexdigest(),
    }
    if strategy.communicator.rank == 0:
        print(json.dumps(report))


def make_strategy(which: str) -> ar.Strategy:
    if which == "multi":
        return ar.MultiWorkerMirroredStrategy()
    ar.config.set_logical_devices("CPU", int(which.partition(":")[2]))
    return ar.MirroredStrategy()


def make_model(dropout: float) -> ar.nn.Sequential:
    model = ar.nn.Sequential(
        [
            ar.nn.Dense(64, activation="relu"),
            ar.nn.Dropout(dropout),
            ar.nn.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=ar.optim.Adam(2e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
