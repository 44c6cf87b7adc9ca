"""First values of variables: functions of the seed and the variable's path alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from allreduce.errors import UsageError, unknown_name
from allreduce.graph.core.seed import get_seed

# (shape, dtype, the variable's path) -> values
Initializer = Callable[[tuple[int, ...], np.dtype[Any], str], np.ndarray]

# A normal distribution cut off at two deviations has this deviation; Keras divides by it too.
_TRUNCATED_DEVIATION = 0.87962566103423978


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> np.ndarray:  # noqa: ARG001
    """Fill with 0."""
    return np.zeros(shape, dtype)


def ones(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> np.ndarray:  # noqa: ARG001
    """Fill with 1."""
    return np.ones(shape, dtype)


def _generator(path: str) -> np.random.Generator:
    """Make the counter-based generator of one variable."""
    key = blake2b(f"{get_seed()} {path}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Count a kernel's inputs and outputs per element: `(…, in, out)`, times what stands before."""
    if len(shape) < 2:
        size = shape[0] if shape else 1
        return size, size
    receptive = math.prod(shape[:-2])
    return shape[-2] * receptive, shape[-1] * receptive


def _uniform(scale: Callable[[int, int], float]) -> Initializer:
    def make(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> np.ndarray:
        limit = math.sqrt(3 * scale(*fans(shape)))
        return _generator(path).uniform(-limit, limit, shape).astype(dtype)

    return make


def _normal(scale: Callable[[int, int], float]) -> Initializer:
    def make(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> np.ndarray:
        deviation = math.sqrt(scale(*fans(shape))) / _TRUNCATED_DEVIATION
        generator = _generator(path)
        values = np.asarray(generator.standard_normal(shape))
        while (far := np.abs(values) > 2).any():
            values[far] = generator.standard_normal(int(far.sum()))
        return (values * deviation).astype(dtype)

    return make


def _glorot(fan_in: int, fan_out: int) -> float:
    return 2 / max(1, fan_in + fan_out)


def _he(fan_in: int, fan_out: int) -> float:  # noqa: ARG001
    return 2 / max(1, fan_in)


def random_uniform(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> np.ndarray:
    """Draw evenly from -0.05 to 0.05."""
    return _generator(path).uniform(-0.05, 0.05, shape).astype(dtype)


def random_normal(shape: tuple[int, ...], dtype: np.dtype[Any], path: str) -> np.ndarray:
    """Draw from a normal distribution of deviation 0.05."""
    return (_generator(path).standard_normal(shape) * 0.05).astype(dtype)


# glorot: Glorot and Bengio, Understanding the difficulty of training deep feedforward neural
# networks (AISTATS 2010), section 4.2.1. he: He et al., Delving deep into rectifiers (ICCV 2015),
# section 2.2.
TABLE: Mapping[str, Initializer] = {
    "glorot_normal": _normal(_glorot),
    "glorot_uniform": _uniform(_glorot),
    "he_normal": _normal(_he),
    "he_uniform": _uniform(_he),
    "ones": ones,
    "random_normal": random_normal,
    "random_uniform": random_uniform,
    "zeros": zeros,
}


def get(name: str) -> Initializer:
    """Return an initializer by name.

    Raises:
        UsageError: There is none of that name; the message lists those that exist.
    """
    if not isinstance(name, str):
        raise UsageError(f"an initializer is a name ({', '.join(TABLE)}), not {name!r}")
    if name not in TABLE:
        raise unknown_name("initializer", name, TABLE)
    return TABLE[name]
