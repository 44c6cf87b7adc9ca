"""The script in real jobs: as the ranks of one, and as the driver of several."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import collectives
import drive
import pytest
from measure.contest import EMPTY, ORDINARY, PRIVATE_PROBE, PROBE
from measure.environments import REPOSITORY, Environments
from peers import PEERS, Peer

from tests.cluster.processes import run

SCRIPT = str(REPOSITORY / "benchmarks" / "collectives.py")
MPIRUN = str(Path(sys.executable).with_name("mpirun"))
QUICK = ("--seconds", "0.001", "--largest", "256")


class Here:
    """Instead of an environment per peer: this one, which has MPICH and ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def python(self, name: str, peer: Peer) -> Path:
        assert PEERS[name] is peer
        return Path(sys.executable)


def test_beside_mpi_in_one_run(tmp_path: Path) -> None:
    command = [MPIRUN, "-n", "2", sys.executable, SCRIPT, *QUICK, "--out", str(tmp_path / "out")]
    result = run(command, deadline=60)
    assert result.code == 0, result.err
    written = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["case"], row["contestant"]): row for row in written["rows"]}
    sizes, names = ("8 B", "256 B"), (EMPTY, ORDINARY, "MPICH", PROBE, PRIVATE_PROBE)
    assert list(rows) == [(size, name) for size in sizes for name in names]
    for size in sizes:
        assert rows[size, "MPICH"]["speedup"] == rows[size, PROBE]["of_limit"] == 1
        ours = rows[size, EMPTY]
        assert ours["of_limit"] == rows[size, PROBE]["median"] / ours["median"]
    columns = "case contestant runs median 99 % baseline / this of the limit"
    assert columns in " ".join(result.out.split())
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


PROBED = f"""
import sys
sys.path.insert(0, {str(Path(SCRIPT).parent)!r})
import numpy as np
from allreduce.comm import init
from measure.cases import Case
from probe.probe import WAYS, Probe

with init() as comm:
    probe = Probe(comm)
    for collective in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
        case = Case(collective, "float32", 2, 4 * 300_002)
        x = np.empty(case.count, np.float32)
        out = x if case.in_place else np.empty(case.out_count, np.float32)
        for number, chunk in WAYS:
            way = probe.private(case, number, chunk, x, out)
            for _ in range(3):
                way.result().fill(-1)
                seconds = way.run(case.source(comm.rank))
            if seconds >= 0:
                np.testing.assert_array_equal(way.result(), case.expected(comm.rank), str(case))
            print(number if seconds >= 0 else "impossible", flush=True)
"""


@pytest.mark.timeout(300)
def test_all_ways_of_the_private_probe_compute_what_they_time(tmp_path: Path) -> None:
    """In rings that are filled more than once, and with a rest; the kernel's may be forbidden."""
    (tmp_path / "script.py").write_text(PROBED)
    result = run([MPIRUN, "-n", "2", sys.executable, str(tmp_path / "script.py")], deadline=240)
    assert result.code == 0, result.err
    said = Counter(result.out.split())
    assert (said["0"], said["2"], said["3"]) == (2, 2 * 4 * 5, 2 * 3 * 5)
    assert said["1"] in (0, 8)


def test_one_rank_is_told_how_to_start_several(tmp_path: Path) -> None:
    result = run([sys.executable, SCRIPT, "--out", str(tmp_path / "out")], deadline=60)
    assert result.code == 1
    assert "mpirun -n 2 python benchmarks/collectives.py" in result.err


def _drive(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(drive, "Environments", Here)
    monkeypatch.setattr(sys, "argv", [SCRIPT, *QUICK, *arguments])
    collectives.main()


def test_driver_merges_what_jobs_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ("--out", str(tmp_path / "out"))
    _drive(
        monkeypatch, "--peers", "mpich", "--ranks", "2", "3", "--collectives", "all_reduce", *out
    )
    written = json.loads((tmp_path / "out.json").read_text())
    assert [run["peer"] for run in written["runs"]] == ["MPICH", "MPICH"]
    assert all(run["about"].startswith("MPICH Version") for run in written["runs"])
    found = [(each["ranks"], each["nbytes"]) for each in written["comparisons"]]
    assert found == [(2, 8), (2, 256), (3, 8), (3, 256)]
    for each in written["comparisons"]:
        assert min(each["per_empty"], each["per_ordinary"], each["empty_of_limit"]) > 0
    assert (tmp_path / "out.png").exists()


@pytest.mark.torture
def test_driver_goes_on_without_a_peer_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer whose library is missing here; ours and the other peer are still reported."""
    broken = Peer("broken", (), script="nowhere")
    monkeypatch.setitem(PEERS, "broken", broken)
    out = ("--out", str(tmp_path / "out"))
    with pytest.raises(SystemExit, match="not measured: broken, 2 ranks"):
        _drive(monkeypatch, "--collectives", "all_reduce", *out, "--peers", "broken", "mpich")
    captured = capsys.readouterr()
    assert "No module named peers.nowhere" in captured.err
    assert "all_reduce, float32, 2 ranks: peer ÷ comm.empty / peer ÷ ordinary" in captured.out
    written = json.loads((tmp_path / "out.json").read_text())
    assert [run["peer"] for run in written["runs"]] == ["MPICH"]


def test_environments_stay_out_of_the_checkout() -> None:
    with pytest.raises(SystemExit, match="name a folder outside of it"):
        Environments(REPOSITORY / "environments")
