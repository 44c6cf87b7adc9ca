"""Train one model over the tasks of a cluster: variables on `ps`, half a batch on each worker.

    .venv/bin/python -m allreduce.run --cluster ps=1,worker=2 mpi_examples/in_graph.py

Worker 0 is the client: it builds one graph for all tasks. The other worker only serves.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import allreduce as ar
import numpy as np
from sklearn.datasets import load_digits

BATCH, EPOCHS = 64, 20
PS = "/job:ps/task:0/cpu:0"
WORKERS = ("/job:worker/task:0/cpu:0", "/job:worker/task:1/cpu:0")


def variables(sizes: list[int]) -> list[tuple[ar.Variable, ar.Variable]]:
    """Describe kernels and biases; the first session creates them on `ps`."""
    random = np.random.default_rng(0)
    made = []
    with ar.device(PS):
        for i, (rows, columns) in enumerate(pairwise(sizes)):
            kernel = random.normal(0, np.sqrt(2 / rows), (rows, columns)).astype(np.float32)
            bias = ar.Variable(np.zeros(columns, np.float32), name=f"{i}/bias")
            made.append((ar.Variable(kernel, name=f"{i}/kernel"), bias))
    return made


def main() -> None:
    """Train, and print the accuracy on held-out images."""
    server = ar.Server()  # cluster and task from the environment
    if server.task.task != 0:
        server.join("worker:0")  # serve until the client has ended
        return
    layers = variables([64, 128, 10])
    optimizer = ar.optim.Adam(3e-3)

    def logits(images: Any) -> Any:
        (kernel, bias), (last, last_bias) = layers
        return ar.ops.relu(images @ kernel + bias) @ last + last_bias

    def step(images: list[Any], labels: list[Any]) -> Any:
        losses = []
        for worker, x, y in zip(WORKERS, images, labels, strict=True):
            with ar.device(worker):
                losses.append(ar.ops.sparse_softmax_cross_entropy(y, logits(x)))
        loss = ar.ops.concatenate(losses, axis=0)
        optimizer.minimize(loss, [each for pair in layers for each in pair])
        return ar.ops.mean(loss)

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    held_out = np.arange(len(images)) % 5 == 0
    (train,) = np.nonzero(~held_out)
    random = np.random.default_rng(1)
    with ar.Session(server.target) as session:
        for epoch in range(EPOCHS):
            order = random.permutation(train)
            for first in range(0, len(train) - BATCH + 1, BATCH):
                halves = np.split(order[first : first + BATCH], 2)
                loss = session.run(step, ([images[h] for h in halves], [labels[h] for h in halves]))
            print(f"epoch {epoch + 1}/{EPOCHS}: loss {float(loss):.4f}")
        found = np.argmax(np.asarray(session.run(logits, (images[held_out],))), axis=1)
        print(f"test accuracy {np.mean(found == labels[held_out]):.4f}")
    server.close()


if __name__ == "__main__":
    main()
