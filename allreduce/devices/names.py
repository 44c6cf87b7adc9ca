"""Device names: TensorFlow's, in full or in part and as people write them.

A name has five fields: job, replica, task, kind and index. Each may be left open; open fields are
filled from the enclosing scopes (`merge`) and then from this process (`complete`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from allreduce.errors import DeviceError, did_you_mean

FORMS = (
    "/job:worker/replica:0/task:1/device:GPU:0",
    "/job:ps/task:0/cpu:0",
    "/device:CPU:1",
    "/GPU:0",
    "gpu:1",
    "CPU",
)
# Only these may stand without `device:` before them, as in TensorFlow: if any word could, a
# misspelt field would pass for a device.
SHORT_KINDS = ("CPU", "GPU")

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[0-9]{1,9}")
_OPEN = "*"


@dataclass(frozen=True, slots=True)
class DeviceName:
    """One device, or all that agree with the fields that are set; None leaves a field open."""

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    kind: str | None = None
    index: int | None = None

    def __post_init__(self) -> None:
        for field, value in (("job", self.job), ("kind", self.kind)):
            if value is not None and not (isinstance(value, str) and _WORD.fullmatch(value)):
                raise DeviceError(f"a device's {field} is a word such as 'worker', not {value!r}")
        numbers = (("replica", self.replica), ("task", self.task), ("index", self.index))
        for field, number in numbers:
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int):
                raise DeviceError(f"a device's {field} is an integer from 0, not {number!r}")
            if number < 0:
                raise DeviceError(f"a device's {field} counts from 0; {number} is below it")
        if self.kind is not None:
            object.__setattr__(self, "kind", self.kind.upper())

    @classmethod
    def parse(cls, text: str | DeviceName) -> DeviceName:
        """Parse a name in any of the forms in `FORMS`; return a parsed name unchanged.

        `*` leaves a field open, as does leaving it out; the empty text leaves all of them open.

        Raises:
            DeviceError: The text is no device name; the message shows valid forms.
        """
        if isinstance(text, DeviceName):
            return text
        if not isinstance(text, str):
            raise _malformed(text, f"it is no text, but of type {type(text).__name__}")
        fields: dict[str, str | int | None] = {}
        parts = text.removeprefix("/").split("/") if text.strip("/") else []
        for part in parts:
            for field, value in _read_part(text, part).items():
                if field in fields:
                    raise _malformed(text, f"it says {field} twice")
                fields[field] = value
        if fields.get("job") == "localhost":  # TensorFlow's name for this process's task
            del fields["job"]
            fields.pop("task", None)
        return cls(**fields)  # type: ignore[arg-type]  # _read_part gives each field its own type

    def __str__(self) -> str:
        text = "" if self.job is None else f"/job:{self.job}"
        text += "" if self.replica is None else f"/replica:{self.replica}"
        text += "" if self.task is None else f"/task:{self.task}"
        if self.kind is None and self.index is None:
            return text
        index = _OPEN if self.index is None else self.index
        return f"{text}/device:{self.kind or _OPEN}:{index}"

    @property
    def is_complete(self) -> bool:
        """Whether every field is set, so that this names one device of one task."""
        values = (self.job, self.replica, self.task, self.kind, self.index)
        return all(value is not None for value in values)

    @property
    def on_host(self) -> bool:
        """Whether its memory is the host's."""
        return self.kind == LOCAL_CPU.kind

    @property
    def local(self) -> str:
        """The short form that names the device inside its own task: `GPU:0`."""
        return f"{self.kind or _OPEN}:{_OPEN if self.index is None else self.index}"

    def merge(self, outer: DeviceName) -> DeviceName:
        """Fill open fields from an enclosing scope's name; fields that are set win.

        An index counts devices of one kind, so `CPU` inside `GPU:1` is any CPU and not `CPU:1`.
        """
        other_kind = self.kind is not None and outer.kind not in (None, self.kind)
        index = self.index if other_kind or self.index is not None else outer.index
        return DeviceName(
            job=outer.job if self.job is None else self.job,
            replica=outer.replica if self.replica is None else self.replica,
            task=outer.task if self.task is None else self.task,
            kind=outer.kind if self.kind is None else self.kind,
            index=index,
        )

    def complete(self) -> DeviceName:
        """Fill every open field from `LOCAL_CPU`, so that the result names exactly one device."""
        merged = self.merge(LOCAL_CPU)
        return replace(merged, index=0) if merged.index is None else merged

    def matches(self, other: DeviceName) -> bool:
        """Whether `other` agrees with every field that is set here."""
        return all(
            mine is None or mine == theirs
            for mine, theirs in (
                (self.job, other.job),
                (self.replica, other.replica),
                (self.task, other.task),
                (self.kind, other.kind),
                (self.index, other.index),
            )
        )


LOCAL_CPU = DeviceName(job="worker", replica=0, task=0, kind="CPU", index=0)


def _read_part(text: str, part: str) -> dict[str, str | int | None]:
    """Parse the text between two slashes: one field, or a device's kind and index."""
    head, _, rest = part.partition(":")
    if head.upper() in SHORT_KINDS:
        return _device(text, head, rest if ":" in part else _OPEN)
    if head == "device":
        kind, colon, index = rest.partition(":")
        return _device(text, kind, index if colon else _OPEN)
    reader = _FIELDS.get(head)
    if reader is None:
        hint = did_you_mean(head, [*_FIELDS, "device", *SHORT_KINDS])
        raise _malformed(text, f"{head!r} is neither a field nor a kind of device{hint}")
    return {head: reader(text, head, rest)}


def _device(text: str, kind: str, index: str) -> dict[str, str | int | None]:
    word = _word(text, "kind", kind)
    return {
        "kind": None if word is None else word.upper(),
        "index": _number(text, "index", index),
    }


def _word(text: str, field: str, value: str) -> str | None:
    if value == _OPEN:
        return None
    if not _WORD.fullmatch(value):
        raise _malformed(text, f"its {field} {value!r} is not a word")
    return value


def _number(text: str, field: str, value: str) -> int | None:
    if value == _OPEN:
        return None
    if not _NUMBER.fullmatch(value):
        raise _malformed(text, f"its {field} {value!r} is not a number from 0")
    return int(value)


_FIELDS: dict[str, Callable[[str, str, str], str | int | None]] = {
    "job": _word,
    "replica": _number,
    "task": _number,
}


def _malformed(text: object, why: str) -> DeviceError:
    end = "" if why.endswith("?") else "."
    forms = ", ".join(map(repr, FORMS))
    return DeviceError(f"{text!r} is not a device name: {why}{end} Names look like {forms}")
