"""Draw architecture.svg: the packages in the order of imports, and the way of one gradient.

Run it from anywhere: `python docs/images/architecture.py`.
"""

from __future__ import annotations

from pathlib import Path

LEFT, COLUMN, TOP = 380, 112, 70  # pixels: names of packages, one step, the header
WIDTH = LEFT + 10 * COLUMN + 20

# From the top: a package imports only packages below it. The last field is the row's height.
PACKAGES = (
    ("config · run", "settings, launcher", 34),
    ("observe", "timeline, explanation", 34),
    ("strategies", "where replicas run", 84),
    ("server", "a graph over tasks", 34),
    ("nn", "layers, models, losses", 34),
    ("training", "the loop of fit", 34),
    ("callbacks", "between steps of fit", 34),
    ("parameters", "on parameter servers", 34),
    ("optim · data", "optimizers, batches", 84),
    ("graph", "a step as a graph", 84),
    ("reduction", "arenas and buckets", 84),
    ("comm", "collectives, transports", 84),
    ("devices · cluster", "devices, finding ranks", 34),
    ("_native", "C++, from kernels/", 84),
    ("settings · events", "variables, logs", 34),
    ("errors · files · …", "what all packages use", 34),
)
# The package of each step, and two lines of text.
STEPS = (
    ("strategies", "look up", "the program"),
    ("graph", "trace the", "function"),
    ("optim · data", "ask for", "gradients"),
    ("graph", "place nodes", "on devices"),
    ("reduction", "lay out", "the arena"),
    ("graph", "fuse, cut", "buckets"),
    ("graph", "schedule", "on streams"),
    ("graph", "replay", "the program"),
    ("comm", "all-reduce", "the bucket"),
    ("_native", "update the", "parameters"),
)
PHASES = ((1, 1, "each step"), (2, 7, "once per input signature"), (8, 10, "each step"))
# Steps that call native code: the number of the step and the folder it runs.
CALLS = ((8, "kernels/cpu"), (9, "kernels/shm"))

INK, GREY, LINE, PAPER, BAND = "#1f2328", "#59636e", "#d1d9e0", "#ffffff", "#f3f6f9"
BLUE, ORANGE = "#0b5cad", "#a8480b"


def text(x: float, y: float, words: str, size: int = 16, fill: str = INK, extra: str = "") -> str:
    """Give a piece of text; `extra` holds further attributes."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" {extra}>{words}</text>'


def rows() -> tuple[dict[str, float], list[str], float]:
    """Give the top of each package's row, the rows, and the lower end of the last."""
    tops, parts, y = {}, [], float(TOP)
    for index, (name, about, height) in enumerate(PACKAGES):
        tops[name] = y
        fill = BAND if index % 2 else PAPER
        parts.append(
            f'<rect x="10" y="{y:g}" width="{WIDTH - 20}" height="{height}" fill="{fill}"/>'
        )
        middle = y + height / 2 + 6
        parts.append(text(24, middle, name, extra='font-weight="600"'))
        parts.append(text(198, middle, about, 15, GREY))
        y += height
    return tops, parts, y


def center(step: int, tops: dict[str, float]) -> tuple[float, float]:
    """Give the centre of a step's circle."""
    return LEFT + (step - 0.5) * COLUMN, tops[STEPS[step - 1][0]] + 22


def way(tops: dict[str, float]) -> list[str]:
    """Give the arrows from step to step, and the calls into native code."""
    parts = []
    for step in range(1, len(STEPS)):
        (x, y), (to_x, to_y) = center(step, tops), center(step + 1, tops)
        bend = LEFT + step * COLUMN
        path = f"M{x + 16:g} {y:g}H{bend:g}V{to_y:g}H{to_x - 19:g}"
        parts.append(
            f'<path d="{path}" fill="none" stroke="{BLUE}" stroke-width="2.5" '
            'stroke-linejoin="round" marker-end="url(#tip)"/>'
        )
    for step, folder in CALLS:
        x, y = center(step, tops)
        end = tops["_native"] + 20
        parts.append(
            f'<path d="M{x:g} {y + 60:g}V{end:g}" fill="none" stroke="{ORANGE}" '
            'stroke-width="2" stroke-dasharray="3 4" marker-end="url(#end)"/>'
        )
        parts.append(text(x, end + 26, folder, 15, ORANGE, 'text-anchor="middle"'))
    return parts


def steps(tops: dict[str, float]) -> list[str]:
    """Give the numbered circles with what happens there."""
    parts = []
    for step, (_, first, second) in enumerate(STEPS, 1):
        x, y = center(step, tops)
        parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="16" fill="{BLUE}"/>')
        parts.append(
            text(x, y + 6, str(step), 16, "#fff", 'text-anchor="middle" font-weight="700"')
        )
        parts.append(text(x, y + 35, first, 15, INK, 'text-anchor="middle"'))
        parts.append(text(x, y + 52, second, 15, INK, 'text-anchor="middle"'))
    return parts


def phases() -> list[str]:
    """Give the header: what happens once, and what in each step."""
    parts = [text(24, 40, "imports only", 15, GREY), text(24, 59, "packages below it ↓", 15, GREY)]
    for first, last, words in PHASES:
        low, high = LEFT + (first - 1) * COLUMN + 6, LEFT + last * COLUMN - 6
        parts.append(f'<path d="M{low} 62V52H{high}V62" fill="none" stroke="{GREY}"/>')
        parts.append(text((low + high) / 2, 42, words, 16, INK, 'text-anchor="middle"'))
    return parts


def marker(name: str, fill: str) -> str:
    """Give an arrow's tip."""
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="10" '
        f'markerHeight="10" orient="auto" markerUnits="userSpaceOnUse">'
        f'<path d="M0 0L8 4L0 8z" fill="{fill}"/></marker>'
    )


def draw() -> str:
    """Give the picture. Its own background keeps it legible in dark themes, too."""
    tops, bands, low = rows()
    height = low + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        'font-family="Helvetica, Arial, sans-serif">',
        "<title>The packages, and the way of one gradient in ten steps</title>",
        f"<defs>{marker('tip', BLUE)}{marker('end', ORANGE)}</defs>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2:g}" rx="8" '
        f'fill="{PAPER}" stroke="{LINE}"/>',
        *bands,
        f'<path d="M{LEFT} {TOP}V{low:g}" stroke="{LINE}"/>',
        *phases(),
        *way(tops),
        *steps(tops),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
