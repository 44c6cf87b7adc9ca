"""How a call of a list of arrays is written in few bytes."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence

TEXT_BYTES = 100  # a longer text is cut, and ends with a digest of all of it
_DIGEST = 8  # characters, of 6 bits each
_CUT = re.compile(r"\.\.\. (\d+) arrays\](.*), #[\w-]+\)$")


def spell(name: str, arrays: Sequence[str], options: str) -> str:
    """Write a call of a list: `all_reduce([float32[7], ... 101 arrays], op='sum', #digest)`.

    Args:
        name: The collective's.
        arrays: Each as `float32[7]`.
        options: What follows them: `, op='sum'`.
    """
    text = f"{name}([{', '.join(arrays)}]{options})"
    if len(text) <= TEXT_BYTES:
        return text
    start, count = f"{name}([", f"... {len(arrays)} arrays]"
    left = TEXT_BYTES - len(start) - len(count) - len(", #)") - _DIGEST
    if len(options) > left:
        options = f"{options[: left - 3]}..."
    shown = ", ".join(arrays)[: left - len(options)]
    digest = base64.urlsafe_b64encode(hashlib.blake2b(text.encode(), digest_size=6).digest())
    return f"{start}{shown}{count}{options}, #{digest.decode()})"


def without_mark(text: str) -> str:
    """Return a call's text without the digest, for people."""
    return _CUT.sub(r"... \1 arrays]\2)", text) if ", #" in text else text


def items(text: str) -> int | None:
    """Read how many arrays a call of a list has; None of another call."""
    name, _, rest = text.partition("([")
    if not rest or not name.isidentifier():
        return None
    cut = _CUT.search(rest)
    return int(cut[1]) if cut else rest.count("[")
