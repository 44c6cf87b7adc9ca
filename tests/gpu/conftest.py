"""Tests of the GPU code. `make gpu-test` runs them, with the packages of `.venv-gpu`."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.gpu import launch

HAS_PACKAGES = all(importlib.util.find_spec(name) for name in ("cuda", "nccl"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave these tests to `make gpu-test` where the packages are not installed."""
    return True if not HAS_PACKAGES and collection_path.name.startswith("test_") else None


def pytest_sessionstart() -> None:
    if (
        HAS_PACKAGES
        and not launch.has_driver()
        and "libcuda" not in os.environ.get("LD_PRELOAD", "")
    ):
        raise pytest.UsageError("no stand-ins are loaded: start these tests with make gpu-test")
