"""The methods of every parameter server: its parts of arenas and tables, and their checkpoints."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.errors import MismatchError, UsageError
from allreduce.events import logger
from allreduce.optim import registry
from allreduce.parameters import checkpoint
from allreduce.parameters.arena_store import ArenaStore
from allreduce.parameters.checkpoint import Contents, Writer
from allreduce.parameters.partition import Part
from allreduce.parameters.table_store import TableStore

Arrays = Sequence[np.ndarray]
Reply = tuple[dict[str, Any], Arrays]

WAIT_SECONDS = 1.0  # that a call may wait for something, before the worker asks again


class Stores:
    """What one server holds; safe to use from several threads.

    Every method takes small plain arguments and arrays, and returns plain results and arrays. The
    result {"unknown": True} says that this server does not have the store or its optimizer, as it
    has restarted.

    Args:
        saved: Called when a store begins to write a checkpoint.
    """

    def __init__(self, saved: Callable[[], None]) -> None:
        self._saved = saved
        self._stores: dict[str, ArenaStore] = {}
        self._writers: dict[str, Writer] = {}
        self._files: dict[str, Path] = {}
        self._making = threading.Lock()

    def call(self, method: str, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Run one method.

        Raises:
            UsageError: There is no such method.
        """
        found = _METHODS.get(method)
        if found is None:
            raise UsageError(f"[parameter server] there is no method {method!r}")
        return found(self, fields, arrays)

    def counts(self) -> dict[str, Any]:
        """Return the number of updates and the staleness of gradients, by store."""
        return {
            key: {"updates": store.version, "staleness": sorted(store.staleness.items())}
            for key, store in list(self._stores.items())
        }

    def _register(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Make a store, or find it; with arrays, give values to one that has none.

        With "newest", values that are newer than those of the checkpoint count, too.
        """
        key, part = fields["store"], Part.of_json(fields["part"])
        with self._making:
            store = self._stores.get(key)
            if store is None:
                text = fields["optimizer"]
                optimizer = None if text is None else registry.deserialize(json.loads(text), {})
                store = ArenaStore(part, optimizer, fields["dtype"], fields["servers"])
                self._stores[key] = store
                self._load(store, fields)
            elif store.part != part:
                raise MismatchError(
                    f"[parameter server] {fields['task']} describes other variables than the "
                    "worker that came first; make the same model on all workers"
                )
            is_newer = fields["newest"] and fields["version"] > store.version
            takes = bool(arrays) and (is_newer or not store.has_values)
            if takes:
                parameters, *slots = arrays
                slots_of = ", and slots of its checkpoint" if store.restored else ""
                store.set(
                    parameters, dict(zip(fields["slots"], slots, strict=True)), fields["version"]
                )
                store.source = f"the values of {fields['task']}{slots_of}"
        ready = store.initialised(WAIT_SECONDS)
        return {
            "ready": ready,
            "version": store.version,
            "taken": takes,
            "source": store.source,
            "restored": store.restored,
        }, ()

    def _known(self, fields: Mapping[str, Any]) -> ArenaStore | None:
        """Return a store; None if it has no values, or older ones than the caller has seen.

        These are a checkpoint's, after a restart that the caller has not noticed yet.
        """
        store = self._stores.get(fields["store"])
        is_known = (
            store is not None and store.has_values and fields.get("seen", -1) <= store.version
        )
        return store if is_known else None

    def _push(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Update with gradients at once; returns the new parameters."""
        store = self._known(fields)
        if store is None:
            return {"unknown": True}, ()
        (gradients,) = arrays
        stale = store.push(
            gradients, fields["count"], fields["seen"], fields["worker"], fields["number"]
        )
        self._save(fields["store"], store)
        return {"version": store.version, "stale": stale}, (store.parameters,)

    def _contribute(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Add a share to a synchronous update."""
        store = self._known(fields)
        if store is None:
            return {"unknown": True}, ()
        store.contribute(
            arrays[0], fields["count"], fields["update"], fields["share"], fields["of"]
        )
        self._save(fields["store"], store)
        return {}, ()

    def _pull(self, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Return the parameters, if they are newer."""
        store = self._known(fields)
        if store is None:
            return {"unknown": True}, ()
        version = store.version  # before the values, which may be newer
        newer = version != fields["seen"]
        return {"version": version}, (store.parameters,) if newer else ()

    def _configure(self, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Change the optimizer's settings."""
        store = self._known(fields)
        if store is None:
            return {"unknown": True}, ()
        if fields["if_missing"] and store.is_configured:
            return {}, ()
        store.configure(registry.deserialize(json.loads(fields["optimizer"]), {}))
        return {}, ()

    def _assign(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Set the parameters."""
        store = self._known(fields)
        if store is None:
            return {"unknown": True}, ()
        store.assign(arrays[0])
        self._save(fields["store"], store)
        return {"version": store.version}, ()

    def _slots(self, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Return copies of the slots."""
        store = self._known(fields)
        if store is None:
            return {"unknown": True}, ()
        found, version = store.snapshot()
        names = [name for name in found if name != "parameters"]
        return {"names": names, "version": version}, [found[name] for name in names]

    # --- tables ---

    def _register_table(self, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Make the rows of a table, or find them; one worker is asked to fill new ones."""
        key = fields["store"]
        with self._making:
            store = self._stores.get(key)
            if store is None:
                rows = (fields["name"], fields["first"], fields["stop"])
                store = self._stores[key] = TableStore(*rows, fields["width"], fields["dtype"])
                self._load(store, fields)
            store.has_values |= not store.part.size
        asked = fields["fills"] and not store.has_values
        ready = store.initialised(0.0 if asked else WAIT_SECONDS)
        reply = {"version": store.version, "source": store.source, "restored": store.restored}
        return {**reply, "ready": ready, "fill": asked and not ready}, ()

    def _fill(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Set the first values of some rows of a table."""
        store = self._stores.get(fields["store"])
        if not isinstance(store, TableStore):
            return {"unknown": True}, ()
        store.fill(fields["row"], arrays[0], last=fields["last"])
        return {}, ()

    def _lookup(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Return rows by their numbers."""
        store = self._known(fields)
        if not isinstance(store, TableStore):
            return {"unknown": True}, ()
        if fields["loses"]:
            store.lose(fields["after"])
        if not store.applied(fields["after"], WAIT_SECONDS):
            return {"wait": True}, ()
        version = store.version
        return {"version": version}, (store.lookup(arrays[0]),)

    def _push_rows(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Update rows at once."""
        store = self._known(fields)
        if not isinstance(store, TableStore) or not store.is_configured:
            return {"unknown": True}, ()
        numbers, gradients = arrays
        given = (fields["count"], fields["seen"], fields["worker"], fields["number"])
        stale = store.push_rows(numbers, gradients, *given)
        self._save(fields["store"], store)
        return {"version": store.version, "stale": stale}, ()

    def _contribute_rows(self, fields: Mapping[str, Any], arrays: Arrays) -> Reply:
        """Add rows to a synchronous update."""
        store = self._known(fields)
        if not isinstance(store, TableStore) or not store.is_configured:
            return {"unknown": True}, ()
        numbers, gradients = arrays
        given = (fields["count"], fields["update"], fields["share"], fields["of"])
        store.contribute_rows(numbers, gradients, *given)
        self._save(fields["store"], store)
        return {}, ()

    # --- checkpoints ---

    def _check_folder(self, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Raise an error if checkpoints cannot be written."""
        checkpoint.check_folder(Path(fields["folder"]), fields["server"])
        return {}, ()

    def _save_now(self, fields: Mapping[str, Any], _: Arrays) -> Reply:
        """Write a checkpoint of a store, if there are updates since the latest one.

        Blocks until it is written, as the server may be ended after that.
        """
        key = fields["store"]
        store, writer = self._known(fields), self._writers.get(key)
        if store is not None and writer is not None:
            writer.wait()
            if store.version > store.saved:
                writer.write(self._files[key], *_writing(store))
                self._saved()
        return {}, ()

    def close(self) -> None:
        """Write checkpoints of all stores that have updates since their latest one."""
        for key in list(self._stores):
            self._save_now({"store": key}, ())

    def _load(self, store: ArenaStore, fields: Mapping[str, Any]) -> None:
        """Read a new store's values from the checkpoint, if there is one."""
        if fields["checkpoint"] is None:
            return
        key, folder = fields["store"], Path(fields["checkpoint"])
        self._files[key] = checkpoint.part_path(folder, key, fields["index"], fields["servers"])
        self._writers[key] = Writer()
        store.every = fields["checkpoint_every"]
        found = checkpoint.read_part(folder, key, store.part)
        if found is None:
            return
        arrays, version = found
        if isinstance(store, TableStore):  # whose optimizer is not known yet
            store.add_slots([name for name in arrays if name != "parameters"])
        slots = {name: array for name, array in arrays.items() if name in store.slots}
        store.set(arrays["parameters"], slots, version)
        store.begun = store.saved = version
        store.source, store.restored = f"its checkpoint in {folder}", True
        logger.warning(
            "[parameter server] %s goes on from update %d, %s",
            *(fields["server"], version, store.source),
        )

    def _save(self, key: str, store: ArenaStore) -> None:
        """Write a store's part, if so many updates have been done since the latest checkpoint."""
        writer = self._writers.get(key)
        if writer is None or not store.is_due:
            return
        if writer.start(self._files[key], *_writing(store)):
            self._saved()


def _writing(store: ArenaStore) -> tuple[Callable[[], Contents], Callable[[], None]]:
    """Return what a `Writer` needs: what copies a store, and what notes that it is written."""

    def contents() -> Contents:
        arrays, store.begun = store.snapshot()
        return checkpoint.describe_part(store.part, arrays, store.begun)

    def written() -> None:  # before another one is begun
        store.saved = store.begun

    return contents, written


_METHODS: Mapping[str, Callable[[Stores, Mapping[str, Any], Arrays], Reply]] = {
    "register": Stores._register,
    "push": Stores._push,
    "contribute": Stores._contribute,
    "pull": Stores._pull,
    "configure": Stores._configure,
    "assign": Stores._assign,
    "slots": Stores._slots,
    "register_table": Stores._register_table,
    "fill": Stores._fill,
    "lookup": Stores._lookup,
    "push_rows": Stores._push_rows,
    "contribute_rows": Stores._contribute_rows,
    "check_folder": Stores._check_folder,
    "save": Stores._save_now,
}
