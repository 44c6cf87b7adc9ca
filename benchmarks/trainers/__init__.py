"""The contestants of training: ours, other libraries, and hand-written loops."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trainer:
    """A contestant of benchmarks/training.py.

    Args:
        title: Its name in tables.
        module: The module of this package that builds its sides.
        environment: The name of its environment; None for this script's.
        packages: The packages of that environment.
        settings: Environment variables that its processes need.
        in_one: If one process has all replicas: "devices" if they meet in each step, "threads" if
            each trains separately.
    """

    title: str
    module: str
    environment: str | None = None
    packages: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    in_one: str = ""


_PYTORCH = ("numpy", "torch==2.13.0")
TRAINERS = {
    "ours": Trainer("ours", "ours"),
    "apart": Trainer("ours, each process by itself", "ours"),
    "devices": Trainer("ours, devices of one process", "ours_devices", in_one="devices"),
    "threads": Trainer("ours, each thread by itself", "ours_devices", in_one="threads"),
    "numpy": Trainer("NumPy loop", "numpy_loop"),
    "bandwidth": Trainer("one read and one write", "bandwidth"),
    "pytorch": Trainer("PyTorch", "pytorch", "pytorch", _PYTORCH),
    "pytorch-fused": Trainer("PyTorch, fused Adam", "pytorch", "pytorch", _PYTORCH),
    "tensorflow": Trainer(
        "TensorFlow",
        "tensorflow_workers",
        "tensorflow",
        ("numpy", "tensorflow-cpu==2.21.0"),
        (("TF_CPP_MIN_LOG_LEVEL", "2"),),
    ),
}
# They need no further packages.
HERE = ("ours", "apart", "devices", "threads", "numpy", "bandwidth")
