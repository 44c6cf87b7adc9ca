"""Train a small network on handwritten digits, on all processes of the job.

    .venv/bin/mpirun -n 8 .venv/bin/python mpi_examples/train.py   # ranks from MPI
    .venv/bin/python -m allreduce.run -n 4 mpi_examples/train.py   # ranks from the launcher
    .venv/bin/python mpi_examples/train.py                         # one rank

The data are scikit-learn's 1,797 real images of 8 × 8 pixels; a fifth is held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import allreduce as ar
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def load() -> Arrays:
    """Return training images (1437, 64), test images (360, 64), and both parts' labels."""
    digits = load_digits()
    images = (digits.data / 16.0).astype(np.float32)
    labels = digits.target.astype(np.int32)
    split = train_test_split(images, labels, test_size=0.2, random_state=42, stratify=labels)
    return tuple(split)


def draw(history: ar.nn.History, path: Path) -> None:
    """Plot loss and accuracy per epoch, on training and test data."""
    matplotlib.use("Agg")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), constrained_layout=True)
    epochs = [epoch + 1 for epoch in history.epoch]
    for axis, name in zip(axes, ("loss", "accuracy"), strict=True):
        axis.plot(epochs, history.history[name], label="train")
        axis.plot(epochs, history.history[f"val_{name}"], label="test")
        axis.set(xlabel="epoch", ylabel=name)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_yscale("log")
    figure.suptitle("Handwritten digits")
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    """Read the command line and create the output folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of picture and model")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error("--epochs counts from 1")
    options.out.mkdir(parents=True, exist_ok=True)  # fail before the training, not after it
    return options


def main() -> None:
    options = arguments()
    ar.set_seed(options.seed)
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = ar.nn.Sequential(
            [
                ar.nn.Dense(256, activation="relu"),
                ar.nn.Dropout(0.3),
                ar.nn.Dense(128, activation="relu"),
                ar.nn.Dropout(0.3),
                ar.nn.Dense(10, activation="softmax"),
            ]
        )
        model.compile(
            optimizer=ar.optim.Adam(2e-3),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )

    images, test_images, labels, test_labels = load()
    history = model.fit(
        images,
        labels,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(test_images, test_labels),
    )
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    if strategy.communicator.rank == 0:
        model.save(options.out / "digits.safetensors")
        draw(history, options.out / "training.png")
        replicas = strategy.num_replicas_in_sync
        plural = "" if replicas == 1 else "s"
        print(f"test accuracy {accuracy:.4f} on {replicas} replica{plural}")


if __name__ == "__main__":
    main()
