"""Train on handwritten digits with parameter servers: variables on `ps` tasks, work on workers.

    .venv/bin/python -m allreduce.run --cluster ps=1,worker=2 mpi_examples/parameter_server.py

Asynchronously, each worker's gradients change the parameters as soon as they come; with --sync
behind the script's name, an update waits for the gradients of all workers.
"""

from __future__ import annotations

import argparse

import allreduce as ar
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync", action="store_true", help="synchronous updates")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    digits = load_digits()
    images, labels = (digits.data / 16.0).astype(np.float32), digits.target.astype(np.int32)
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=42, stratify=labels
    )

    ar.set_seed(0)
    strategy = ar.ParameterServerStrategy(update="sync" if options.sync else "async")
    with strategy.scope():
        model = ar.nn.Sequential(
            [ar.nn.Dense(128, activation="relu"), ar.nn.Dense(10, activation="softmax")]
        )
        model.compile(
            optimizer=ar.optim.Adam(2e-3),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(
        images,
        labels,
        batch_size=64,
        epochs=options.epochs,
        validation_data=(test_images, test_labels),
    )
    if strategy.is_chief:
        _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
