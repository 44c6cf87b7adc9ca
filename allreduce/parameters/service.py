"""The methods of a parameter server that workers call: one dispatch, without a network.

Every `ps` task has a service with its parts of variables (`Stores`). The service of task 0 also
knows the workers, deals out rows (`Fit`), and decides what a synchronous update takes
(`Aggregation`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.errors import MismatchError
from allreduce.events import counted, logger
from allreduce.parameters import checkpoint
from allreduce.parameters.aggregation import Aggregation
from allreduce.parameters.checkpoint import Contents, Writer
from allreduce.parameters.clocks import Clocks
from allreduce.parameters.dealing import TRAIN, VALIDATE, Fit, FitSpec
from allreduce.parameters.stores import WAIT_SECONDS, Arrays, Reply, Stores


@dataclass(slots=True)
class _Worker:
    """A worker, as task 0 knows it.

    Attributes:
        task: Its name, such as "worker:1".
        is_chief: Whether it is the chief.
    """

    task: str
    is_chief: bool


class ParameterService:
    """Answers workers' calls; safe to use from several threads.

    Every method takes the caller's name, small plain arguments and arrays, and returns plain
    results and arrays. The result {"unknown": True} says that this server does not have what the
    call is about, as it has restarted: the worker then sends what is missing, and calls again.
    """

    def __init__(self) -> None:
        self._stores = Stores(self._save_progress)
        self._workers: dict[str, _Worker] = {}
        self._fits: dict[int, Fit] = {}
        self._seed: int | None = None
        self._settings: dict[str, Any] | None = None
        self._aggregation: Aggregation | None = None
        self._clocks = Clocks()
        self._offers = 0  # of gradients, in loops of the program's own
        self._progress: tuple[Path, Writer] | None = None  # the file of what `fit` has done
        self._changed = threading.Condition()

    def call(self, caller: str, method: str, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Run one method.

        Raises:
            UsageError: There is no such method.
        """
        found = _METHODS.get(method)
        if found is not None:
            return found(self, caller, fields, arrays)
        return self._stores.call(method, fields, arrays)

    def lose(self, caller: str) -> None:
        """Note that a worker's connection has ended: others get its rows."""
        with self._changed:
            worker = self._workers.pop(caller, None)
            fits = list(self._fits.values())
            if worker is None:
                return
            if self._aggregation is not None:
                self._aggregation.lose(caller)
            self._changed.notify_all()
        self._clocks.rest(caller)
        parts = sum(fit.lose(caller, is_chief=worker.is_chief) for fit in fits)
        logger.info(
            "[parameter server] %s has gone%s",
            *(worker.task, f"; others get {counted(parts, 'part')} of its rows" if parts else ""),
        )

    # --- membership ---

    def _join(self, caller: str, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Let a worker in; all have the settings and the seed of the first one."""
        settings = fields["settings"]
        with self._changed:
            if self._settings is None:
                self._settings = settings
                if settings["update"] == "sync":
                    sizes = settings["replicas_to_aggregate"], settings["total_replicas"]
                    # Higher than before a restart: other servers know the earlier numbers.
                    self._aggregation = Aggregation(*sizes, first=time.time_ns() // 1_000_000)
                self._restore(fields)
            different = [n for n, value in settings.items() if self._settings.get(n) != value]
            if different:
                name = different[0]
                raise MismatchError(
                    f"[parameter server] {fields['task']}: ParameterServerStrategy has {name}="
                    f"{settings[name]!r} here but {self._settings.get(name)!r} on the worker that "
                    "came first; pass the same arguments on all workers"
                )
            if self._seed is None:
                self._seed = fields["seed"]
            elif fields["seed_is_set"] and self._seed != fields["seed"]:
                raise MismatchError(
                    f"[parameter server] {fields['task']} has seed {fields['seed']}, but others "
                    f"have {self._seed}; call ar.set_seed with one number on all workers"
                )
            self._workers[caller] = _Worker(fields["task"], fields["is_chief"])
            self._changed.notify_all()
            return {"seed": self._seed}, ()

    def _restore(self, fields: Mapping[str, Any]) -> None:
        """Read the progress of the calls of `fit` in this job, if this task has restarted."""
        folder = fields["settings"].get("checkpoint")
        if folder is None:
            return
        path = Path(folder) / f"{fields['job']}-progress.safetensors"
        self._progress = path, Writer()
        found = checkpoint.read(path) if path.exists() else None
        if found is None:
            return
        arrays = [found.arrays[name] for name in sorted(found.arrays)]
        for number, (state, count) in found.described.items():
            own, arrays = arrays[:count], arrays[count:]
            self._fits[int(number)] = Fit.restored(state, own, self._aggregation)

    def _save_progress(self) -> None:
        """Write the progress of all calls of `fit`."""
        if self._progress is None:
            return
        path, writer = self._progress

        def contents() -> Contents:
            described: dict[str, Any] = {}
            arrays: list[np.ndarray] = []
            for number, fit in list(self._fits.items()):
                state, own = fit.state()
                described[str(number)] = state, len(own)
                arrays += own
            return Contents({f"{i:06d}": each for i, each in enumerate(arrays)}, described)

        writer.start(path, contents)

    def _status(self, _: str, __: Mapping[str, Any], ___: Arrays) -> Reply:
        """Report the workers that live, and the counts of updates."""
        with self._changed:
            workers = sorted(each.task for each in self._workers.values())
            dropped = 0 if self._aggregation is None else self._aggregation.dropped
            return {"workers": workers, "stores": self._stores.counts(), "dropped": dropped}, ()

    # --- fit ---

    def _begin(self, _: str, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Begin a call of `fit`; the chief does, and the others wait for that.

        After a restart of this server, a worker that was in the call begins it again with the sums
        of the epochs that it knows.
        """
        number = fields["fit"]
        given = FitSpec.of_json(fields["spec"])
        with self._changed:
            if number not in self._fits and (fields["is_chief"] or fields["again"]):
                self._fits[number] = Fit(given, fields["workers"], self._aggregation)
                self._changed.notify_all()
            if not self._changed.wait_for(lambda: number in self._fits, WAIT_SECONDS):
                return {"wait": True}, ()
            fit = self._fits[number]
            if fit.is_restored and fit.spec != given:  # of a job before, with other arguments
                fit = self._fits[number] = Fit(given, fields["workers"], self._aggregation)
        if fit.spec != given:
            raise MismatchError(
                f"[parameter server] fit on {fields['task']} has {given}, but the chief "
                f"{fit.spec}; "
                "pass the same arguments on all workers"
            )
        rest, known = iter(arrays), []
        for each in fields["known"]:
            count = sum(len(each[phase]) + 1 for phase in (TRAIN, VALIDATE) if phase in each)
            known.append((each, [next(rest) for _ in range(count)]))
        fit.learn(known)
        return {"epoch": fit.epoch}, ()

    def _next(self, caller: str, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Report what a worker has done, and return what it does next."""
        fit = self._fits.get(fields["fit"])
        if fit is None or caller not in self._workers:
            return {"unknown": True}, ()
        done, before = fields.get("done"), fit.epoch
        if done is not None:
            fit.finish(caller, done["part"], done["epoch"], done["names"], arrays)
        given = {"is_chief": fields["is_chief"], "stops": fields["stops"]}
        answer = fit.next(caller, fields["seen"], timeout=0.0, **given)
        if answer.what != TRAIN:  # others do not wait for its steps
            self._clocks.rest(caller)
        if answer.what == "wait":
            answer = fit.next(caller, fields["seen"], timeout=WAIT_SECONDS, **given)
        if fit.epoch > before:
            self._save_progress()
        return {"what": answer.what, **answer.fields}, answer.arrays

    # --- synchronous updates of loops of the program's own ---

    def _newest(self, _: str, fields: Mapping[str, Any], __: Arrays) -> Reply:
        """Wait until a synchronous update is over; returns the number of the next one."""
        with self._changed:
            syncs = self._aggregation
            if syncs is None:
                return {"unknown": True}, ()
            over = self._changed.wait_for(lambda: syncs.update > fields["update"], WAIT_SECONDS)
            return {"wait": not over, "update": syncs.update, "after": syncs.latest}, ()

    def _offer(self, caller: str, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Ask whether a synchronous update takes a gradient."""
        with self._changed:
            syncs = self._aggregation
            if syncs is None or caller not in self._workers:
                return {"unknown": True}, ()
            self._offers += 1
            syncs.begin(syncs.size)
            taken = syncs.claim(caller, -self._offers, fields["update"])
            return {"taken": taken, "share": -self._offers, "of": syncs.needed}, ()

    def _deliver(self, _: str, fields: Mapping[str, Any], __: Arrays) -> Reply:
        """Note that all servers have a gradient that was taken."""
        with self._changed:
            if self._aggregation is not None and self._aggregation.finish(fields["share"]):
                self._changed.notify_all()
            return {}, ()

    def _tick(self, caller: str, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Count an asynchronous step; wait while the worker is more than so many steps ahead."""
        with self._changed:
            if not fields["again"] and caller in self._workers:
                self._clocks.tick(caller)
        return {"ahead": not self._clocks.wait(caller, fields["most"], WAIT_SECONDS)}, ()

    def _claim(self, caller: str, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Ask whether a synchronous update takes a gradient."""
        fit = self._fits.get(fields["fit"])
        if fit is None:
            return {"unknown": True}, ()
        return {"taken": fit.claim(caller, fields["part"], fields["update"])}, ()


_METHODS: Mapping[str, Callable[[ParameterService, str, Mapping[str, Any], Arrays], Reply]] = {
    "join": ParameterService._join,
    "status": ParameterService._status,
    "begin": ParameterService._begin,
    "next": ParameterService._next,
    "newest": ParameterService._newest,
    "offer": ParameterService._offer,
    "deliver": ParameterService._deliver,
    "tick": ParameterService._tick,
    "claim": ParameterService._claim,
}
