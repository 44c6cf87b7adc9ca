"""Train a table of vectors of which each parameter server holds a part.

    .venv/bin/python -m allreduce.run --cluster ps=2,worker=2 mpi_examples/embeddings.py
    .venv/bin/python -m allreduce.run --cluster ps=2,worker=2 mpi_examples/embeddings.py --sync

Each of an image's 64 pixels has 17 levels; every pair of pixel and level is a word with a vector.
A step looks up the rows of its words, and sends gradients of these rows only.
"""

from __future__ import annotations

import argparse

import allreduce as ar
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

LEVELS, PIXELS = 17, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync", action="store_true", help="synchronous updates")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    digits = load_digits()
    words = digits.data.astype(np.int32) + LEVELS * np.arange(PIXELS, dtype=np.int32)
    labels = digits.target.astype(np.int32)
    words, test_words, labels, test_labels = train_test_split(
        words, labels, test_size=0.2, random_state=42, stratify=labels
    )

    ar.set_seed(0)
    strategy = ar.ParameterServerStrategy(update="sync" if options.sync else "async")
    with strategy.scope():
        model = ar.nn.Sequential(
            [
                ar.nn.Embedding(LEVELS * PIXELS, 16),
                ar.nn.Flatten(),
                ar.nn.Dense(10, activation="softmax"),
            ]
        )
        model.compile(
            optimizer=ar.optim.Adam(5e-3),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    model.fit(words, labels, batch_size=64, epochs=options.epochs)
    if strategy.is_chief:
        _, accuracy = model.evaluate(test_words, test_labels, verbose=0)
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
