"""Run every peer in its own environment, together with ours, and combine the figures."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from measure import jobs
from measure.cases import LEFT_OUT
from measure.contest import Timing, load
from measure.environments import Environments
from measure.revision import current
from peers import OVER_SOCKETS, PEERS, Peer
from reports import comparison
from reports.comparison import Run

_HERE = Path(__file__).resolve().parent
_TYPES_SMALLEST = 1 << 20  # bytes; below, latency decides, which knows no types
_UNPREPARED = (jobs.JobError, subprocess.CalledProcessError)


def drive(options: argparse.Namespace) -> None:
    """Compare with the peers that the options name; print and write the results.

    Raises:
        SystemExit: Some of it could not be measured; the rest is reported first.
    """
    names = list(options.peers or (PEERS if options.transport == "shared" else OVER_SOCKETS))
    driver = _Driver(options)
    types = [dtype for dtype in options.dtypes if dtype != "float32"]
    for ranks in options.ranks:
        for name in names:
            driver.attempt(f"{PEERS[name].title}, {ranks} ranks", driver.beside, name, ranks)
        if types:
            what = f"{' and '.join(types)}, {ranks} ranks"
            driver.attempt(what, driver.types, names[0], ranks, types)
    if driver.runs:
        comparison.print_comparisons(driver.runs)
        if types:
            comparison.print_types(driver.runs)
        title = f"ours over {options.transport}, and peers"
        kept = comparison.kept(options.out, driver.runs) if options.add else []
        comparison.save([*kept, *driver.runs], options.out, title)
    if driver.failed:
        raise SystemExit(f"collectives.py: not measured: {'; '.join(driver.failed)}")


class _Driver:
    def __init__(self, options: argparse.Namespace) -> None:
        self.runs: list[Run] = []
        self.failed: list[str] = []
        self._options = options
        self._environments = Environments(options.environments)

    def attempt(self, what: str, measure: Callable[..., Run], *arguments: object) -> None:
        """Add a run; report a failure, and continue with the others."""
        print(f"{what} ...", file=sys.stderr, flush=True)
        try:
            self.runs.append(measure(*arguments))
        except _UNPREPARED as error:
            print(f"{what}: {error}", file=sys.stderr, flush=True)
            self.failed.append(what)

    def beside(self, name: str, ranks: int) -> Run:
        """Measure ours and one peer: alternately in one job, or in two jobs, ours first."""
        peer = PEERS[name]
        carried = [each for each in self._options.collectives if each in peer.carries]
        if not carried:
            raise jobs.JobError(f"it has no {', '.join(self._options.collectives)}")
        cases = self._cases(carried)
        python = self._environments.python(name, peer)
        if peer.launcher is not None:
            start = [str(python.with_name("mpiexec")), *peer.launcher, "-n", str(ranks)]
            timings, about = self._job(peer, [[*start, str(python), *self._ours(cases)]])
            return Run(peer.title, about, timings, current())
        ours, _ = self._alone(python, peer, ranks, cases)
        ports = jobs.free_ports(ranks)
        told = ["--ports", *map(str, ports)]
        script = [str(python), "-m", f"peers.{peer.script}", *cases]
        each = [[*script, *told, "--rank", str(rank)] for rank in range(ranks)]
        theirs, about = self._job(peer, each)
        return Run(peer.title, about, [*ours, *theirs], current())

    def types(self, name: str, ranks: int, types: Sequence[str]) -> Run:
        """Measure only ours, with further dtypes besides float32."""
        python = self._environments.python(name, PEERS[name])
        smallest = max(_TYPES_SMALLEST, self._options.smallest or 0)
        cases = [*self._cases(["all_reduce"]), "--dtypes", *types, "--smallest", str(smallest)]
        timings, about = self._alone(python, PEERS[name], ranks, cases)
        return Run("", about, timings, current())

    def _alone(
        self, python: Path, peer: Peer, ranks: int, cases: Sequence[str]
    ) -> tuple[list[Timing], str]:
        start = [str(python), "-m", "allreduce.run", "-n", str(ranks)]
        return self._job(peer, [[*start, *self._ours(cases)]])

    def _job(self, peer: Peer, commands: Sequence[Sequence[str]]) -> tuple[list[Timing], str]:
        """Run a job, and return the file of its rank 0."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "timings.json"
            said = jobs.run(
                [[*command, "--timings", str(path)] for command in commands],
                environ=dict(peer.settings),
                cwd=_HERE,
                deadline=self._options.deadline,
            )
            for line in dict.fromkeys(said.splitlines()):
                if LEFT_OUT in line:
                    print(line, file=sys.stderr)
            return load(path)

    def _ours(self, cases: Sequence[str]) -> list[str]:
        script = str(_HERE / "collectives.py")
        return [script, "--transport", self._options.transport, *cases]

    def _cases(self, collectives: Sequence[str]) -> list[str]:
        options = self._options
        told = ["--seconds", str(options.seconds), "--collectives", *collectives]
        for name in ("smallest", "largest"):
            if getattr(options, name) is not None:
                told += [f"--{name}", str(getattr(options, name))]
        return told
