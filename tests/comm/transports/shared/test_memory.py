"""The memory that a process may have: the machine's, or the rest of its control groups'."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from allreduce.comm.transports.shared import memory
from tests.harness import run_ranks

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "36 25 0:32 / /sys/fs/cgroup/memory rw,relatime shared:15 - cgroup cgroup rw,memory"
V1_CPU = "37 25 0:33 / /sys/fs/cgroup/cpu rw,relatime shared:16 - cgroup cgroup rw,cpu"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return the root of a machine with 8 GiB left and no control groups."""
    text = f"MemTotal: {16 << 20} kB\nMemFree: 5 kB\nMemAvailable: {8 << 20} kB\n"
    write(tmp_path / "proc/meminfo", text)
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def member_of(root: Path, groups: str, *mounts: str) -> None:
    write(root / "proc/self/cgroup", groups)
    write(root / "proc/self/mountinfo", "\n".join(mounts))


def v2(group: Path, limit: object, used: int, stat: str = "anon 1") -> None:
    write(group / "memory.max", limit)
    write(group / "memory.current", used)
    write(group / "memory.stat", stat)


def v1(group: Path, limit: int, used: int, stat: str = "cache 1") -> None:
    write(group / "memory.limit_in_bytes", limit)
    write(group / "memory.usage_in_bytes", used)
    write(group / "memory.stat", stat)


def test_the_machine_limits_a_process_of_no_group(machine: Path) -> None:
    left = memory.available(machine)
    assert left.nbytes == 8 * GIB
    assert str(left) == f"{8 * GIB} bytes are left of this machine's {16 * GIB}"


def test_the_tightest_group_up_the_tree_limits(machine: Path) -> None:
    member_of(machine, "0::/slurm/job_7/step_0", V2)
    top = machine / "sys/fs/cgroup"
    v2(top / "slurm/job_7/step_0", "max", 2 * GIB)
    v2(top / "slurm/job_7", 3 * GIB, 2 * GIB)  # with what the job's other steps use
    v2(top / "slurm", 100 * GIB, 98 * GIB)
    left = memory.available(machine)
    assert left.nbytes == GIB
    assert left.limit == f"the {3 * GIB} that {top}/slurm/job_7/memory.max allows"


def test_a_container_that_sees_its_group_as_the_top(machine: Path) -> None:
    member_of(machine, "0::/", V2)
    v2(machine / "sys/fs/cgroup", GIB, GIB // 4)
    assert memory.available(machine).nbytes == GIB - GIB // 4


def test_version_1_counts_the_memory_controllers_tree_alone(machine: Path) -> None:
    member_of(machine, "5:cpu:/elsewhere\n4:memory:/job/task\n0::/", V1_CPU, V1)
    v1(machine / "sys/fs/cgroup/cpu/elsewhere", 1, 1)
    v1(machine / "sys/fs/cgroup/memory/job/task", (1 << 63) - 4096, GIB)
    v1(machine / "sys/fs/cgroup/memory/job", 2 * GIB, GIB)
    left = memory.available(machine)
    assert left.nbytes == GIB
    assert "memory/job/memory.limit_in_bytes allows" in left.limit


def test_version_1_in_a_container_that_knows_its_outer_name(machine: Path) -> None:
    mount = V1.replace(" / ", " /docker/abc ", 1)
    member_of(machine, "4:memory:/docker/abc/inner", mount)
    v1(machine / "sys/fs/cgroup/memory", 4 * GIB, GIB)
    v1(machine / "sys/fs/cgroup/memory/inner", 3 * GIB, GIB)
    assert memory.available(machine).nbytes == 2 * GIB


@pytest.mark.parametrize("version", ["cgroup", "cgroup2"])
def test_cached_files_make_room(machine: Path, version: str) -> None:
    place = "memory" if version == "cgroup" else ""
    member_of(machine, "4:memory:/" if place else "0::/", V1 if place else V2)
    before = "total_" if place else ""
    stat = f"{before}inactive_file {GIB}\n{before}active_file {GIB // 2}\n{before}shmem {GIB // 4}"
    (v1 if place else v2)(machine / "sys/fs/cgroup" / place, 2 * GIB, 2 * GIB, stat)
    assert memory.available(machine).nbytes == GIB + GIB // 2


def test_a_group_beyond_its_limit_leaves_nothing(machine: Path) -> None:
    member_of(machine, "0::/", V2)
    v2(machine / "sys/fs/cgroup", GIB, GIB + 4096)
    assert memory.available(machine).nbytes == 0


def _in_a_group(procs: str, count: int) -> None:
    import os
    from pathlib import Path

    from allreduce import errors
    from allreduce.comm import init

    comm = init()
    if comm.rank == 0:
        Path(procs).write_text(str(os.getpid()))  # what it allocates for all counts for it
    comm.barrier()
    try:
        comm.empty(count, "float64")
    except errors.OutOfMemoryError as error:
        print(error)
    small = comm.empty(1000, "float32")
    small[:] = 1
    print(comm.all_reduce(small)[0])


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """Make a control group with 512 MiB, where this machine lets tests do so."""
    tops = {version: top for version, top, _ in memory._hierarchies(Path("/"))}
    version = "cgroup" if "cgroup" in tops else "cgroup2"
    if version not in tops:
        pytest.skip("this machine has no control groups for memory")
    group = tops[version] / f"allreduce-test-{os.getpid()}"
    name = memory._VERSIONS[version][0]
    try:
        group.mkdir()
        (group / name).write_text(str(512 << 20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error}")
    yield group
    group.rmdir()  # fails if a rank is left


def test_a_real_groups_limit_is_an_error_on_all_ranks(limited_group: Path) -> None:
    procs = str(limited_group / "cgroup.procs")
    for result in run_ranks(_in_a_group, 2, arguments=(procs, 1 << 26)):
        assert result.returncode == 0, result
        assert "rank 0 got 'Cannot allocate memory'" in result.stdout
        assert f"left of the {512 << 20} that {limited_group}/memory." in result.stdout
        assert result.stdout.endswith("2.0\n")


@pytest.mark.parametrize(("flag", "number"), [(8, errno.EINVAL), (0, errno.EACCES)])
def test_files_are_made_on_old_kernels_and_on_those_that_forbid_executable_ones(
    flag: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.memfd_create

    def refuse(name: str, flags: int) -> int:
        if flags & 8 == flag:
            raise OSError(number, os.strerror(number))
        return create(name, os.MFD_CLOEXEC)

    monkeypatch.setattr(os, "memfd_create", refuse)
    os.close(memory.allocate(1000))
