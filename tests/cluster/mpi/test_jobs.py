"""Worlds through MPI: the libraries, and real jobs under the mpich wheel."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from allreduce.cluster.mpi import library
from tests.cluster.conftest import Write
from tests.cluster.processes import mpirun, run, running, wait_gone

SHOW = "print(world.rank, world.size, world.source, world.exchange('k', b'%d' % world.rank, 20))"


@pytest.mark.parametrize(
    ("version", "family"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: ...", "MPICH"),
        ("Open MPI v5.0.11, package: Open MPI user@localhost", "Open MPI"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "Intel MPI"),
        ("Fast MPI 1, of somebody", "Fast MPI 1"),
    ],
)
def test_libraries_are_told_by_their_version(version: str, family: str) -> None:
    assert library.family(version) == family


@pytest.mark.parametrize("size", [2, 4])  # 3 join again, below
def test_all_ranks_join_under_mpirun(script: Write, size: int) -> None:
    result = run(mpirun(size, script(SHOW)))
    assert result.code == 0, result.err
    everybody = [b"%d" % rank for rank in range(size)]
    expected = [f"{rank} {size} mpi {everybody}" for rank in range(size)]
    assert sorted(result.out.splitlines()) == expected
    assert result.err.count(f"{size} ranks through mpi: MPICH's launcher has set PMI_RANK=0") == 1


def test_mpirun_with_one_rank_is_a_world_of_one(script: Write) -> None:
    result = run(mpirun(1, script(f"{SHOW}\nprint('mpi4py.MPI' in sys.modules)")))
    assert (result.code, result.out) == (0, "0 1 mpi [b'0']\nFalse\n"), result.err


def test_a_script_that_has_initialised_mpi_itself(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    lines = f"from mpi4py import MPI\nfrom allreduce import cluster\nworld = cluster.join()\n{SHOW}"
    path.write_text(f"{lines}\nassert MPI.COMM_WORLD.rank == world.rank\n")
    result = run(mpirun(2, path))
    assert (result.code, result.out.count(" 2 mpi ")) == (0, 2), result.err


def test_joining_again_after_closing(script: Write) -> None:
    again = f"{SHOW}\nworld.close()\nworld = cluster.join()\n{SHOW}\nworld.close()"
    result = run(mpirun(3, script(again)))
    assert (result.code, result.out.count(" 3 mpi ")) == (0, 6), result.err


def test_without_mpi4py_the_launcher_and_the_remedy_are_named(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    hide = "import sys\nsys.modules['mpi4py'] = None\n"
    path.write_text(f"{hide}from allreduce import cluster\ncluster.join()\n")
    command = mpirun(2, path)
    result = run(command)
    assert result.code != 0
    assert "mpi4py is not installed" in result.err
    assert 'pip install "allreduce[mpich]"' in result.err
    assert str(Path(command[0]).resolve().parent) in result.err


def test_an_unknown_transport_is_one_traceback(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import allreduce as ar\nar.init()\n")
    unbuffered = {"PYTHONUNBUFFERED": "1"}  # print() then writes the end of a line by itself
    result = run(mpirun(3, path), {"ALLREDUCE_TRANSPORT": "sharde"} | unbuffered)
    assert result.code == 1
    assert result.err.count("Traceback") == 1, result.err
    assert result.err.count("unknown transport 'sharde': there are ") == 1
    same = (
        r"^\[allreduce\] rank \d \(process \d+\) failed with the same UsageError as another rank$"
    )
    assert len(re.findall(same, result.err, re.MULTILINE)) == 2, result.err


def test_a_library_that_does_not_hear_the_launcher_names_both_paths(script: Write) -> None:
    mpirun(2, Path())  # needs MPICH
    # A rank under a foreign mpirun: the variables say 2, and the library finds no launcher.
    result = run([sys.executable, str(script(SHOW))], {"PMI_RANK": "0", "PMI_SIZE": "2"})
    assert result.code != 0
    assert "JoinError" in result.err
    assert "the launcher says 2 ranks, the library 1" in result.err
    assert "The launcher is MPICH's mpirun; the library is /" in result.err
    assert "libmpi" in result.err


def test_mpichs_library_under_open_mpis_launcher_is_told_before_it_aborts(script: Write) -> None:
    mpirun(2, Path())  # needs MPICH
    told = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}
    result = run([sys.executable, str(script(SHOW))], told)
    assert result.code == 1
    assert "MPICH cannot learn its ranks from Open MPI's launcher" in result.err
    assert "libmpi" in result.err


ENDINGS = (
    ("raise ValueError('boom')", 1, "ValueError: boom"),
    ("sys.exit(7)", 7, ""),
    ("sys.exit('sorry')", 1, "sorry"),
    ("os.kill(os.getpid(), signal.SIGKILL)", None, ""),
)


@pytest.mark.parametrize(
    ("ending", "code", "report", "culprit"),
    [
        *((*ending, 2) for ending in ENDINGS),
        (*ENDINGS[0], 0),  # the leader's host
        *(pytest.param(*ending, 0, marks=pytest.mark.torture) for ending in ENDINGS[1:]),
    ],
)
def test_a_rank_that_fails_ends_the_job(
    script: Write, ending: str, code: int | None, report: str, culprit: int
) -> None:
    path = script(f"if world.rank == {culprit}: {ending}\nwhile True: time.sleep(0.05)")
    result = run(mpirun(3, path), deadline=25)
    assert result.code == code if code is not None else result.code != 0
    assert report.lower() in result.err.lower()


def test_a_replaced_exception_hook_does_not_make_the_job_hang(script: Write) -> None:
    lines = (
        "sys.excepthook = lambda *_: print('mine', file=sys.stderr)\n"
        "if world.rank == 1: raise ValueError\n"
        "while True: time.sleep(0.05)"
    )
    result = run(mpirun(3, script(lines)), deadline=25)
    assert result.code == 1
    assert "mine" in result.err


def test_a_caught_sys_exit_is_no_failure(script: Write) -> None:
    lines = (
        "try: sys.exit(3)\n"
        "except SystemExit as error: print(error.code)\n"
        "world.exchange('end', b'', 30)"
    )
    result = run(mpirun(2, script(lines)))
    assert (result.code, result.out) == (0, "3\n3\n"), result.err


def test_a_rank_that_raises_leaves_no_shared_memory_of_mpis(script: Write) -> None:
    lines = (
        "with open('/proc/self/maps') as maps:\n"
        "    mapped = {line.split()[5] for line in maps if '/dev/shm/' in line}\n"
        "os.write(1, ''.join(f'{name}\\n' for name in mapped).encode())\n"
        "world.exchange('all', b'', 30)\n"
        "if world.rank == 1: raise ValueError\n"
        "time.sleep(60)"
    )
    result = run(mpirun(3, script(lines)), deadline=25)
    assert result.code == 1
    mapped = [Path(line) for line in result.out.splitlines()]
    assert len(mapped) >= 3
    assert not [name for name in mapped if name.exists()]


def test_a_library_that_does_not_know_the_launcher_leaves_no_shared_memory(tmp_path: Path) -> None:
    path = tmp_path / "strange.py"
    path.write_text(
        "import mmap, os\n"
        "from allreduce import JoinError\n"
        "from allreduce.cluster import join\n"
        "from allreduce.cluster.mpi import library\n"
        "name = f'/dev/shm/sm_segment.test.{os.getpid()}'  # as Open MPI's makes one for each\n"
        "with open(name, 'w+b') as file:\n"
        "    file.truncate(4096)\n"
        "    kept = mmap.mmap(file.fileno(), 4096)\n"
        "os.write(1, f'{name}\\n'.encode())\n"
        "def fail(*_): raise JoinError('strangers')\n"
        "library.load = fail\n"
        "join()\n"
    )
    result = run(mpirun(2, path), deadline=25)
    assert result.code == 1
    made = [Path(line) for line in result.out.splitlines()]
    assert made  # both, unless the first one ended the job before the second had begun
    assert not [name for name in made if name.exists()]


@pytest.mark.parametrize(
    "busy", ["time.sleep(60)", "world.rank or time.sleep(60)\nworld.exchange('never', b'', 60)"]
)
def test_ctrl_c_ends_the_job_with_one_line(script: Write, busy: str) -> None:
    lines = f"os.write(1, b'%d\\n' % os.getpid())\nworld.exchange('all', b'', 30)\n{busy}"
    with running(mpirun(3, script(lines))) as process:
        pids = [int(process.line()) for _ in range(3)]
        process.signal(signal.SIGINT, group=True)
        result = process.finish(25)
        assert wait_gone(pids) == []
    assert result.code != 0
    assert len(re.findall(r"\[allreduce\] interrupted: rank \d \(process \d+\)", result.err)) == 1
    assert "Traceback" not in result.err


def test_a_child_of_a_rank_cannot_join(script: Write) -> None:
    child = (
        "import subprocess\n"
        "code = 'from allreduce import cluster; cluster.join()'\n"
        "done = subprocess.run([sys.executable, '-c', code], stderr=subprocess.PIPE, text=True)\n"
        "print(done.returncode, f'is rank {world.rank} of a job' in done.stderr)"
    )
    result = run(mpirun(2, script(child)))
    assert (result.code, result.out) == (0, "1 True\n1 True\n"), result


POOL = """
import multiprocessing, os, sys
from allreduce import cluster

def join(_):
    try:
        return cluster.join(timeout=5).source
    except Exception as error:
        return f"{type(error).__name__}: {error}"

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        if sys.argv[2] == "first":
            said = pool.map(join, [0])[0]
        world = cluster.join()
        if sys.argv[2] == "after":
            said = pool.map(join, [0])[0]
        world.close()
    print("JoinError" in said and f"rank {world.rank} of a job" in said or said)
"""


@pytest.mark.parametrize(
    ("start", "when"), [("fork", "first"), ("fork", "after"), ("forkserver", "first")]
)
def test_a_worker_made_before_its_rank_joins_cannot_take_the_place(
    tmp_path: Path, start: str, when: str
) -> None:
    path = tmp_path / "script.py"
    path.write_text(POOL)
    result = run(mpirun(2, path, start, when), deadline=40)
    assert (result.code, result.out) == (0, "True\nTrue\n"), result


@pytest.mark.parametrize(
    "ending", ["raise ValueError('too early')", "sys.exit(0)", "os.kill(os.getpid(), 9)"]
)
def test_a_rank_that_ends_before_it_joins_ends_the_job_from_within_a_wrapper(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / "script.py"
    ends = f"if os.environ['PMI_RANK'] == '1': {ending}"
    path.write_text(f"import os, sys\n{ends}\nfrom allreduce import cluster\ncluster.join()\n")
    command = mpirun(3, path)
    result = run(
        [*command[:3], "bash", "-c", '"$@"; exit $?', "wrapper", *command[3:]], deadline=25
    )
    assert result.code != 0, result
    assert result.err.count("rank 1 ended before it had joined; every rank has to call") == 1
    assert ("ValueError: too early" in result.err) == ("raise" in ending)


def test_a_finalised_mpi_is_told(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "from mpi4py import MPI\nimport allreduce.cluster as c\nMPI.Finalize()\nc.join()"
    )
    result = run(mpirun(2, path))
    assert result.code == 1
    assert result.err.count("JoinError: [cluster] rank 1: this process has finalised MPI") == 1


def test_a_rank_that_fails_after_finalising_mpi_shows_its_own_error(script: Write) -> None:
    lines = (
        "from mpi4py import MPI\nMPI.Finalize()\n"
        "if world.rank == 1: raise ValueError('boom')\n"
        "world.exchange('never', b'', 30)"
    )
    result = run(mpirun(2, script(lines)), deadline=25)
    assert result.code != 0
    assert "ValueError: boom" in result.err
    assert "PeerLostError" in result.err  # rank 0 learns of it without MPI
    assert "MPI_Abort" not in result.err


def test_a_long_secret_reaches_all_ranks_whole(script: Write) -> None:
    path = script("print(world.secret.decode() == 'ä' * 500, world.rank)")
    result = run(mpirun(2, path), {"ALLREDUCE_SECRET": "ä" * 500})
    assert (result.code, sorted(result.out.splitlines())) == (0, ["True 0", "True 1"]), result


# Two of hydra's hosts, on this machine.
TWO_HOSTS = ("-launcher", "fork", "-hosts", "one,other")


def test_what_the_launcher_calls_hosts_is_one_where_the_evidence_says_so(script: Write) -> None:
    command = mpirun(2, script("print(world.hosts, world.local_size)"))
    result = run([command[0], *TWO_HOSTS, *command[1:]])
    assert (result.code, result.out) == (0, "((0, 1),) 2\n" * 2), result


def test_ranks_on_several_hosts_meet_where_all_can_reach_the_leader(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import os\nos.environ['ALLREDUCE_HOST'] = 'host' + os.environ['PMI_RANK']\n"
        "from allreduce import cluster\nworld = cluster.join()\n"
        "print(world.hosts, world.local_size, world.address)"
    )
    command = mpirun(2, path)
    result = run([command[0], *TWO_HOSTS, *command[1:]], {"ALLREDUCE_TCP_INTERFACE": "lo"})
    assert (result.code, result.out) == (0, "((0,), (1,)) 1 127.0.0.1\n" * 2), result


@pytest.mark.parametrize(("files", "words"), [(36, "cannot initialise MPI"), (48, "group leader")])
def test_too_few_files_are_told_before_anything_needs_them(
    script: Write, files: int, words: str
) -> None:
    command = " ".join(mpirun(2, script(SHOW)))
    result = run(["bash", "-c", f"ulimit -n {files}; exec {command}"])
    assert result.code != 0
    found = [line for line in result.err.splitlines() if ".JoinError: " in line]
    assert found, result.err
    assert all(words in line and "that ulimit -n allows" in line for line in found), found


def test_a_forked_child_ends_without_the_others(script: Write) -> None:
    lines = (
        "from mpi4py import MPI\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "world.exchange('all', b'', 20)\n"
        "import atexit\n"
        "atexit.register(lambda: os.write(1, b'%d\\n' % MPI.Is_finalized()))"
    )
    result = run(mpirun(2, script(lines)), deadline=25)
    assert (result.code, sorted(result.out.split())) == (0, ["0", "0", "3", "3"]), result


def test_joins_that_fail_leave_no_hooks_behind(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import sys\n"
        "hook = sys.excepthook\n"
        "from allreduce import JoinError, cluster\n"
        "from allreduce.cluster.process import exit_hooks\n"
        "from allreduce.cluster.resolvers import mpi\n"
        "def fail(*_): raise JoinError('no')\n"
        "meet, mpi._meet = mpi._meet, fail\n"
        "hooks = set()\n"
        "for _ in range(3):\n"
        "    try: cluster.join()\n"
        "    except JoinError: hooks.add(len(exit_hooks._watches))\n"
        "mpi._meet = meet\n"
        "world = cluster.join()\n"
        "hooks.add(len(exit_hooks._watches))\n"
        "world.close()\n"
        "print(hooks, exit_hooks._watches, sys.excepthook is hook)\n"
    )
    result = run(mpirun(2, path))
    assert (result.code, result.out) == (0, "{1} [] True\n" * 2), result
