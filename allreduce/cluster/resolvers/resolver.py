"""The resolver interface: each resolver is one way for a process to find its world."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from allreduce.cluster.world import World
from allreduce.errors import UsageError
from allreduce.events import counted
from allreduce.settings import PREFIX, Settings


@dataclass(eq=False, repr=False)  # it has a secret
class Request:
    """The caller's arguments merged with `ALLREDUCE_…` variables, and the environment.

    Raises:
        UsageError: An argument and its variable contradict each other.
    """

    environ: Mapping[str, str]
    rank: int | None
    size: int | None
    leader: str | None
    secret: bytes | None
    timeout: float
    launched: bool  # the launcher hosts the leader
    named: tuple[str, ...]  # the origins of rank, size and leader, for messages
    generation: int

    @classmethod
    def merge(
        cls,
        settings: Settings,
        environ: Mapping[str, str],
        generation: int,
        **arguments: int | str | bytes | float | None,
    ) -> Request:
        """Merge a call's arguments with the settings; an argument may repeat its variable."""
        values: dict[str, object] = {}
        named = []
        for name in ("rank", "size", "leader", "secret", "timeout"):
            argument, setting = arguments.get(name), getattr(settings, name)
            given = argument is not None
            in_environment = PREFIX + name.upper() in environ
            if given and in_environment and argument != setting and name != "timeout":
                shown = "" if name == "secret" else f" ({argument!r} against {setting!r})"
                raise UsageError(
                    f"[cluster] the argument {name} and {PREFIX}{name.upper()} contradict each "
                    f"other{shown}; remove one"
                )
            values[name] = argument if given else setting
            if name in ("rank", "size", "leader") and values[name] is not None:
                named.append(f"the argument {name}" if given else PREFIX + name.upper())
        return cls(
            environ=environ,
            launched=settings.launched is not None,
            named=tuple(named),
            generation=generation,
            **values,  # type: ignore[arg-type]
        )


class Resolver(ABC):
    """One source of worlds; `PRECEDENCE` orders them."""

    name: str

    @abstractmethod
    def claim(self, request: Request) -> str | None:
        """Return evidence that this source placed the process, or None. Cheap: imports nothing."""

    @abstractmethod
    def join(self, request: Request, ignored: str) -> World:
        """Join; after a claim, a source never falls back to a world of one.

        Args:
            ignored: Text about the sources that lost, for the log line.
        """


def explain(size: int, name: str, evidence: str, ignored: str) -> str:
    """Return the log line: the source that won, its evidence, and the ignored sources."""
    return f"{counted(size, 'rank')} through {name}: {evidence}{ignored}"
