"""The hierarchical transport with MPI between hosts, which are made up on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allreduce import errors
from allreduce.comm.choice import stored
from allreduce.comm.hierarchical.opener import open_hierarchical
from tests.cluster.processes import mpirun
from tests.comm.test_links import worlds
from tests.harness import Result, clean_environment, run_commands, world_of_one

PROGRAM = """
import os, sys, time
rank = int(os.environ["PMI_RANK"])
hosts, *todo = sys.argv[1:]
os.environ["ALLREDUCE_HOST"] = hosts[rank]
import numpy as np
from allreduce import errors
from allreduce.comm import init
from allreduce.comm.mpi import progress
from tests.comm.pool import case

comm = init(transport="hierarchical", timeout=60)
{body}
"""
CASES = """
across = {level.transport.name for level in comm._transport._levels.values()}
assert "mpi" in across and "tcp" not in across, across
for name in todo:
    arguments = ["private"] if case(name).__code__.co_argcount > 1 else []
    case(name)(comm, *arguments)
    comm.barrier()
    os.write(1, f"{name} passed on {rank}\\n".encode())
assert comm._transport.accounts.crossed() is None  # MPI does not tell

import gc
from allreduce.comm.mpi.transport import MpiTransport
mpi, lanes = comm.split(0, transport="mpi"), comm.split(0)
lanes.all_reduce(np.ones(1000))
gc.disable()
cycle = [lanes]
cycle.append(cycle)
left, advance = len(progress._open), MpiTransport.advance
del lanes, cycle

def collecting(self):
    MpiTransport.advance = advance
    gc.collect()  # as may happen wherever memory is asked for
    advance(self)

MpiTransport.advance = collecting
assert (mpi.all_reduce(np.ones(3)) == comm.size).all()
assert len(progress._open) < left
comm.close()
"""
MISMATCH = """
out = np.full(9, 5.0)
try:
    comm.all_reduce(np.ones(9), op="max" if rank == 2 else "sum", out=out)
except errors.MismatchError as error:
    os.write(1, f"{error} {out.tolist() == [5.0] * 9}\\n".encode())
"""
QUICK = (
    *("rooted", "into_out", "unequal", "unequal_exchange", "everybody_to_everybody"),
    *("prepared", "by_parity"),
)
LONG = ("every_length", "every_pair", "in_flight", "many_small", "layouts", "dropped", "nested")


def job(folder: Path, body: str, hosts: str, *todo: str) -> Result:
    """Run a program with MPI between hosts."""
    script = folder / "program.py"
    script.write_text(PROGRAM.format(body=body))
    command = mpirun(len(hosts), script, hosts, *todo)
    own = {"ALLREDUCE_ACROSS": "mpi", "ALLREDUCE_TCP_INTERFACE": "127.0.0.1"}
    environment = {**clean_environment(), **own}
    (result,) = run_commands([command], [environment], 90)
    return result


@pytest.mark.parametrize(
    ("hosts", "cases"),
    [
        ("aab", QUICK),
        pytest.param("aabb", QUICK + LONG, marks=pytest.mark.torture),
        pytest.param("ab", QUICK + LONG, marks=pytest.mark.torture),
    ],
)
def test_what_holds_for_any_transport(tmp_path: Path, hosts: str, cases: tuple[str, ...]) -> None:
    result = job(tmp_path, CASES, hosts, *cases)
    assert result.returncode == 0, result.stderr
    for rank in range(len(hosts)):
        for name in cases:
            assert f"{name} passed on {rank}\n" in result.stdout, result


@pytest.mark.torture  # tcp's test is of the same code
def test_members_that_disagree_all_say_so_and_no_output_is_touched(tmp_path: Path) -> None:
    said = sorted(job(tmp_path, MISMATCH, "aab").stdout.splitlines())
    assert len(said) == 3, said
    for rank, line in enumerate(said):
        assert line.startswith(f"[hierarchical] rank {rank}: call #0 differs: ")
        assert line.endswith(" True")


def test_ranks_that_want_another_carrier_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (world,) = worlds(2)[:1]
    told = [json.dumps([1, across, stored.offer()]).encode() for across in ("tcp", "mpi")]
    monkeypatch.setattr(type(world), "exchange", lambda *_: told)
    with pytest.raises(errors.UsageError, match="is tcp on rank 0 but mpi on rank 1; set the same"):
        open_hierarchical(world, 1, name="test", timeout=5)


def test_what_mpi_cannot_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_ACROSS", "mpi")
    with pytest.raises(errors.UnsupportedError, match="rank 0 brings 2; start one process per"):
        open_hierarchical(world_of_one(), 2, name="test", timeout=5)
    monkeypatch.setenv("ALLREDUCE_ACROSS", "ib")
    with pytest.raises(errors.UsageError, match="ALLREDUCE_ACROSS='ib' is not valid"):
        open_hierarchical(world_of_one(), 1, name="test", timeout=5)
