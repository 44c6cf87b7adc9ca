"""Compare training steps with other libraries and with hand-written loops.

    python benchmarks/training.py                          # beside NumPy: all that is at hand here
    python benchmarks/training.py --peers                  # beside PyTorch and TensorFlow, too
    python benchmarks/training.py --peers pytorch --cases mlp conv --seconds 6

Each side of a case is one process or several, with one BLAS thread each, or as many threads of one
process, that live as long as the case does. They train alternately, for a fraction of a second each
time, while all others sleep; a step ends when its last process is done. All start from the same
weights and gets the same samples, new ones in each step, and the losses of the first steps are
compared.

With --peers each library gets a virtual environment, made once, in a folder outside the checkout.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

from measure import alternation, jobs, revision
from measure.environments import DEFAULT_FOLDER, Environments
from reports import goals, standings
from trainers import HERE, TRAINERS
from workloads import WORKLOADS

from allreduce.comm import world

_RESULTS = Path(__file__).resolve().parent / "results"
_PEERS = [name for name in TRAINERS if name not in HERE]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="*", choices=[*_PEERS, "numpy"], help="all without a name")
    parser.add_argument("--seconds", type=float, default=4.0, help="that each side trains a case")
    parser.add_argument("--rounds", type=int, default=8, help="turns in which it does so")
    parser.add_argument("--out", type=Path, default=_RESULTS / "training", help="without suffix")
    parser.add_argument("--update", action="store_true", help="keep other cases that are in there")
    parser.add_argument("--environments", type=Path, default=DEFAULT_FOLDER, help="kept in here")
    parser.add_argument("--deadline", type=float, default=900, help="seconds that a case may take")
    options = parser.parse_args()
    if world().size > 1:
        raise SystemExit("training.py starts all processes itself: python benchmarks/training.py")
    peers = [] if options.peers is None else options.peers or _PEERS
    if options.update:
        check_update(options, {*HERE, *peers})
    failed = _run(options, pythons(peers, options.environments))
    if failed:
        raise SystemExit(f"training.py: not measured: {', '.join(failed)}")


def check_update(options: argparse.Namespace, measured: Container[str]) -> None:
    """Refuse to drop rows of sides that would not be measured.

    Raises:
        SystemExit: There are such rows.
    """
    sides = {
        WORKLOADS[case].title: {
            TRAINERS[name].title for name, _ in WORKLOADS[case].sides if name in measured
        }
        for case in options.cases
    }
    known, _ = standings.read(options.out)
    lost = standings.missing(known, sides)
    if lost:
        raise SystemExit(
            f"training.py: --update would drop {', '.join(lost)}; measure them too, with --peers, "
            "or write elsewhere, with --out"
        )


def pythons(peers: list[str], folder: Path) -> dict[str, Path]:
    """Return the interpreter of each side; install missing packages."""
    found = {name: Path(sys.executable) for name in HERE}
    needed = [(name, TRAINERS[name]) for name in peers if name not in HERE]
    if needed:
        environments = Environments(folder)
        for name, trainer in needed:
            assert trainer.environment is not None, name
            try:
                found[name] = environments.made(trainer.environment, *trainer.packages)
            except subprocess.CalledProcessError as error:
                print(f"{trainer.title}: {error}", file=sys.stderr)
    return found


def _run(options: argparse.Namespace, interpreters: dict[str, Path]) -> list[str]:
    """Measure all cases, print and write the results; return the failed ones."""
    failed, made, figures = [], [], []
    measured = revision.current()
    for case in options.cases:
        print(f"{WORKLOADS[case].title} ...", file=sys.stderr, flush=True)
        try:
            found = alternation.measure(
                WORKLOADS[case],
                interpreters,
                seconds=options.seconds,
                rounds=options.rounds,
                deadline=options.deadline,
            )
            goals.check_losses(case, found)
        except (jobs.JobError, AssertionError) as error:
            print(f"{case}: {error}", file=sys.stderr, flush=True)
            failed.append(case)
            continue
        made += goals.standings(case, found, measured)
        figures += goals.figures(case, found, measured)
    if made:
        standings.show(made, figures)
        title = "training steps, one BLAS thread per process"
        if options.update:
            made, figures = standings.merged(standings.read(options.out), (made, figures))
        standings.save(made, figures, options.out, title)
    return failed


if __name__ == "__main__":
    main()
