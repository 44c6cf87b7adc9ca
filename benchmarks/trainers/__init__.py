"""Who trains: ours, libraries with environments of their own, and hand-written loops."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trainer:
    """A contestant of benchmarks/training.py.

    Args:
        title: What tables call it.
        module: The module of this package that builds its sides.
        environment: Whose packages it needs; None for those that run this script.
        packages: What that environment holds.
        settings: Environment variables that its processes need.
        in_one: Where one process has all replicas: "devices" if they meet in each step, "threads"
            if each trains by itself.
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
# They need nothing but what runs the script.
HERE = ("ours", "apart", "devices", "threads", "numpy", "bandwidth")
