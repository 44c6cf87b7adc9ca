"""Print the ratio of peers' times to ours, with the goals, as Markdown tables.

    python benchmarks/peer_goals.py                     # of benchmarks/results/peers-2, -8
    python benchmarks/peer_goals.py build/peers.json     # of what collectives.py --out has written

A cell is of a peer's run: on `comm.empty` / on ordinary arrays, each with its goal in round
brackets, bold where it is not reached; in square brackets the probe that moves private arrays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from measure.cases import KIB, MIB, size_name
from measure.contest import EMPTY, ORDINARY, PRIVATE_PROBE
from reports.comparison import Comparison

_RESULTS = Path(__file__).resolve().parent / "results"
_PEERS = ("Open MPI", "MPICH", "Intel MPI", "gloo")
_MEMORIES = {EMPTY: "per_empty", ORDINARY: "per_ordinary", PRIVATE_PROBE: "per_private"}

Key = tuple[str, int, int, str]  # collective, ranks, bytes, peer
Ratios = Mapping[Key, Comparison]


@dataclass(frozen=True)
class Goal:
    """A goal of all_reduce for these numbers of ranks and sizes.

    Args:
        ranks: How many.
        sizes: Bytes; of several the least ratio counts.
        memories: Of `comm.empty`, of ordinary arrays, or of both.
        mpi: How many times as long Open MPI and MPICH are to take, on each of the memories.
        intel: Intel MPI.
        gloo: gloo of PyTorch.
    """

    ranks: int
    sizes: tuple[int, ...]
    memories: tuple[str, ...]
    mpi: tuple[float, ...]
    intel: tuple[float, ...]
    gloo: tuple[float, ...]

    def of(self, peer: str) -> tuple[float, ...]:
        return {"Intel MPI": self.intel, "gloo": self.gloo}.get(peer, self.mpi)


_BOTH = (EMPTY, ORDINARY)
GOALS = (
    Goal(2, (8, 256), (ORDINARY,), (1.2,), (1.0,), (100.0,)),
    Goal(2, (4 * KIB,), _BOTH, (3, 3), (2, 2), (100, 100)),
    Goal(2, (32 * KIB,), _BOTH, (6, 5), (1.8, 1.5), (50, 50)),
    Goal(2, (256 * KIB,), _BOTH, (6, 5), (1.2, 1.05), (6, 6)),
    Goal(2, (1 * MIB,), _BOTH, (6, 5), (1.2, 1.05), (6, 6)),
    Goal(2, (4 * MIB,), _BOTH, (4, 3.5), (5, 4), (5, 4)),
    Goal(2, (16 * MIB,), _BOTH, (3, 2.5), (5, 4), (5, 4)),
    Goal(2, (64 * MIB,), _BOTH, (4, 3.5), (5, 4), (5, 4)),
    Goal(2, (256 * MIB,), _BOTH, (4, 3.5), (5, 4), (5, 4)),
    Goal(8, (8, 256, 4 * KIB), _BOTH, (1, 1), (1, 1), (50, 50)),
    Goal(8, (256 * KIB,), (EMPTY,), (4,), (2,), (5,)),
    Goal(8, (4 * MIB,), (EMPTY,), (3.5,), (4,), (5,)),
    Goal(8, (64 * MIB,), (EMPTY,), (3,), (1.8,), (5,)),
)
_OTHERS = ("reduce_scatter", "all_gather", "broadcast", "all_to_all")
_OTHER_SIZES = (256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_OTHERS_GOALS = {peer: 3.0 if peer == "gloo" else 1.0 for peer in _PEERS}


def read(paths: Iterable[Path]) -> dict[Key, Comparison]:
    """Read the comparisons of files that benchmarks/collectives.py has written."""
    found = {}
    for path in paths:
        for each in json.loads(path.read_text())["comparisons"]:
            one = Comparison(**each)
            found[one.collective, one.ranks, one.nbytes, one.peer] = one
    return found


def reductions(ratios: Ratios) -> Iterator[list[str]]:
    """Yield a line of cells for each goal of all_reduce."""
    for goal in GOALS:
        names = [size_name(each) for each in goal.sizes]
        line = [f"{goal.ranks} ranks, {' to '.join(dict.fromkeys((names[0], names[-1])))}"]
        for peer in _PEERS:
            places = [("all_reduce", goal.ranks, nbytes, peer) for nbytes in goal.sizes]
            line.append(_cell(ratios, places, dict(zip(goal.memories, goal.of(peer), strict=True))))
        yield line


def others(ratios: Ratios) -> Iterator[list[str]]:
    """Yield a line of cells for each other collective and size: on ordinary arrays, of 2 ranks."""
    for collective, nbytes in product(_OTHERS, _OTHER_SIZES):
        line = [f"{collective} {size_name(nbytes)}"]
        for peer in _PEERS:
            goals = {ORDINARY: _OTHERS_GOALS[peer]}
            line.append(_cell(ratios, [(collective, 2, nbytes, peer)], goals, told=False))
        yield line


def _cell(
    ratios: Ratios, places: Sequence[Key], goals: Mapping[str, float], told: bool = True
) -> str:
    """Format the least ratios of some places with their goals; "" if one is unknown."""
    if any(place not in ratios for place in places):
        return ""
    parts = []
    for memory, goal in goals.items():
        least = _least(ratios, places, memory)
        if least is None:
            return ""
        shown = _number(least) if least >= goal else f"**{_number(least)}**"
        parts.append(f"{shown} ({goal:g})" if told else shown)
    private = _least(ratios, places, PRIVATE_PROBE)
    return " / ".join(parts) + (f" [{_number(private)}]" if private is not None else "")


def _least(ratios: Ratios, places: Sequence[Key], memory: str) -> float | None:
    found = [getattr(ratios[place], _MEMORIES[memory]) for place in places]
    return None if None in found else min(found)


def _number(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", help="instead of the stored ones")
    ratios = read(parser.parse_args().files or sorted(_RESULTS.glob("peers-[0-9]*.json")))
    for lines in (reductions(ratios), others(ratios)):
        print(f"| | {' | '.join(_PEERS)} |\n|---{'|---' * len(_PEERS)}|")
        for line in lines:
            if any(line[1:]):
                print(f"| {' | '.join(line)} |")
        print()


if __name__ == "__main__":
    main()
