"""Device names: all forms, nesting, printing, and errors for malformed texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allreduce.devices.names import FORMS, LOCAL_CPU, DeviceName
from allreduce.errors import DeviceError

WORKER_GPU = DeviceName("worker", 0, 1, "GPU", 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/job:worker/replica:0/task:1/device:GPU:0", WORKER_GPU),
        ("/device:GPU:0/task:1/replica:0/job:worker", WORKER_GPU),
        ("/job:ps/task:0/cpu:0", DeviceName(job="ps", task=0, kind="CPU", index=0)),
        ("/job:ps/task:0", DeviceName(job="ps", task=0)),
        ("/job:*/task:3", DeviceName(task=3)),
        ("/GPU:0", DeviceName(kind="GPU", index=0)),
        ("GPU:0", DeviceName(kind="GPU", index=0)),
        ("gpu:11", DeviceName(kind="GPU", index=11)),
        ("CPU", DeviceName(kind="CPU")),
        ("/cpu", DeviceName(kind="CPU")),
        ("/device:CPU:*", DeviceName(kind="CPU")),
        ("device:tpu:2", DeviceName(kind="TPU", index=2)),
        ("/device:*:1", DeviceName(index=1)),
        ("", DeviceName()),
        ("/", DeviceName()),
    ],
)
def test_parses_every_form(text: str, expected: DeviceName) -> None:
    assert DeviceName.parse(text) == expected


def test_the_forms_shown_in_errors_are_names() -> None:
    for form in FORMS:
        assert DeviceName.parse(form) != DeviceName()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/job:worker/tsk:0", "did you mean 'task'"),
        ("/devise:GPU:0", "did you mean 'device'"),
        ("GPUU:0", "'GPUU' is neither a field nor a kind of device; did you mean 'GPU'? Names"),
        ("XPU:0", "is not a device name: 'XPU' is neither"),
        ("/GPU:-1", "'-1' is not a number from 0"),
        ("/GPU:one", "'one' is not a number from 0"),
        ("/GPU:", "'' is not a number from 0"),
        ("/GPU:0:1", "'0:1' is not a number from 0"),
        ("/GPU:0/CPU:0", "says kind twice"),
        ("/task:0/task:1", "says task twice"),
        ("/job:", "'' is not a word"),
        ("/job:9a", "'9a' is not a word"),
        ("/task:٣", "is not a number from 0"),
        ("//GPU:0", "'' is neither a field"),
        ("GPU:0/", "'' is neither a field"),
        (" GPU:0", "' GPU' is neither a field"),
    ],
)
def test_malformed_text_is_told_what_names_look_like(text: str, said: str) -> None:
    with pytest.raises(DeviceError) as caught:
        DeviceName.parse(text)
    assert said in str(caught.value)
    assert "/job:worker/replica:0/task:1/device:GPU:0" in str(caught.value)


def test_something_that_is_no_text_is_an_error() -> None:
    with pytest.raises(DeviceError, match="0 is not a device name: it is no text, but of type int"):
        DeviceName.parse(0)  # type: ignore[arg-type]


def test_fields_are_checked_however_a_name_is_made() -> None:
    assert DeviceName(kind="gpu") == DeviceName(kind="GPU")
    with pytest.raises(DeviceError, match="task counts from 0"):
        DeviceName(task=-1)
    with pytest.raises(DeviceError, match="job is a word"):
        DeviceName(job="a/b")


names = st.builds(
    DeviceName,
    job=st.none() | st.sampled_from(["worker", "ps", "chief_2"]),
    replica=st.none() | st.integers(0, 3),
    task=st.none() | st.integers(0, 10**6),
    kind=st.none() | st.sampled_from(["CPU", "GPU", "TPU"]),
    index=st.none() | st.integers(0, 64),
)


@given(names)
def test_what_is_printed_parses_back(name: DeviceName) -> None:
    assert DeviceName.parse(str(name)) == name


def test_prints_the_full_form_of_what_is_set() -> None:
    assert str(WORKER_GPU) == "/job:worker/replica:0/task:1/device:GPU:0"
    assert str(DeviceName.parse("gpu")) == "/device:GPU:*"
    assert WORKER_GPU.local == "GPU:0"


@given(names, names)
def test_inner_scope_wins_field_by_field(inner: DeviceName, outer: DeviceName) -> None:
    merged = inner.merge(outer)
    for field in ("job", "replica", "task", "kind"):
        mine = getattr(inner, field)
        assert getattr(merged, field) == (getattr(outer, field) if mine is None else mine)
    assert inner.matches(merged)


def test_an_index_does_not_move_to_another_kind() -> None:
    gpu = DeviceName.parse("/job:ps/GPU:1")
    assert DeviceName.parse("CPU").merge(gpu) == DeviceName(job="ps", kind="CPU")
    assert DeviceName.parse("GPU").merge(gpu) == gpu
    assert DeviceName.parse("/task:2").merge(gpu) == DeviceName.parse("/job:ps/task:2/GPU:1")


@given(names)
def test_complete_names_one_device_and_keeps_what_was_said(name: DeviceName) -> None:
    full = name.complete()
    assert full.is_complete
    assert name.matches(full)


def test_complete_takes_open_fields_from_the_local_cpu() -> None:
    assert DeviceName().complete() == LOCAL_CPU
    assert not DeviceName.parse("/task:1/CPU:0").is_complete


def test_matches_only_what_agrees() -> None:
    assert DeviceName().matches(WORKER_GPU)
    assert DeviceName.parse("GPU").matches(WORKER_GPU)
    assert not DeviceName.parse("GPU:1").matches(WORKER_GPU)
    assert not DeviceName.parse("/job:ps/GPU:0").matches(WORKER_GPU)
