"""The graph of a step as people see it: grouped, printed and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import allreduce as ar
from allreduce.errors import UsageError
from allreduce.graph.core.spec import BATCH, Spec
from allreduce.graph.inspect import drawing
from allreduce.graph.inspect.sections import amount, sections
from allreduce.graph.inspect.step_graph import StepGraph


class Block(ar.nn.Model):
    """Attention, and a dense layer on another device."""

    def __init__(self) -> None:
        super().__init__(name="block")
        self.attention = ar.nn.MultiHeadAttention(2, 4)
        self.norm = ar.nn.LayerNorm()
        with ar.device("CPU:1"):
            self.head = ar.nn.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.head(ar.ops.mean(self.norm(inputs + self.attention(inputs)), axis=1))


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    strategy = ar.MirroredStrategy(devices_per_replica=2)
    with strategy.scope():
        model, optimizer = Block(), ar.optim.Adam(0.1)

        @ar.function
        def step(x: ar.Tensor, y: ar.Tensor) -> ar.Tensor:
            loss = ar.nn.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
            optimizer.minimize(loss, model.trainable_variables)
            return loss

        batch = np.zeros((8, 5, 8), np.float32), np.zeros(8, np.int64)
        (parts,) = strategy.distribute_dataset([batch])
        found = step.graph(*parts)
        assert optimizer.iterations == 0, "nothing ran"
        strategy.run(step, args=parts)
        assert len(next(iter(strategy._programs._functions.values())).by_signature) == 1
    strategy.close()
    return found


def test_layers_and_their_gradients_are_sections_of_their_device(graph: StepGraph) -> None:
    found = sections(graph._graph)
    by_name = {(each.name, each.kind): each for each in found.all}
    rows = [name for name, kind in by_name if kind == 0]
    last = "after block/head"
    assert [name for name in rows if "/" not in name or name == last] == ["inputs", "block", last]
    assert rows[1] == "block/attention/query"
    assert [each.index for each in found.devices] == [0, 1]
    for name in ("block/attention/query", "block/head"):
        forward, gradient = by_name[name, 0], by_name[name, 1]
        assert forward.device == gradient.device
        assert any(op.startswith("matmul") for op in forward.ops)
        assert any(op.startswith("matmul") for op in gradient.ops)
    buckets = [each for each in found.all if each.kind == 2]
    assert [each.device.index for each in buckets] == [0, 1]
    assert all({"all-reduce", "update"} <= set(each.ops) for each in buckets)
    assert "2 variables" in buckets[1].notes[0]


class Recurrent(ar.nn.Model):
    """A layer in the steps of a scan."""

    def __init__(self) -> None:
        super().__init__(name="recurrent")
        self.cell = ar.nn.Dense(3, "tanh")

    def call(self, x: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            return self.cell(ar.ops.concatenate([x, h], axis=-1)), None

        start = ar.ops.zeros((x.shape[0], 3), x.dtype)
        return ar.scan(step, start, ar.ops.transpose(x, (1, 0, 2)))[0]


def test_layers_in_a_scan_are_sections_with_what_they_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Recurrent()

    @ar.function
    def step(x: ar.Tensor) -> Any:
        return ar.gradients(ar.ops.sum(model(x)), model.trainable_variables)

    found = step.graph(np.zeros((2, 4, 5), np.float32))
    seen = sections(found._graph)
    by_name = {(each.name, each.kind): each for each in seen.all}
    for kind in (0, 1):
        assert (by_name["recurrent/cell", kind], by_name["recurrent", kind]) in seen.edges
    assert "tanh" in by_name["recurrent/cell", 0].does
    assert "matmul" in by_name["recurrent/cell", 1].does
    assert "scan" in by_name["recurrent", 0].ops
    assert "concatenate" in by_name["recurrent", 0].ops
    found.summary()
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("  recurrent/cell ")]
    assert "tanh" in line


def test_a_transfer_is_there_once_for_all_its_readers(graph: StepGraph) -> None:
    found = sections(graph._graph)
    forward = [each for each in found.transfers if each.source.kind == 0]
    (forth,) = [each for each in forward if each.source.name == "block"]
    assert {reader.kind for reader in forth.readers} == {0, 1}, "the layer and its gradient"
    assert amount(forth.spec) == "32 B × batch"
    assert amount(Spec((BATCH * 2, 3), np.dtype(np.float64))) == "48 B × batch"
    assert amount(Spec((600, 1000), np.dtype(np.float32))) == "2.29 MiB"
    assert all(a.device == b.device for a, b in found.edges)


def test_the_summary_lists_devices_and_transfers(
    graph: StepGraph, capsys: pytest.CaptureFixture[str]
) -> None:
    graph.summary()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "CPU:0"
    assert lines.index("CPU:1") < lines.index(
        next(line for line in lines if line.startswith("  block/head"))
    )
    assert "CPU:0 -> CPU:1: float32(batch, 8), 32 B × batch of block" in lines
    assert any("gradient of block/head" in line and "matmul" in line for line in lines)


def test_the_picture_has_every_section_inside_of_its_devices_column(
    graph: StepGraph, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"call the file .svg, not '.*step.png'"):
        graph.draw(tmp_path / "step.png")
    for path, said in ((3, "to a file; name one, not 3"), ("no/x.svg", "there is no folder no")):
        with pytest.raises(UsageError, match=said):
            graph.draw(path)  # type: ignore[arg-type]
    graph.draw(tmp_path / "step.svg")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    drawn = [
        (group.findtext(f"{space}title", ""), group.find(f"{space}rect"))
        for group in root.iter(f"{space}g")
    ]
    expected = sections(graph._graph)
    assert len(drawn) == len(expected.all)
    places = set()
    for _, box in drawn:
        assert box is not None
        x, y = float(box.get("x", -1)), float(box.get("y", -1))
        assert 0 < x < float(root.get("width", 0)) - 190
        assert 0 < y < float(root.get("height", 0)) - 62
        places.add((x, y))
    assert len(places) == len(drawn), "no two in one place"
    for group in root.iter(f"{space}g"):
        for text in group.iter(f"{space}text"):
            kind, words = text.get("class", ""), text.text or ""
            assert drawing.extent(words, kind) <= drawing.WIDTH - 2 * drawing.PADDING
    dashed = [each for each in root.iter(f"{space}path") if each.get("stroke-dasharray")]
    ends = {(id(each.source), id(each.readers[0])) for each in expected.transfers}
    assert len(dashed) == len(ends) + 1, "and one in the legend"


def test_the_graph_of_a_function_is_asked_for_outside_of_steps() -> None:
    double = ar.function(lambda x: x * 2)
    assert "multiply" in str(double.graph(np.ones(3)))
    with pytest.raises(UsageError, match="graph was called inside a step"):
        ar.function(lambda x: double.graph(x))(np.ones(3))
