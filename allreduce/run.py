"""`python -m allreduce.run -n 4 train.py`: start ranks without MPI.

Hosts the group leader on a free port, starts the processes, puts the rank before each line of
their output, and ends them together: at the first failure, at a signal, with the launcher's death.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    # Nothing has started yet, so Ctrl-C needs no traceback. If it is ignored, as in a shell's
    # background jobs, it stays ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from allreduce.importing import importing

with importing():
    import typer

    from allreduce import settings
    from allreduce.cluster.launcher import cluster_job, job
    from allreduce.errors import AllreduceError


def _check_transport(name: str | None) -> None:
    """Refuse a transport that the ranks would refuse, each for itself."""
    if name is not None:
        from allreduce.comm.registry import check_name  # the ranks need NumPy, we do not

        check_name(name, "ALLREDUCE_TRANSPORT")


def _check_script(script: Path) -> None:
    """Refuse what Python cannot run, and an interpreter, which only mpirun takes."""
    if script.name.startswith("python") and script.suffix != ".py":
        raise typer.BadParameter(
            f"{str(script)!r} is an interpreter; leave it out: ranks are Python programs anyway",
            param_hint="COMMAND",
        )
    if not script.exists():
        raise typer.BadParameter(f"there is no file {str(script)!r}", param_hint="COMMAND")
    if script.is_dir() and not any((script / f"__main__.{end}").exists() for end in ("py", "pyc")):
        raise typer.BadParameter(
            f"{str(script)!r} is a folder without a __main__.py; name the script in it",
            param_hint="COMMAND",
        )


def _job(
    command: list[str], processes: int | None, cluster: str | None, restarts: int, grace: float
) -> job.Job:
    """Start the ranks, or the tasks of a cluster."""
    if (processes is None) == (cluster is None) or (restarts and cluster is None):
        raise typer.BadParameter(
            "pass either -n with the number of ranks, or --cluster with the number of tasks of "
            "each job (and --restarts with it)"
        )
    if cluster is None:
        assert processes is not None
        return job.Job(command, processes, grace)
    serving = [sys.executable, "-m", "allreduce.server"]
    return cluster_job.ClusterJob(cluster_job.parse(cluster), command, serving, grace, restarts)


def launch(
    command: Annotated[
        list[str], typer.Argument(help="The script, or with -m the module, and its arguments.")
    ],
    processes: Annotated[
        int | None,
        typer.Option("--processes", "-n", "-np", min=1, help="How many ranks to start."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Start the tasks of a cluster instead, such as ps=1,worker=2: servers for ps, "
            "the program for the other jobs."
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="With --cluster: how often failed tasks are started again.")
    ] = 0,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="Run a module, as python -m does.")
    ] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=settings.LONGEST_SECONDS,
            show_default="30, or ALLREDUCE_GRACE",
            help="Seconds for which ranks may go on, to save and clean up, after Ctrl-C, SIGTERM "
            "or the failure of a rank; then they are killed. A second signal kills at once.",
        ),
    ] = None,
) -> None:
    """Start ranks of a program on this machine, without MPI. They have no standard input."""
    if not module:
        _check_script(Path(command[0]))
    try:
        read = settings.load()
        _check_transport(read.transport)
        grace = read.grace if grace is None else grace
        whole = [sys.executable, *(["-m"] if module else []), *command]
        code = _job(whole, processes, cluster, restarts, grace).run()
    except AllreduceError as error:
        sys.stderr.buffer.write(job.line(str(error)))
        code = 1
    raise typer.Exit(code)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"allow_interspersed_args": False})(launch)

if __name__ == "__main__":
    app()
