"""`python -m allreduce.server --job_name=ps --task_index=0 --cluster cluster.json`: one task."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from allreduce.errors import AllreduceError
from allreduce.server.task.server import Server


def serve(
    job_name: Annotated[
        str | None, typer.Option("--job_name", show_default="of ALLREDUCE_TASK")
    ] = None,
    task_index: Annotated[
        int | None, typer.Option("--task_index", show_default="of ALLREDUCE_TASK")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="A JSON file of the cluster, or JSON text.", show_default="ALLREDUCE_CLUSTER"
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="End when this task has, such as worker:0.")
    ] = None,
) -> None:
    """Serve one task of a cluster until SIGTERM or Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # before others can see it serve
    try:
        server = Server(cluster, job_name, task_index)
    except AllreduceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    try:
        server.join(until)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except AllreduceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    finally:
        server.close()


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(serve)

if __name__ == "__main__":
    app()
