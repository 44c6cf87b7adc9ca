"""A cache of compiled steps, by function and signature."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from allreduce.graph.execute.bound_program import BoundProgram
from allreduce.graph.replicate.compiled import Compiled
from allreduce.graph.trace.retracing import Discarded, Retracing, code_of
from allreduce.graph.trace.signature import Arguments


class ProgramCache:
    """Compiled steps by function and signature; they live as long as the function.

    The memory of a deleted function's programs is freed at the next call of any function, because
    weak reference callbacks may run anywhere. Functions without weak references, such as methods of
    a class with `__slots__`, live with their programs as long as the replicator.
    """

    def __init__(self) -> None:
        self._functions: dict[tuple[int, object], Programs] = {}
        self._discarded = Discarded()
        # Weakly: the collector may be first, as when memory is short.
        self._gone: list[weakref.ref[BoundProgram]] = []  # of functions that are

    def of(self, fn: Callable[..., Any]) -> Programs:
        """Return a function's compiled steps."""
        while self._gone:
            bound = self._gone.pop()()
            if bound is not None:
                bound.release()
        owner, method = _parts(fn)
        key = (id(owner), method)  # forgotten before its id can return
        found = self._functions.get(key)
        if found is None:
            found = self._functions[key] = Programs(self._discarded)
            code = None if method else code_of(fn)
            try:
                # Dies with the cache, which `weakref.finalize` would keep as long as the function.
                found.owner = weakref.ref(owner, _removal_callback(weakref.ref(self), key, code))
            except TypeError:  # tuples, builtins and objects with __slots__ have no weak references
                found.owner = owner
        return found

    def latest_arguments(self, fn: Callable[..., Any]) -> Arguments | None:
        """Return the latest call's arguments, if other calls can be compared with them."""
        owner, method = _parts(fn)
        found = self._functions.get((id(owner), method))
        return None if found is None else found.like

    def _forget(self, key: tuple[int, object], code: object) -> None:
        programs = self._functions.pop(key)
        if programs.by_signature:
            self._discarded.add(code, programs.steps)
        for compiled in programs.by_signature.values():
            self._gone.extend(weakref.ref(bound) for bound in compiled.bound_programs)

    def clear(self) -> None:
        """Drop all programs, but keep the numbers of steps."""
        for programs in list(self._functions.values()):  # some may go meanwhile
            programs.latest = programs.like = programs.liked = None
            while programs.by_signature:
                _, compiled = programs.by_signature.popitem()
                compiled.release()


def _removal_callback(
    cache: weakref.ref[ProgramCache], key: tuple[int, object], code: object
) -> Callable[[object], None]:
    """Return the callback for a function's end; it refers to the cache weakly."""

    def forget(_: object) -> None:
        living = cache()
        if living is not None:
            living._forget(key, code)

    return forget


def _parts(fn: Callable[..., Any]) -> tuple[Any, object]:
    """Return the object that lives as long as a function, and the method's name.

    A bound method is made anew at each access: its instance is what lives on. It need not be
    hashable.
    """
    return (fn.__self__, fn.__func__) if inspect.ismethod(fn) else (fn, None)


@dataclass(slots=True)
class Programs:
    """One function's compiled steps, and its number of steps, which random draws depend on.

    Attributes:
        discarded: Records short-lived functions, to warn about them.
        like: The latest call's arguments, if other calls can be compared with them.
        liked: The compiled step for these.
        owner: A weak reference to the function's owner, or the owner itself if it does not support
            weak references, so that its id stays unique.
    """

    discarded: Discarded
    by_signature: dict[tuple[bool, int | None, Hashable], Compiled] = field(default_factory=dict)
    latest: Compiled | None = None  # the one that was run last
    steps: int = 0
    retracing: Retracing = field(default_factory=Retracing)
    owner: object = None
    like: Arguments | None = None
    liked: Compiled | None = None

    def get(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        make: Callable[[], Compiled],
        alone: bool = False,
    ) -> Compiled:
        """Return the compiled step for a call's arguments; `make` compiles a new one.

        A step with a new seed replaces all those with the old seed.
        """
        if self.like is not None and arguments.key is self.like.key and self.liked and not alone:
            self.retracing.note(fn, arguments, False)
            return self.liked
        signature = (alone, arguments.seed, arguments.key)
        found = self.by_signature.get(signature)
        self.retracing.note(fn, arguments, found is None)
        if found is None:
            if not self.by_signature:
                self.discarded.note(fn)
            self._drop_other_seeds(alone, arguments.seed)
            found = self.by_signature[signature] = make()
        if not alone:
            self.like, self.liked = arguments.without_values(), found
        return found

    def _drop_other_seeds(self, alone: bool, seed: int | None) -> None:
        # Not programs of the other kind: a step that one rank runs alone must not make it trace
        # alone later.
        for signature in list(self.by_signature):
            if signature[0] == alone and signature[1] != seed:
                dropped = self.by_signature.pop(signature)
                if dropped is self.latest:
                    self.latest = None
                self.like = self.liked = None
                dropped.release()
