"""Worlds from arguments or ALLREDUCE_ variables: contradictions, and real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from allreduce import cluster
from allreduce.cluster.leader import meeting
from allreduce.cluster.leader.service import Leader
from allreduce.errors import JoinError, UsageError
from tests.cluster.conftest import Write
from tests.cluster.processes import Result, free_address, run_together, running, wait_gone

SHOW = "print(world.rank, world.size, world.source, world.exchange('k', b'%d' % world.rank, 20))"

# Without it, the first rank may leave, and its leader too, before another one has all members.
END = "world.exchange('end', b'', 25)"


def said(rank: int, size: int, address: str, **more: str) -> dict[str, str]:
    told = {"RANK": str(rank), "SIZE": str(size), "LEADER": address} | more
    return {f"ALLREDUCE_{name}": text for name, text in told.items()}


def test_arguments_contradicting_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_RANK", "2")
    with pytest.raises(UsageError, match=r"rank and ALLREDUCE_RANK contradict .*1 against 2"):
        cluster.join(rank=1, size=4, leader="127.0.0.1:1")


def test_contradicting_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_SECRET", "hush")
    with pytest.raises(UsageError, match="ALLREDUCE_SECRET contradict") as caught:
        cluster.join(rank=0, size=1, secret="other")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        ({"rank": 1}, "size and leader"),
        ({"size": 4}, "rank and leader"),
        ({"leader": "127.0.0.1:4711"}, "rank and size"),
        ({"rank": 1, "size": 4}, "leader"),
        ({"rank": 1, "leader": "127.0.0.1:4711"}, "size"),
        ({"size": 1}, "rank"),
    ],
)
def test_half_a_place_is_refused(told: dict[str, object], missing: str) -> None:
    with pytest.raises(UsageError, match=f"came without {missing};"):
        cluster.join(**told)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_leaders_host_without_an_address_is_named(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", 0.3)
    with pytest.raises(JoinError, match=r"nowhere\.invalid cannot be resolved"):
        cluster.join(rank=rank, size=2, leader="nowhere.invalid:4711", secret="hush")


def test_rank_out_of_range() -> None:
    with pytest.raises(UsageError, match="rank 4 is out of range for size 4"):
        cluster.join(rank=4, size=4, leader="127.0.0.1:4711")


@pytest.mark.parametrize("leader", ["localhost", "localhost:", ":1", "localhost:0", "localhost:x"])
def test_malformed_leader(leader: str) -> None:
    with pytest.raises(UsageError, match="expected host:port"):
        cluster.join(rank=0, size=2, leader=leader)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_invalid_timeout(timeout: float) -> None:
    with pytest.raises(UsageError, match="expected seconds above 0"):
        cluster.join(timeout=timeout)


def test_explicit_world_of_one_needs_no_leader() -> None:
    world = cluster.join(rank=0, size=1)
    assert (world.size, world.source) == (1, "leader")
    world.close()


def test_a_network_address_without_a_secret_is_refused() -> None:
    with pytest.raises(UsageError, match="set ALLREDUCE_SECRET"):
        cluster.join(rank=1, size=2, leader="192.0.2.1:4711")


def test_explicit_beats_the_schedulers_and_the_log_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "8"}.items():
        monkeypatch.setenv(name, text)
    for name in ("JOB_ID", "STEP_ID", "PROCID"):
        monkeypatch.setenv(f"SLURM_{name}", "5")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    world = cluster.join(rank=0, size=1)
    assert "the argument rank, the argument size say so" in world.why
    assert "ignored: mpi (MPICH's launcher has set PMI_RANK=3 and PMI_SIZE=8)" in world.why
    assert "slurm (SLURM_PROCID=5 of the 8 tasks of step 5.5)" in world.why
    world.close()


@pytest.mark.parametrize(("size", "secret"), [(2, {}), (4, {"SECRET": "s"})])
def test_rank_0_hosts_where_ranks_are_given(
    script: Write, size: int, secret: dict[str, str]
) -> None:
    address = free_address()
    results = run_together(
        script(SHOW), [said(rank, size, address, **secret) for rank in range(size)]
    )
    everybody = [b"%d" % rank for rank in range(size)]
    for rank, result in enumerate(results):
        assert result.code == 0, result.err
        assert result.out == f"{rank} {size} leader {everybody}\n"
    assert f"{size} ranks through leader: ALLREDUCE_RANK, ALLREDUCE_SIZE" in results[0].err
    assert all(result.err == "" for result in results[1:])


def test_a_second_generation_after_closing(script: Write) -> None:
    again = f"{SHOW}\nworld.close()\nworld = cluster.join()\n{SHOW}\nassert world.generation == 2"
    address = free_address()
    results = run_together(script(again), [said(rank, 3, address) for rank in range(3)])
    assert [(r.code, r.out.count("leader")) for r in results] == [(0, 2)] * 3, results


def test_two_processes_claiming_one_rank(script: Write) -> None:
    address = free_address()
    ranks = [0, 1, 1]
    told = [said(rank, 3, address, TIMEOUT="3") for rank in ranks]
    results = run_together(script(SHOW, at_once=3), told)
    assert all(result.code != 0 for result in results)  # the third rank never comes
    refusals = [r.err for r in results if "is claimed twice: by process" in r.err]
    assert len(refusals) == 1, results
    assert "rank 0: rank 2 did not join" in results[0].err


def test_two_processes_claiming_rank_0(script: Write) -> None:
    address = free_address()
    told = [said(0, 2, address, TIMEOUT="3") for _ in range(2)]
    results = run_together(script(SHOW, at_once=2), told)
    refusals = [r.err.splitlines()[-1] for r in results if "is claimed twice" in r.err]
    assert len(refusals) == 1, results
    assert refusals[0].endswith("give each process its own rank"), refusals
    assert not any("GRPC" in result.err for result in results)


def test_wrong_secret_between_processes(script: Write) -> None:
    address = free_address()
    told = [
        said(rank, 2, address, SECRET=secret, TIMEOUT="2.5") for rank, secret in enumerate("ab")
    ]
    results = run_together(script(SHOW, at_once=2), told)
    assert "does not know this process's secret" in results[1].err
    assert "rank 0: rank 1 did not join" in results[0].err


def test_wrong_size_between_processes(script: Write) -> None:
    address = free_address()
    told = [said(0, 2, address, TIMEOUT="2.5"), said(1, 3, address, TIMEOUT="2.5")]
    results = run_together(script(SHOW, at_once=2), told)
    assert "rank 1 says that the job has 3 ranks, but its leader expects 2" in results[1].err


def survivors(results: list[Result]) -> list[str]:
    return [result.err for result in results[:-1]]


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise ValueError('boom')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_dying_rank_is_named_by_the_others(script: Write, ending: str, code: int) -> None:
    address = free_address()
    path = script(f"if world.rank == 2: {ending}\nworld.exchange('end', b'', 60)")
    results = run_together(path, [said(rank, 3, address) for rank in range(3)])
    assert results[2].code == code
    for text in survivors(results):
        assert "PeerLostError" in text
        assert "rank 2 (process" in text


def test_a_child_of_a_rank_cannot_join(script: Write) -> None:
    child = (
        "import subprocess\n"
        "if world.rank == 1:\n"
        "    code = 'from allreduce import cluster; cluster.join()'\n"
        "    command = [sys.executable, '-c', code]\n"
        "    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)\n"
        "    print(done.returncode, done.stderr)\n"
        "world.exchange('end', b'', 30)"
    )
    address = free_address()
    results = run_together(script(child), [said(rank, 2, address) for rank in range(2)])
    assert [result.code for result in results] == [0, 0], results
    assert "is a child of process" in results[1].out
    assert "which is rank 1 of a job" in results[1].out


def test_a_forked_child_can_neither_use_nor_close_the_world(script: Write) -> None:
    fork = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for action in (lambda: world.store.set('k', b''), cluster.join):\n"
        "        try: action()\n"
        "        except Exception as error: print(type(error).__name__, error, flush=True)\n"
        "    sys.exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "world.exchange('after', b'', 30)"
    )
    address = free_address()
    results = run_together(script(fork), [said(rank, 2, address) for rank in range(2)])
    for result in results:
        assert result.code == 0, result
        lines = result.out.splitlines()
        assert "UsageError" in lines[0]
        assert "only the process that joined can use its store" in lines[0]
        assert "JoinError" in lines[1]
        assert lines[2] == "3"


@pytest.mark.parametrize("victim", [0, 1])  # rank 0 hosts the leader
def test_a_forked_child_does_not_hide_its_parents_death(script: Write, victim: int) -> None:
    fork = (
        "world.exchange('begin', b'', 30)\n"
        f"if world.rank == {victim}:\n"
        "    if os.fork() == 0: time.sleep(60)\n"
        "    time.sleep(0.3)\n"
        "    os.kill(os.getpid(), 9)\n"
        "try: world.exchange('end', b'', 60)\n"  # longer than the test waits
        "except ConnectionError as error: print(error, flush=True)\n"
        "os._exit(0)"
    )
    address = free_address()
    path = script(fork)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(running([sys.executable, str(path)], said(rank, 2, address)))
            for rank in range(2)
        ]
        assert ranks[1 - victim].finish(40).out.startswith("[cluster] rank")


def test_what_is_not_the_leaders_stays_open_in_a_forked_child(script: Write) -> None:
    fork = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "one = socket.create_connection(server.getsockname())\n"
        "two, _ = server.accept()\n"
        "pipe = os.pipe()\n"
        "if (pid := os.fork()) == 0:\n"
        "    one.sendall(b'x')\n"
        "    os.write(pipe[1], two.recv(1) + server.getsockname()[0].encode())\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(os.read(pipe[0], 99))\n"
        "world.exchange('end', b'', 30)"
    )
    address = free_address()
    results = run_together(script(fork), [said(rank, 2, address) for rank in range(2)])
    assert [result.out for result in results] == ["b'x127.0.0.1'\n"] * 2, results


def test_joining_twice_is_refused_and_after_closing_allowed(script: Write) -> None:
    twice = (
        "try: cluster.join()\n"
        "except ValueError as error: print(error)\n"
        "world.close()\n"
        "world = cluster.join()\n"
        "print(world.generation)\n"
        f"{END}\n"
    )
    address = free_address()
    results = run_together(script(twice), [said(rank, 2, address) for rank in range(2)])
    for result in results:
        assert "has joined its job already" in result.out
        assert result.out.endswith("\n2\n"), result


def test_an_error_in_a_notebook_does_not_end_the_kernel(tmp_path: Path) -> None:
    code = (
        "import sys; sys.ps1 = '>>> '\n"
        "hook, end = sys.excepthook, sys.exit\n"
        "from allreduce import cluster\n"
        "world = cluster.join()\n"
        "print(sys.excepthook is hook and sys.exit is end)\n"
        f"{END}\n"
    )
    path = tmp_path / "notebook.py"
    path.write_text(code)
    address = free_address()
    results = run_together(path, [said(rank, 2, address) for rank in range(2)])
    assert [result.out for result in results] == ["True\n"] * 2, results


def test_no_process_no_file_and_no_port_is_left_after_killing_all(
    script: Write, tmp_path: Path
) -> None:
    before, temporary = set(os.listdir("/dev/shm")), tmp_path / "temporary"
    temporary.mkdir()
    address = free_address()
    path = script("print(os.getpid(), flush=True)\nworld.exchange('never', b'', 60)")
    with contextlib.ExitStack() as stack:
        command = [sys.executable, str(path)]
        told = [said(rank, 3, address, TIMEOUT="60") for rank in range(3)]
        started = [
            stack.enter_context(running(command, one | {"TMPDIR": str(temporary)})) for one in told
        ]
        pids = [int(process.line()) for process in started]  # all have joined
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert [process.finish(25).code for process in started] == [-signal.SIGKILL] * 3
    assert wait_gone(pids, 0) == []
    assert list(temporary.iterdir()) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "allreduce" in name]
    Leader(address, 3, b"").close()


def test_an_ipv6_address_needs_brackets() -> None:
    with pytest.raises(UsageError, match=r"'::1:5000' is not valid: .* \[::1\]:5000"):
        cluster.join(rank=0, size=2, leader="::1:5000")


def test_why_rank_0_could_not_listen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(JoinError) as caught:
            cluster.join(rank=0, size=2, leader=address)
    assert f"no group leader is reachable at {address}" in str(caught.value)
    assert str(caught.value).endswith(
        f"could not host it either: no group leader can listen at {address}: the address is in "
        "use, or not of this machine"
    )


PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")


def test_a_proxy_is_not_asked_for_the_leader(script: Write) -> None:
    talk = "world.exchange('end', b'', 20)"
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.01)
        set_to = dict.fromkeys(PROXIES, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        none = {"no_proxy": "", "NO_PROXY": ""}  # gRPC asks proxies for the loopback interface, too
        address = free_address()
        told = [said(rank, 2, address) | set_to | none for rank in range(2)]
        results = run_together(script(talk), told)
        assert [result.code for result in results] == [0, 0], results
        with pytest.raises(TimeoutError):
            proxy.accept()
