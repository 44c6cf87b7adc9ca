"""`TensorBoard`: logs, histograms of weights and the graph as TensorBoard's files."""

from __future__ import annotations

import errno
import os
import time
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from allreduce.callbacks.base import Callback, Logs, path_text
from allreduce.devices.integers import integer, switch
from allreduce.errors import UnsupportedError, UsageError

_BINS = 30  # of a histogram, as Keras has
_ELSEWHERE = {  # Keras's other arguments
    "embeddings_freq": "save weights with model.save_weights, and load them in the projector",
    "embeddings_metadata": "save weights with model.save_weights, and load them in the projector",
    "profile_batch": "with ar.observe.timeline(path) records the steps of a block",
    "write_images": "histogram_freq= writes the weights' histograms",
    "write_steps_per_second": "fit(verbose=1) shows samples per second",
}


class TensorBoard(Callback):
    """Writes what TensorBoard shows, on rank 0, with its own writer (extra `tensorboard`).

    Each epoch's values are called `epoch_loss` and so on, under `train` and `validation`.

    Args:
        log_dir: The folder.
        histogram_freq: After how many epochs to write histograms of the variables; 0 for never.
        write_graph: Whether to write the graph of the training step, after the first epoch.
        update_freq: "epoch"; "batch" or a number of batches to write `batch_loss` and so on, too.

    Raises:
        UsageError: An argument is none of these.
        UnsupportedError: TensorBoard is not installed.
    """

    _elsewhere = _ELSEWHERE

    def __init__(
        self,
        log_dir: str | PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        update_freq: str | int = "epoch",
    ) -> None:
        each = 1 if update_freq == "batch" else update_freq
        if each != "epoch" and (not isinstance(each, int) or isinstance(each, bool) or each < 1):
            raise UsageError(
                f'TensorBoard takes update_freq "epoch", "batch" or a number, not {update_freq!r}'
            )
        self._folder = Path(path_text("TensorBoard", "log_dir", log_dir))
        self._histogram_freq = integer("histogram_freq of TensorBoard", histogram_freq, 0)
        self._write_graph = switch("write_graph of TensorBoard", write_graph)
        self._every, self._batches = each, 0
        self._writers: dict[str, Any] = {}
        _proto()
        if each != "epoch":  # else every batch would cost an exchange
            self.on_train_batch_end = self._after_batch  # type: ignore[method-assign]

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        if self.rank:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise UsageError(
                f"TensorBoard cannot write into the folder {self._folder}: {error.strerror}; pass "
                "another log_dir"
            ) from None

    def _after_batch(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002
        if self._batches % int(self._every) == 0:
            self._scalars("train", "batch", logs or {}, self._batches)
        self._batches += 1

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.rank:
            return
        logs = logs or {}
        of_validation = {key[4:]: value for key, value in logs.items() if key.startswith("val_")}
        of_training = {key: value for key, value in logs.items() if not key.startswith("val_")}
        of_training.setdefault("learning_rate", float(self.model.optimizer.learning_rate))
        self._scalars("train", "epoch", of_training, epoch)
        self._scalars("validation", "epoch", of_validation, epoch)
        if self._histogram_freq and epoch % self._histogram_freq == 0:
            self._histograms(epoch)
        if self._write_graph:
            self._write_graph = False
            self._graph()

    def on_train_end(self, logs: Logs | None = None) -> None:  # noqa: ARG002
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _add(self, run: str, step: int = 0, **event: Any) -> None:
        writer_of, protos = _proto()
        if run not in self._writers:
            self._writers[run] = writer_of(str(self._folder / run))
        self._writers[run].add_event(protos.Event(wall_time=time.time(), step=step, **event))

    def _scalars(self, run: str, prefix: str, logs: Logs, step: int) -> None:
        if self.rank:
            return
        from tensorboard.compat.proto import summary_pb2

        values = [
            summary_pb2.Summary.Value(tag=f"{prefix}_{name}", simple_value=float(value))
            for name, value in logs.items()
            if np.ndim(value) == 0
        ]
        if values:
            self._add(run, step, summary=summary_pb2.Summary(value=values))

    def _histograms(self, epoch: int) -> None:
        from tensorboard.compat.proto import summary_pb2

        values = []
        for path, variable in self.model.named_variables().items():
            numbers = variable.numpy().astype(np.float64).reshape(-1)
            counts, edges = np.histogram(numbers, bins=_BINS)
            found = summary_pb2.HistogramProto(
                min=numbers.min(),
                max=numbers.max(),
                num=numbers.size,
                sum=numbers.sum(),
                sum_squares=np.square(numbers).sum(),
                bucket_limit=edges[1:],
                bucket=counts,
            )
            values.append(summary_pb2.Summary.Value(tag=path, histo=found))
        self._add("train", epoch, summary=summary_pb2.Summary(value=values))

    def _graph(self) -> None:
        """Write the nodes of the training step, grouped by layer."""
        from tensorboard.compat.proto import graph_pb2, node_def_pb2

        compiled = self.model.replicator.latest(self.model.train_function)
        if compiled is None:  # it runs op by op
            return
        nodes = compiled.graph.nodes
        names = [f"{node.part}/{node.op}_{node.id}".lstrip("/") for node in nodes]
        drawn = [
            node_def_pb2.NodeDef(name=name, op=node.op, input=[names[i] for i in node.inputs])
            for name, node in zip(names, nodes, strict=True)
        ]
        self._add("train", graph_def=graph_pb2.GraphDef(node=drawn).SerializeToString())


def _proto() -> tuple[Any, Any]:
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise UnsupportedError(
            'the TensorBoard callback needs TensorBoard: pip install "allreduce[tensorboard]"'
        ) from None
    return EventFileWriter, event_pb2
