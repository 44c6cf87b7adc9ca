"""The launchers' variables: complete sets, incomplete ones, and unknown variables."""

from __future__ import annotations

import pytest

from allreduce import cluster
from allreduce.cluster.host.launchers import launcher
from allreduce.errors import JoinError

PLACE = {"PMI_RANK": "1", "PMI_SIZE": "4"}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, ("MPICH", 1, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "I_MPI_MPIRUN": "mpirun"}, ("Intel MPI", 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, ("Open MPI", 2, 3)),
        # an srun step's PMI is Slurm's word, unless hydra, started in that step, says otherwise
        ({**PLACE, **STEP}, None),
        ({**PLACE, **STEP, "MPI_LOCALNRANKS": "4"}, ("MPICH", 1, 4)),
        # the batch script is no step: another launcher set PMI_RANK there
        ({**PLACE, **STEP, "SLURM_STEP_ID": "4294967291"}, ("MPICH", 1, 4)),
        ({**PLACE, "SLURM_STEP_ID": "0"}, ("MPICH", 1, 4)),
    ],
)
def test_launchers_are_told_by_their_variables(
    environ: dict[str, str], expected: tuple[str, int, int] | None
) -> None:
    found = launcher(environ)
    assert (found and (found.family, found.rank, found.size)) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "x", "PMI_SIZE": "4"},
        {"PMI_RANK": "1", "PMI_SIZE": "four"},
        {"PMI_RANK": "1"},
        {"PMI_SIZE": "4"},
        {"PMI_RANK": "4", "PMI_SIZE": "4"},
        {"OMPI_COMM_WORLD_RANK": "1"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": ""},
        {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-host-1@1"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_job_of_several_ranks_is_never_a_world_of_one(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(JoinError) as caught:
        cluster.join()
    named = [name for name in environ if f"{name}=" in str(caught.value)]
    assert named, caught.value


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"LOCAL_RANK": "1", "WORLD_SIZE": "large"},
        {"PMIX_RANK": "0"},
    ],
)
def test_unrelated_variables_are_nobodys_job(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert cluster.join().source == "single"


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_PROCID": "x"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
    ],
)
def test_a_source_that_lost_cannot_veto(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert cluster.join(rank=0, size=1).source == "leader"
