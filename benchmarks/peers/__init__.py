"""The peers, and how each is installed and started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """A library with its own collectives.

    Args:
        title: Its name in tables.
        packages: The packages of its environment, besides ours.
        launcher: The options of its `mpiexec` if it shares our processes, otherwise None.
        script: The module of this package that runs it, where it cannot.
        carries: The collectives that it has.
        settings: Environment variables that its processes need.
    """

    title: str
    packages: tuple[str, ...]
    launcher: tuple[str, ...] | None = None
    script: str | None = None
    carries: tuple[str, ...] = (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
        "all_to_all",
    )
    settings: tuple[tuple[str, str], ...] = ()


PEERS = {
    "mpich": Peer("MPICH", ("mpi4py", "mpich"), launcher=()),
    "openmpi": Peer(
        "Open MPI",
        ("mpi4py", "openmpi"),
        launcher=("--oversubscribe",),
        # Containers often have no user but root.
        settings=(("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")),
    ),
    "intelmpi": Peer("Intel MPI", ("mpi4py", "impi-rt"), launcher=()),
    "gloo": Peer("gloo", ("torch==2.13.0",), script="torch_gloo"),
    "mlx": Peer("MLX ring", ("mlx[cpu]",), script="mlx_ring", carries=("all_reduce",)),
    "jax": Peer("JAX", ("jax", "jaxlib"), script="jax_gloo", carries=("all_reduce",)),
}
OVER_SOCKETS = ("gloo", "mlx")  # the peers of our tcp transport
