"""`ar.config`: what is set is what rooms read, and wrong values are refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from allreduce import config
from allreduce.devices import options
from allreduce.errors import UsageError


@pytest.fixture(autouse=True)
def keep_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_current", options.Options())


def test_flags_are_off_until_set() -> None:
    assert not config.get_soft_device_placement()
    assert not config.get_log_device_placement()
    config.set_soft_device_placement(True)
    config.set_log_device_placement(True)
    assert options.current().soft_device_placement
    assert config.get_log_device_placement()
    config.set_soft_device_placement(False)
    assert not config.get_soft_device_placement()
    assert config.get_log_device_placement()


def test_a_flag_is_no_text() -> None:
    with pytest.raises(UsageError, match="soft_device_placement is True or False, not 'no'"):
        config.set_soft_device_placement("no")  # type: ignore[arg-type]


def test_floatx() -> None:
    assert config.floatx() == "float32"
    config.set_floatx("float64")
    assert options.current().floatx == "float64"
    with pytest.raises(UsageError, match=r"unknown floatx 'float46'.*did you mean 'float64'"):
        config.set_floatx("float46")


def run(script: str) -> str:
    """Run a script in a process of its own: the devices of this one are in use."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_logical_devices_before_and_after_their_first_use() -> None:
    output = run("""
        from allreduce import config, errors
        config.set_logical_devices("CPU", 4)
        print([str(device.name) for device in config.list_logical_devices("CPU")][-1])
        print(config.list_physical_devices()[0].name)
        try:
            config.set_logical_devices("CPU", 2)
        except errors.UsageError as error:
            print(error)
    """)
    last, physical, error = output.splitlines()
    assert last == "/job:worker/replica:0/task:0/device:CPU:3"
    assert physical == "/physical_device:CPU:0"
    assert "4 logical CPU devices in use" in error


def test_intra_op_threads_reach_blas() -> None:
    output = run("""
        import numpy, threadpoolctl
        from allreduce import config, devices
        print(config.threading.get_intra_op_parallelism_threads())
        config.threading.set_intra_op_parallelism_threads(2)
        print(config.threading.get_intra_op_parallelism_threads())
        print(devices.blas_threads(64))
        print({pool["num_threads"] for pool in threadpoolctl.threadpool_info()
               if pool["user_api"] == "blas"})
    """)
    assert output.splitlines() == ["0", "2", "2", "{2}"]
