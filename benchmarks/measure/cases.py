"""The cases: a collective, its bytes, and the expected result.

Needs only NumPy: peers that cannot share our process import it in their own environments.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (8, 256, 4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
DTYPES = ("float32", "float16", "bfloat16")
LEFT_OUT = "left out: "  # the prefix of messages about cases that are not measured

# The others are about bandwidth; what they cost in latency, all_reduce shows.
_OTHERS_SMALLEST, _OTHERS_LARGEST = 256 * KIB, 64 * MIB
_HIGHEST_SUM = 240  # bfloat16 holds whole numbers up to 256
_ARRAYS = 9  # of a case at once on a rank: the source, what is expected, and seven contestants'


@dataclass(frozen=True)
class Case:
    """One collective on whole numbers, whose sums every type holds exactly.

    Args:
        collective: Its name in `Communicator`.
        dtype: The dtype of the elements.
        ranks: The number of ranks.
        nbytes: The bytes of one rank's input.
    """

    collective: str
    dtype: str
    ranks: int
    nbytes: int

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The type as NumPy knows it; bfloat16 is ml_dtypes'."""
        if self.dtype == "bfloat16":
            import ml_dtypes  # adds its names to NumPy's  # noqa: F401
        return np.dtype(self.dtype)

    @property
    def count(self) -> int:
        """Elements of one rank's input; where it is cut into shares, these are equal."""
        fitting = self.nbytes // (4 if self.dtype == "float32" else 2)
        cut = self.collective in ("reduce_scatter", "all_to_all")
        return fitting // self.ranks * self.ranks if cut else fitting

    @property
    def out_count(self) -> int:
        """Elements of one rank's output."""
        if self.collective == "reduce_scatter":
            return self.count // self.ranks
        return self.count * (self.ranks if self.collective == "all_gather" else 1)

    @property
    def in_place(self) -> bool:
        """Whether the output is written where the input is."""
        return self.collective in ("all_reduce", "broadcast")

    def source(self, rank: int) -> Array:
        """Return the rank's input, `(count,)`."""
        length = _HIGHEST_SUM // self.ranks + 1
        return np.resize(np.roll(np.arange(length), -rank).astype(self.numpy_dtype), self.count)

    def expected(self, rank: int) -> Array:
        """Return the rank's expected output, `(out_count,)`."""
        share = self.count // self.ranks
        own = slice(rank * share, (rank + 1) * share)
        if self.collective == "broadcast":
            return self.source(0)
        if self.collective == "all_gather":
            return np.concatenate([self.source(each) for each in range(self.ranks)])
        if self.collective == "all_to_all":
            return np.concatenate([self.source(each)[own] for each in range(self.ranks)])
        total = self.source(0)
        for each in range(1, self.ranks):
            total += self.source(each)
        return total[own] if self.collective == "reduce_scatter" else total

    def fits(self) -> bool:
        """Whether the arrays of all ranks take half of the machine's memory at most.

        Equal on all ranks: it considers installed memory, not free memory.
        """
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        each = max(self.nbytes, self.out_count * self.numpy_dtype.itemsize)
        return _ARRAYS * each * self.ranks <= installed // 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the cases and their precision."""
    parser.add_argument("--seconds", type=float, default=2.0, help="per case")
    parser.add_argument("--smallest", type=int, help="bytes of a rank's input")
    parser.add_argument("--largest", type=int, help="bytes of a rank's input")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES)


def selected(options: argparse.Namespace, ranks: int) -> Iterator[Case]:
    """Yield the float32 cases that `add_arguments`'s options ask for, on so many ranks."""
    for collective in options.collectives:
        small = collective == "all_reduce"
        smallest = options.smallest or (SIZES[0] if small else _OTHERS_SMALLEST)
        largest = options.largest or (SIZES[-1] if small else _OTHERS_LARGEST)
        for nbytes in SIZES:
            if not smallest <= nbytes <= largest:
                continue
            case = Case(collective, "float32", ranks, nbytes)
            if case.fits():
                yield case
            else:
                text = f"{collective} of {size_name(nbytes)} on {ranks} ranks"
                print(f"{LEFT_OUT}{text} needs most of the memory", file=sys.stderr)


def size_name(nbytes: int) -> str:
    """Return a size as people say it: `4 KiB`."""
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"
