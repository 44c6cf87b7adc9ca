"""Train a model whose layers are on two devices of each replica, on all processes of the job.

    .venv/bin/python mpi_examples/model_parallel.py
    .venv/bin/mpirun -n 2 .venv/bin/python mpi_examples/model_parallel.py

Each process has one replica, on two devices. These are GPUs where there are some, otherwise CPUs;
if a rank has only one, it is split into two logical ones. Tensors that cross devices are copied
automatically. The same model is also trained on one device of each replica: the weights are the
same, to the bit (on GPUs, of one or two replicas: NCCL may add up those of more in another order).
"""

from __future__ import annotations

import argparse

import allreduce as ar
import numpy as np
from sklearn.datasets import load_digits

HELD_OUT = 360  # of 1,797 images


def train(strategy: ar.Strategy, second: str, epochs: int) -> ar.nn.Sequential:
    """Train a model whose last two layers are on the device `second` of each replica."""
    with strategy.scope():
        model = ar.nn.Sequential(name="digits")
        model.add(ar.nn.Dense(128, activation="relu"))
        model.add(ar.nn.Dense(64, activation="relu"))
        with ar.device(second):  # indices count the replica's own devices
            model.add(ar.nn.Dense(64, activation="relu"))
            model.add(ar.nn.Dense(10, activation="softmax"))
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    held_out = images[-HELD_OUT:], labels[-HELD_OUT:]
    model.fit(images[:-HELD_OUT], labels[:-HELD_OUT], epochs=epochs, batch_size=64, verbose=0)
    _, accuracy = model.evaluate(*held_out, verbose=0)
    if strategy.communicator.rank == 0:
        where = " and ".join(dict.fromkeys([f"{second.partition(':')[0]}:0", second]))
        print(f"on {where} of each replica: test accuracy {accuracy:.4f}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="train a model on two devices of each replica")
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    ar.set_seed(0)
    kind = "GPU" if ar.config.list_physical_devices("GPU") else "CPU"
    ar.config.set_logical_devices(kind, 2)
    strategy = ar.MultiWorkerMirroredStrategy(devices_per_replica=2)
    two, one = (train(strategy, f"{kind}:{second}", epochs) for second in (1, 0))
    pairs = zip(two.get_weights(), one.get_weights(), strict=True)
    equal = all(np.array_equal(a, b) for a, b in pairs)
    if strategy.communicator.rank == 0:
        print(f"{strategy}: weights are {'the same to the bit' if equal else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
