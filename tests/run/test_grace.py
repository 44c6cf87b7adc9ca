"""Ranks that end have time to finish: a checkpoint, atexit functions, a handler of a signal."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.processes import mpirun, run, running
from tests.run.launches import LAUNCH, Write, launch, lines_of

SAVE = """
    import atexit, os, signal, sys, time
    import allreduce as ar

    def save():
        for number in range(10):
            os.write(1, b"part %d\\n" % number)
            time.sleep(0.25)
        os.write(1, b"saved\\n")
    """


def parts(out: str) -> int:
    """Count what has been written of a checkpoint of ten parts."""
    return len(re.findall("part", out))


@pytest.mark.parametrize("registered", ["before init", "later"])
@pytest.mark.parametrize("launcher", ["run", "mpirun"])
def test_functions_at_exit_end_after_an_error_and_others_hear_of_it_before(
    script: Write, tmp_path: Path, launcher: str, registered: str
) -> None:
    path = script(
        f"""{SAVE}
    def save_and_wait():
        save()
        for _ in range(2000):
            if os.path.exists(sys.argv[1]):
                os.write(1, b"others heard\\n")
                return
            time.sleep(0.01)

    def save_if_failed():
        if failed:
            save_and_wait()

    failed = False
    if {registered == "before init"}:
        atexit.register(save_if_failed)
    comm = ar.init()
    comm.barrier()
    if comm.rank == 1:
        failed = True
        if {registered == "later"}:
            atexit.register(save_and_wait)
        raise ValueError("no")
    try:
        comm.barrier()
    except ar.PeerLostError as error:
        open(sys.argv[1], "x").close()
        raise
    """
    )
    heard = str(tmp_path / "heard")
    ours = [*LAUNCH, "-n", "2", str(path), heard]
    command = mpirun(2, path, heard) if launcher == "mpirun" else ours
    result = run(command, deadline=40)
    assert result.code == 1, result
    assert (parts(result.out), "saved" in result.out) == (10, True), result
    assert "others heard" in result.out, result
    assert "aborted the communicator: its program ended with ValueError: no" in result.err


def test_a_survivor_that_saves_has_time_to_do_so(script: Write) -> None:
    path = script(
        f"""{SAVE}
    comm = ar.init()
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.barrier()
    except ar.PeerLostError:
        save()
    """
    )
    result = launch(2, path)
    assert result.code == 128 + signal.SIGKILL, result
    assert (parts(result.out), "saved" in result.out) == (10, True), result


def test_a_rank_that_left_in_good_order_has_time_to_finish_when_another_fails(
    script: Write,
) -> None:
    path = script(
        f"""{SAVE}
    if os.environ["ALLREDUCE_RANK"] == "0":
        atexit.register(save)  # before init: it runs after the communicator is closed
    comm = ar.init()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
        os._exit(4)
    """
    )
    result = launch(2, path)
    assert (result.code, parts(result.out), "saved" in result.out) == (4, 10, True), result


def test_a_rank_that_has_joined_again_is_ended_when_another_fails(script: Write) -> None:
    path = script(
        """
        import os, time
        import allreduce as ar

        ar.init().close()
        if ar.init().rank == 1:
            os._exit(4)
        time.sleep(60)
        """
    )
    began = time.monotonic()
    assert launch(2, path).code == 4
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_handler_of_a_signal_runs_once_and_to_its_end(
    script: Write, number: signal.Signals
) -> None:
    path = script(
        f"""{SAVE}
    def handle(*_):
        os.write(1, b"begins\\n")
        save()
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    ar.init().barrier()
    os.write(1, b"ready\\n")
    while True:  # a signal just before a sleep is handled after it
        time.sleep(0.1)
    """
    )
    with running([*LAUNCH, "-n", "2", str(path)]) as process:
        assert all(process.line() for _ in range(2))
        process.signal(number)
        result = process.finish(25)
    assert result.out.count("begins") == 2, result
    assert parts(result.out) == 20, result
    assert result.code == 0, result


def test_a_checkpoint_that_ctrl_c_begins_is_finished(script: Write) -> None:
    path = script(
        f"""{SAVE}
    comm = ar.init()
    comm.barrier()
    try:
        os.write(1, b"ready\\n")
        while True:  # a signal just before a sleep is handled after it
            time.sleep(0.1)
    except KeyboardInterrupt:
        if comm.rank == 0:
            save()
        raise
    """
    )
    with running([*LAUNCH, "-n", "2", str(path)]) as process:
        assert all(process.line() for _ in range(2))
        process.signal(signal.SIGINT, group=True)
        result = process.finish(25)
    assert (result.code, parts(result.out)) == (130, 10), result
    assert lines_of(result.err)[-1] == "[allreduce.run] interrupted; ending ranks 0, 1", result


def test_sigterm_comes_once_where_a_rank_fails_and_the_launcher_is_told_to_end(
    script: Write,
) -> None:
    path = script(
        f"""{SAVE}
    def handle(*_):
        os.write(1, b"begins\\n")
        save()
        sys.exit(0)

    signal.signal(signal.SIGTERM, handle)
    if ar.init().rank == 1:
        os._exit(4)
    time.sleep(60)
    """
    )
    with running([*LAUNCH, "-n", "2", str(path)]) as process:
        assert process.line() == "[0] begins"
        process.signal(signal.SIGTERM)
        result = process.finish(25)
    assert (result.out.count("begins"), parts(result.out)) == (0, 10), result


@pytest.mark.parametrize("launcher", ["run", "mpirun"])
def test_the_grace_ends(script: Write, launcher: str) -> None:
    path = script(
        """
        import atexit, time
        import allreduce as ar

        comm = ar.init()
        comm.barrier()
        atexit.register(time.sleep, 60)
        if comm.rank == 1:
            raise ValueError
        comm.barrier()
        """
    )
    command = mpirun(2, path) if launcher == "mpirun" else [*LAUNCH, "-n", "2", str(path)]
    result = run(command, {"ALLREDUCE_GRACE": "2"}, deadline=25)
    assert result.code == 1, result
    assert "ValueError" in result.err


def test_a_second_signal_kills_at_once(script: Write) -> None:
    path = script(
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    with running([*LAUNCH, "-n", "1", str(path)]) as process:
        assert process.line() == "[0] ready"
        process.signal(signal.SIGTERM)
        lines = [process.error_line() for _ in range(2)]
        assert "got SIGTERM; ending rank 0" in lines[0]
        assert "waiting for rank 0 to end, for up to 27 s more (--grace)" in lines[1]
        process.signal(signal.SIGTERM)
        assert process.finish(25).code == 128 + signal.SIGTERM


def test_a_stopped_rank_ends_with_the_job(script: Write) -> None:
    path = script(
        """
        import os, signal, time
        print("ready", flush=True)
        if os.environ["ALLREDUCE_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
        """
    )
    with running([*LAUNCH, "-n", "2", str(path)]) as process:
        assert all(process.line() for _ in range(2))
        process.signal(signal.SIGTERM)
        assert process.finish(25).code == 128 + signal.SIGTERM


def test_a_grace_that_the_ranks_would_refuse_is_refused_by_the_launcher(script: Write) -> None:
    for seconds in ("2e6", "inf"):
        result = run([*LAUNCH, "-n", "1", "--grace", seconds, str(script("print('ran')"))])
        assert (result.code, result.out) == (2, ""), result
        assert "'--grace'" in result.err, result
