"""TensorFlow's tasks, beside ours in `tasks.py`; runs in an environment with TensorFlow.

python tensorflow_tasks.py serve 1 ADDRESSES    # one of the workers
python tensorflow_tasks.py client ADDRESSES     # times null steps, as many as each line says
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf


def serve(task: int, addresses: list[str]) -> None:
    """Serve one task until the process is ended."""
    server = tf.distribute.Server({"worker": addresses}, job_name="worker", task_index=task)
    print("ready", flush=True)
    server.join()


def client(addresses: list[str]) -> None:
    """Add a number on each of two tasks; answers each line with the times in microseconds."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4])
        results = []
        for task in range(2):
            with tf.device(f"/job:worker/task:{task}/cpu:0"):
                results.append(x + 1.0)
    session: Any = tf.compat.v1.Session(f"grpc://{addresses[0]}", graph=graph)
    step = session.make_callable(results, [x])
    value = np.zeros(4, np.float32)
    for _ in range(200):
        step(value)
    print(json.dumps({"version": tf.__version__}), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            step(value)
            times.append((time.perf_counter() - began) * 1e6)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3].split(","))
    else:
        client(sys.argv[2].split(","))
