"""How a call of a list is written in few bytes, and in which arrays two such calls differ.

Members only have each other's texts, in which a long list is cut off. Such a text ends with a mark:
a digest of the whole call, two sums over its arrays, then short digests of the list up to several
places. The first of these that differs tells between which places the first array lies that does;
where that is the only one, the sums tell which it is (as the checks of a Hamming code do).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

TEXT_BYTES = 100  # a longer text is cut off, and ends with a digest of all of it
_DIGEST = 8  # characters, of 6 bits each
_SUMS = 4
_PRIME = 4093  # the largest that leaves a sum 12 bits
_PLACE = 2  # of a place's digest: one of 4096 differences is told too late in the list
_SHOWN = 16  # of the arrays that stand in a text that is cut off
_FACTORS = ("prescale", "postscale")
_CUT = re.compile(r"\.\.\. (\d+) arrays\](.*), #([\w-]+)\)$")


def spell(name: str, arrays: Sequence[str], options: str) -> str:
    """Say a call of a list: `all_reduce([float32[7], ... 101 arrays], op='sum', #mark)`.

    Args:
        name: The collective's.
        arrays: Each as `float32[7]`.
        options: What follows them: `, op='sum'`.
    """
    text = f"{name}([{', '.join(arrays)}]{options})"
    if len(text) <= TEXT_BYTES:
        return text
    start, count = f"{name}([", f"... {len(arrays)} arrays]"
    left = TEXT_BYTES - len(start) - len(count) - len(", #)") - _DIGEST - _SUMS
    if len(options) > left:
        options = f"{options[: left - 3]}..."
    left -= len(options)
    places = min(len(arrays), max(0, left - _SHOWN) // _PLACE)
    mark = _digest(text, _DIGEST) + _sums(arrays)
    for end in _ends(len(arrays), places):
        mark += _digest(", ".join(arrays[:end]), _PLACE)
    shown = ", ".join(arrays)[: left - places * _PLACE]
    return f"{start}{shown}{count}{options}, #{mark})"


def without_mark(text: str) -> str:
    """Return a call's text as people read it."""
    return _CUT.sub(r"... \1 arrays]\2)", text) if ", #" in text else text


def items(text: str) -> int | None:
    """Read how many arrays a call of a list has; None of another call."""
    name, _, rest = text.partition("([")
    if not rest or not name.isidentifier():
        return None
    told = _CUT.search(rest)
    return int(told[1]) if told else rest.count("[")


def remember(text: str, arrays: Sequence[str]) -> None:
    """Keep the arrays of a call that this process makes, for what its error says."""
    _arrays_of(text)[:] = arrays


def difference(texts: Sequence[str], members: Sequence[str]) -> str:
    """Say which arrays of two long lists differ first: `item 78 is float32[11] here`.

    Args:
        texts: Both calls, of as many arrays.
        members: Where each was made: "here", or "on rank 2".

    Returns:
        "" where the texts do not tell.
    """
    cut = [_CUT.search(text) for text in texts]
    if cut[0] is None or cut[1] is None:
        return ""
    lists = [_arrays_of(text) for text in texts]
    low, high = _first_range(int(cut[0][1]), cut[0][3], cut[1][3])
    if all(lists):
        pairs = enumerate(zip(*lists, strict=True))
        found = [i for i, (one, other) in pairs if one != other]
        low, high = (found[0], found[0] + 1) if found else (0, 0)
    if low == high:
        return ""
    told = [
        f"{_runs(arrays[low:high])} {member}"
        for arrays, member in zip(lists, members, strict=True)
        if arrays
    ]
    if high == low + 1:
        said = f"item {low} {'is' if told else 'differs'}"
    else:
        said = f"the first that differs is among items {low} to {high - 1}"
        said += ", which are" if told else ""
    return " ".join((said, " and ".join(told))).rstrip()


def factors(texts: Sequence[str], members: Sequence[str]) -> str:
    """Say which factor of two lists' calls differs: `prescale is 0.5 here and 2.0 on rank 1`.

    Args:
        texts: Both calls.
        members: As for `difference`.

    Returns:
        "" where the texts do not tell.
    """
    for name in _FACTORS:
        values = [_factor(text, name) for text in texts]
        if values[0] != values[1] and all(values):
            pairs = zip(values, members, strict=True)
            return f"{name} is {' and '.join(f'{value} {member}' for value, member in pairs)}"
    return ""


def _factor(text: str, name: str) -> str:
    """Return a factor as a call's text has it; "" where the text is cut off before it."""
    options = text.rpartition("]")[2]
    found = re.search(rf", {name}=(\([^,)]*\)|[^,)]*)[,)]", options)
    if found is not None:
        return found[1]
    return "" if "..." in options else "1.0"


def _first_range(count: int, one: str, other: str) -> tuple[int, int]:
    """Return between which places the first difference lies; (0, 0) if the marks do not tell."""
    if len(one) != len(other):
        return 0, 0
    start, low = _DIGEST + _SUMS, 0
    for number, end in enumerate(_ends(count, (len(one) - start) // _PLACE)):
        at = start + number * _PLACE
        if one[at : at + _PLACE] != other[at : at + _PLACE]:
            only = _only(one[_DIGEST:start], other[_DIGEST:start])
            return (only, only + 1) if low <= only < end else (low, end)
        low = end
    return 0, 0


def _sums(arrays: Sequence[str]) -> str:
    """Return the sums of the arrays' digests, and of these times their positions from 1."""
    plain = weighted = 0
    for position, array in enumerate(arrays, 1):
        value = _value(array)
        plain, weighted = plain + value, weighted + position * value
    both = plain % _PRIME << 12 | weighted % _PRIME
    return base64.urlsafe_b64encode(both.to_bytes(3, "big")).decode()


def _only(one: str, other: str) -> int:
    """Return from two lists' sums which item differs, if it is the only one; -1 of equal ones."""
    told = [int.from_bytes(base64.urlsafe_b64decode(sums), "big") for sums in (one, other)]
    plain = (told[0] >> 12) - (told[1] >> 12)
    weighted = (told[0] & 0xFFF) - (told[1] & 0xFFF)
    return -1 if plain % _PRIME == 0 else weighted * pow(plain, -1, _PRIME) % _PRIME - 1


@lru_cache(maxsize=1024)
def _value(array: str) -> int:
    return int.from_bytes(hashlib.blake2b(array.encode(), digest_size=6).digest(), "big")


def _ends(count: int, places: int) -> list[int]:
    return [(place + 1) * count // places for place in range(places)]


def _runs(arrays: Sequence[str]) -> str:
    """Say arrays one after the other, equal ones together: `2 of float32[10], float32[11]`."""
    runs = [(array, len(list(same))) for array, same in groupby(arrays)]
    said = [f"{number} of {array}" if number > 1 else array for array, number in runs]
    most = 8  # of which a message stays readable
    return ", ".join(said[:most] + ["..."] * (len(said) > most))


def _digest(text: str, characters: int) -> str:
    told = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return base64.urlsafe_b64encode(told).decode()[:characters]


@lru_cache(maxsize=256)
def _arrays_of(text: str) -> list[str]:  # noqa: ARG001 (the cache's key)
    """Return where the arrays of a call are kept; empty if this process has not made it."""
    return []
