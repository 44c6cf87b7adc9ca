"""What the pages name exists: paths, links, names, packages, and the picture of the packages."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import allreduce as ar
from tests.test_imports import LEVELS

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
FOLDERS = "allreduce|kernels|tests|strategies|benchmarks|docs|mpi_examples"

_SCRIPT = REPOSITORY / "docs" / "images" / "architecture.py"
_PATH = re.compile(rf"(?<![\w/.])(?:{FOLDERS})(?:/[\w.*-]+)+/?")
_FILE = re.compile(r"`(?:\w+/)*(\w+\.(?:py|pyi|h|cpp|cu|cuh|proto))`")
_NAME = re.compile(r"`ar((?:\.\w+)+)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def names(page: Path) -> list[str]:
    return [path.rstrip(".") for path in _PATH.findall(page.read_text())]


@cache
def _files() -> set[str]:
    return {path.name for each in FOLDERS.split("|") for path in (REPOSITORY / each).rglob("*.*")}


def unknown_names(page: Path) -> Iterator[str]:
    """Give the files without a folder, and the public names, that do not exist."""
    text = page.read_text()
    yield from set(_FILE.findall(text)) - _files()
    for name in _NAME.findall(text):
        found: object = ar
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        if found is None:
            yield f"ar{name}"


def broken_links(page: Path) -> Iterator[str]:
    """Give the relative links of a page whose file or heading does not exist."""
    for link in _LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (heading and heading not in anchors(target)):
            yield link


def anchors(page: Path) -> set[str]:
    """Give the anchors that a page's headings have on GitHub."""
    plain = (re.sub(r"[^\w\- ]", "", each.lower()) for each in _HEADING.findall(page.read_text()))
    return {each.strip().replace(" ", "-") for each in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_paths_and_links_of_a_page_exist(page: Path) -> None:
    assert [name for name in names(page) if not any(REPOSITORY.glob(name))] == []
    assert list(broken_links(page)) == []
    assert list(unknown_names(page)) == []


def test_pages_begin_with_the_people_who_need_them() -> None:
    for page in (REPOSITORY / "docs").rglob("*.md"):
        assert page.read_text().splitlines()[2].startswith("For "), page


def test_missing_paths_and_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n[x](gone.md) [y](#a-b-c) [z](#d) [w](https://a.b/c) `tests/gone.py`."
        " `call.h` `ar.nn.Dense(3)` `ar.nn.Dens`"
    )
    assert names(page) == ["tests/gone.py"]
    assert list(broken_links(page)) == ["gone.md", "#d"]
    assert list(unknown_names(page)) == ["gone.py", "ar.nn.Dens"]


def test_the_files_to_open_first_exist() -> None:
    rows = re.findall(r"^\| (`.*?) \|.*\| (`[^|]*`) \|$", _architecture(), re.MULTILINE)
    assert len(rows) > 30
    for folders, files in rows:
        paths = re.findall(r"`(.*?)`", folders)
        for file in re.findall(r"`(.*?)`", files):
            assert any((REPOSITORY / path / file).is_file() for path in paths), (paths, file)


def test_every_package_is_on_the_page_of_the_architecture() -> None:
    words = set(re.findall(r"\w+", _architecture()))
    assert {package for level in LEVELS for package in level} - words == set()


def test_the_order_of_imports_is_on_the_page_and_in_the_picture() -> None:
    table = re.findall(
        r"^\| (`.*?) \|", _architecture().partition("## The order of imports")[2], re.M
    )
    rows = [tuple(re.findall(r"`(?:allreduce/)?(\w+)", row)) for row in table]
    assert rows == list(reversed(LEVELS))
    drawn = [set(row[0].split(" · ")) for row in _picture()["PACKAGES"]]
    # All but the lowest levels, which the last row stands for.
    assert drawn[:-1] == [set(level) for level in reversed(LEVELS[2:-1])]


def test_the_picture_of_the_packages_is_the_one_that_its_script_draws() -> None:
    assert _SCRIPT.with_suffix(".svg").read_text() == _picture()["draw"]()


def _picture() -> dict[str, Any]:
    return runpy.run_path(str(_SCRIPT))


def _architecture() -> str:
    return (REPOSITORY / "docs" / "architecture.md").read_text()
