"""Record a few training steps of all ranks as a timeline, and draw one of them.

    mpirun -n 2 python benchmarks/timeline.py    # build/bench/timeline.json and .png

The network is benchmarks/training.py's: MLP 784-1024-1024-10, batch 128 per replica, Adam. The
JSON file opens in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import allreduce as ar

_OUT = Path(__file__).resolve().parent.parent / "build" / "bench" / "timeline"
_ROWS = 128  # of a replica's batch
_STEPS = 12
_COLORS = {
    "product": "#2563eb",
    "gradients' reduction": "#ea580c",
    "reduction and update in slices": "#9333ea",
    "wait for these": "#dc2626",
    "update": "#16a34a",
    "other": "#94a3b8",
}
_PALE = 0.3  # the opacity of collectives before the replica waits for them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=_OUT, help="without suffix")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = ar.nn.Sequential(
            [
                ar.nn.Input((784,)),
                ar.nn.Dense(1024, activation="relu"),
                ar.nn.Dense(1024, activation="relu"),
                ar.nn.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy")
    rows = _STEPS * _ROWS * strategy.num_replicas_in_sync
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 784)).astype(np.float32)
    y = generator.integers(0, 10, rows)
    batch = _ROWS * strategy.num_replicas_in_sync
    model.fit(x, y, batch_size=batch, verbose=0)  # traces
    with ar.observe.timeline(out.with_suffix(".json")):
        model.fit(x, y, batch_size=batch, verbose=0)
    if strategy.communicator.rank == 0:
        draw(out.with_suffix(".json"), out.with_suffix(".png"))
        print(f"wrote {out.with_suffix('.json')} and {out.with_suffix('.png')}")


def draw(recorded: Path, picture: Path) -> None:
    """Draw a median step of a timeline: a bar per instruction, a lane per stream.

    A collective is pale until the replica waits for it: its progress until then is unknown, and in
    shared memory there is none.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    lanes = _lanes(recorded)
    step = _median_step(lanes)
    figure, axes = plt.subplots(figsize=(12, 0.7 * len(lanes) + 1.6))
    first = min(each["ts"] for spans in lanes.values() for each in spans if _of(each, step))
    for place, (_, spans) in enumerate(sorted(lanes.items(), reverse=True)):
        for each in spans:
            if _of(each, step):
                start, end = ((each["ts"] + after - first) / 1e3 for after in (0, each["dur"]))
                bar = partial(axes.barh, place, color=_COLORS[_kind(each["name"])], lw=0.3)
                exposed = each["args"].get("exposed")  # in seconds; only collectives have it
                awaited = start if exposed is None else end - exposed * 1e3
                bar(awaited - start, left=start, alpha=_PALE)
                bar(end - awaited, left=awaited, edgecolor="white")
    axes.set_yticks(range(len(lanes)), sorted(lanes, reverse=True))
    axes.set(xlabel="ms", title="One training step, as ar.observe.timeline has recorded it")
    handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
    handles.append(Patch(color="black", alpha=_PALE, label="pale: started, not awaited yet"))
    axes.legend(handles=handles, ncols=4, fontsize="small", loc="upper center")
    axes.set_ylim(-0.6, len(lanes) + 0.4)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def _lanes(recorded: Path) -> dict[str, list[dict[str, Any]]]:
    events = json.loads(recorded.read_text())["traceEvents"]
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["name"] == "thread_name"
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for each in events:
        name = names[each["pid"], each["tid"]]
        if each["ph"] == "X" and name.startswith("replica "):
            found.setdefault(name, []).append(each)
    return found


def _median_step(lanes: dict[str, list[dict[str, Any]]]) -> int:
    """Choose the step whose compute lane on the first replica is of median length."""
    spans = lanes["replica 0 CPU:0 compute"]
    lengths: dict[int, float] = {}
    for step in {each["args"]["step"] for each in spans}:
        own = [each for each in spans if _of(each, step)]
        lengths[step] = max(e["ts"] + e["dur"] for e in own) - min(e["ts"] for e in own)
    return sorted(lengths, key=lambda step: lengths[step])[len(lengths) // 2]


def _of(span: dict[str, Any], step: int) -> bool:
    return bool(span["args"].get("step") == step)


def _kind(name: str) -> str:
    if name.startswith("wait for"):
        return "wait for these"
    if name == "all_reduce_bucket":
        return "gradients' reduction"
    if name == "update_slices":
        return "reduction and update in slices"
    if name == "update_bucket":
        return "update"
    return "product" if name.startswith("matmul") else "other"


if __name__ == "__main__":
    main()
