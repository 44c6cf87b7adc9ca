"""The methods of a parameter server that workers call: one dispatch, without a network.

Every `ps` task has a service, with one `TrainingJob` at a time, which has parts of variables
(`Stores`) and knows the workers. That of task 0 also deals out rows (`Fit`), and decides what a
synchronous update takes (`Aggregation`).
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
from allreduce.parameters.dealing import TRAIN, VALIDATE, Fit
from allreduce.parameters.row_ranges import FitSpec
from allreduce.parameters.stores import WAIT_SECONDS, Arrays, Reply, Stores


@dataclass(slots=True)
class _Worker:
    """A worker that lives.

    Attributes:
        task: Its name, such as "worker:1".
        is_chief: Whether it is the chief.
        process: Its host and process, for messages.
        fit: The number of the call of `fit` that it has begun; -1 for none.
    """

    task: str
    is_chief: bool
    process: str
    fit: int = -1


class ParameterService:
    """Answers the calls of one job's workers after the other's.

    A job is over when all workers of its cluster have ended without an error, or when a new chief
    comes after the chief has, and no other worker lives. What it has left is forgotten then; with
    checkpoints, it is written first.
    """

    def __init__(self) -> None:
        self._job = TrainingJob()
        self._changing = threading.Lock()

    def call(self, caller: str, method: str, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Run one method; see `TrainingJob.call`."""
        if method == "enter":
            with self._changing:
                if self._job.is_over(fields):
                    self._job.end()
                    self._job = TrainingJob()
        return self._job.call(caller, method, fields, arrays)

    def lose(self, caller: str, *, has_left: bool) -> None:
        """Note that a worker's connection has ended; see `TrainingJob.lose`."""
        self._job.lose(caller, has_left=has_left)

    def close(self) -> None:
        """Write what no checkpoint has yet; blocks until it is written."""
        self._job.close()


class TrainingJob:
    """Answers the calls of one job's workers; safe to use from several threads.

    Every method takes the caller's name, small plain arguments and arrays, and returns plain
    results and arrays. The result {"unknown": True} says that this server does not have what the
    call is about, as it has restarted: the worker then sends what is missing, and calls again.
    """

    def __init__(self) -> None:
        self._stores = Stores(self._save_progress)
        self._workers: dict[str, _Worker] = {}
        self._gone: set[str] = set()  # tasks that have died or ended
        self._ended: set[str] = set()  # those of them whose program has ended without an error
        self._size = 0  # the number of workers in the cluster
        self._fits: dict[int, Fit] = {}
        self._seed: int | None = None
        self._settings: dict[str, Any] | None = None
        self._cluster: str | None = None  # a checksum of it
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

    def lose(self, caller: str, *, has_left: bool = False) -> None:
        """Note that a worker's connection has ended: others get its rows.

        Args:
            caller: The connection's name.
            has_left: Whether the worker's program has ended without an error.
        """
        with self._changed:
            worker = self._workers.pop(caller, None)
            fits = list(self._fits.values())
            if worker is None:
                return
            self._gone.add(worker.task)
            if has_left:
                self._ended.add(worker.task)
            if self._aggregation is not None:
                self._aggregation.lose(caller)
            self._changed.notify_all()
        self._clocks.rest(caller)
        parts = sum(fit.lose(caller, is_chief=worker.is_chief) for fit in fits)
        logger.info(
            "[parameter server] %s has %s%s",
            *(worker.task, "left" if has_left else "gone"),
            f"; others get {counted(parts, 'part')} of its rows" if parts else "",
        )
        with self._changed:
            progress = self._progress if self._all_have_ended() else None
        if progress is not None:  # the next job begins anew
            path, writer = progress
            writer.wait()
            checkpoint.remove(path)

    def close(self) -> None:
        """Write what no checkpoint has yet; blocks until it is written."""
        self._stores.close()
        self._save_progress(blocks=True)

    def end(self) -> None:
        """Write stores for the next job, which begins its own calls of `fit`."""
        self._stores.close()

    def is_over(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the job was over before the worker with these fields came."""
        with self._changed:
            is_new_chief = fields["is_chief"] and fields["task"] in self._ended
            return self._all_have_ended() or (is_new_chief and not self._workers)

    def _all_have_ended(self) -> bool:
        return len(self._ended) == self._size > 0 and not self._workers

    # --- membership ---

    def _enter(self, caller: str, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Let a worker in, after each new connection of it.

        Another process of the same task is waited for: it may be one that has died.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._others(fields), WAIT_SECONDS):
                return {"other": self._others(fields)[0]}, ()
            self._size = fields["workers"]
            self._gone.discard(fields["task"])
            self._ended.discard(fields["task"])
            self._workers[caller] = _Worker(fields["task"], fields["is_chief"], fields["process"])
            self._changed.notify_all()
        return {}, ()

    def _others(self, fields: Mapping[str, Any]) -> list[str]:
        """List other processes that are a worker's task."""
        task, process = fields["task"], fields["process"]
        same = [each.process for each in self._workers.values() if each.task == task]
        return [each for each in same if each != process]

    def _join(self, _: str, fields: Mapping[str, Any], __: Arrays) -> Reply:
        """Compare a worker's settings and seed: all have those of the first one."""
        settings = fields["settings"]
        with self._changed:
            if self._settings is None:
                self._settings, self._cluster = settings, fields["cluster"]
                if settings["update"] == "sync":
                    sizes = settings["replicas_to_aggregate"], settings["total_replicas"]
                    # Higher than before a restart: other servers know the earlier numbers.
                    self._aggregation = Aggregation(*sizes, first=time.time_ns() // 1_000_000)
                self._restore(fields)
            if fields["cluster"] != self._cluster:
                raise MismatchError(
                    f"[parameter server] {fields['task']} has another cluster than the worker that "
                    "came first; give all tasks the same cluster"
                )
            different = [n for n, value in settings.items() if self._settings.get(n) != value]
            if different:
                name = different[0]
                alone = len(self._workers) == 1
                before = ", or restart the servers if that was in a job before" if alone else ""
                raise MismatchError(
                    f"[parameter server] {fields['task']}: ParameterServerStrategy has {name}="
                    f"{settings[name]!r} here but {self._settings.get(name)!r} on the worker that "
                    f"came first; pass the same arguments on all workers{before}"
                )
            if self._seed is None:
                self._seed = fields["seed"]
            elif fields["seed_is_set"] and self._seed != fields["seed"]:
                raise MismatchError(
                    f"[parameter server] {fields['task']} has seed {fields['seed']}, but others "
                    f"have {self._seed}; call ar.set_seed with one number on all workers"
                )
            return {"seed": self._seed}, ()

    def _restore(self, fields: Mapping[str, Any]) -> None:
        """Read the progress of the calls of `fit` in this job, if this task has restarted."""
        folder = fields["settings"].get("checkpoint")
        if folder is None:
            return
        path = Path(folder) / f"{fields['cluster']}-progress.safetensors"
        self._progress = path, Writer()
        found = checkpoint.read(path) if path.exists() else None
        if found is None:
            return
        arrays, fits = [found.arrays[name] for name in sorted(found.arrays)], dict[int, Fit]()
        for number, (state, count) in found.described.items():
            own, arrays = arrays[:count], arrays[count:]
            fits[int(number)] = Fit.restored(state, own, self._aggregation)
        under_way = [fit for fit in fits.values() if not fit.is_over]
        if not under_way:  # of a job before, which has ended
            return
        self._fits = fits
        epoch = under_way[0].epoch + 1
        logger.warning("[parameter server] fit goes on in epoch %d, of %s", epoch, path)

    def _save_progress(self, *, blocks: bool = False) -> None:
        """Write the progress of all calls of `fit`; the next job does not need it."""
        if self._progress is None or self._all_have_ended():
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

        if blocks:
            writer.write(path, contents)
        else:
            writer.start(path, contents)

    def _status(self, _: str, __: Mapping[str, Any], ___: Arrays) -> Reply:
        """Report the workers that live, and the counts of updates."""
        with self._changed:
            workers = sorted(each.task for each in self._workers.values())
            dropped = 0 if self._aggregation is None else self._aggregation.dropped
            return {"workers": workers, "stores": self._stores.counts(), "dropped": dropped}, ()

    # --- fit ---

    def _begin(self, caller: str, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
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
        for name, value in given.as_json().items():
            if (its := fit.spec.as_json()[name]) != value:
                raise MismatchError(
                    f"[parameter server] fit on {fields['task']} has {name}={value}, but on the "
                    f"chief {name}={its}; pass the same arguments on all workers"
                )
        rest, known = iter(arrays), []
        for each in fields["known"]:
            count = sum(len(each[phase]) + 1 for phase in (TRAIN, VALIDATE) if phase in each)
            known.append((each, [next(rest) for _ in range(count)]))
        fit.learn(known)
        with self._changed:
            if caller in self._workers:
                self._workers[caller].fit = number
        return {"epoch": fit.epoch}, ()

    def _next(self, caller: str, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Report what a worker has done, and return what it does next."""
        fit, worker = self._fits.get(fields["fit"]), self._workers.get(caller)
        if fit is None or worker is None or worker.fit != fields["fit"]:
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
        """Return the number of the update under way; wait while a worker has given its part of it.

        The other workers give the parts of those that have died or ended.
        """
        with self._changed:
            syncs = self._aggregation
            assert syncs is not None, "each connection has joined, with synchronous updates"
            may_give = self._changed.wait_for(
                lambda: syncs.update > fields["update"] or fields["given"] < self._share_of(syncs),
                WAIT_SECONDS,
            )
            return {"wait": not may_give, "update": syncs.update}, ()

    def _share_of(self, syncs: Aggregation) -> int:
        """Return how many gradients each worker that is there gives to an update at most."""
        return -(-syncs.total // max(1, self._size - len(self._gone)))

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


_METHODS: Mapping[str, Callable[[TrainingJob, str, Mapping[str, Any], Arrays], Reply]] = {
    "enter": TrainingJob._enter,
    "join": TrainingJob._join,
    "status": TrainingJob._status,
    "begin": TrainingJob._begin,
    "next": TrainingJob._next,
    "newest": TrainingJob._newest,
    "offer": TrainingJob._offer,
    "deliver": TrainingJob._deliver,
    "tick": TrainingJob._tick,
    "claim": TrainingJob._claim,
}
