"""Virtual environments, one per peer, made once and kept: MPIs exclude each other in a process."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

from peers import Peer

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_FOLDER = Path("~/.cache/allreduce-bench").expanduser()
_OURS = ("allreduce", "strategies", "kernels", "pyproject.toml", "README.md")  # makes the wheel
_NEEDED = ("numpy", "ml_dtypes")  # bfloat16 arrays are ml_dtypes'
_BUILDERS = ("cmake", "ninja")  # the packages that the build system would fetch


class Environments:
    """A folder of environments in which this checkout's allreduce is installed.

    Args:
        folder: Where they are kept; made if need be.

    Raises:
        SystemExit: The folder lies in the checkout, whose tools would take it for source.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().resolve()
        if self._folder.is_relative_to(REPOSITORY):
            raise SystemExit(
                f"environments in {self._folder} would be part of the checkout "
                f"{REPOSITORY}; name a folder outside of it"
            )
        self._digest = _digest()

    def python(self, name: str, peer: Peer) -> Path:
        """Return the interpreter of a peer's environment, installing what is missing.

        Raises:
            subprocess.CalledProcessError: Something cannot be installed or built.
        """
        python = self.made(name, *_NEEDED, *peer.packages)
        place = self._folder / name
        if _stamp(place, "ours") != self._digest:
            _say(f"{name}: building this checkout for {place}; this may take minutes")
            wheel = self._built()
            _pip(python, "install", str(wheel))  # with its dependencies
            # pip would keep an installed package of the same version.
            _pip(python, "install", "--force-reinstall", "--no-deps", str(wheel))
            (place / "ours").write_text(self._digest)
        return python

    def made(self, name: str, *packages: str) -> Path:
        """Return the interpreter of an environment that has the packages, and nothing of ours.

        Raises:
            subprocess.CalledProcessError: Something cannot be installed.
        """
        place = self._folder / name
        python = place / "bin" / "python"
        if _stamp(place, "packages") != " ".join(packages):
            what = f"installing {' '.join(packages)} into {place}"
            _say(f"{name}: {what}, once; this may take minutes and gigabytes")
            _run(sys.executable, "-m", "venv", "--clear", str(place))
            _pip(python, "install", *packages)
            (place / "packages").write_text(" ".join(packages))
        return python

    def _built(self) -> Path:
        """Build the wheel in persistent folders, so that only changed files are compiled."""
        folder = self._folder / "wheels" / self._digest
        if not list(folder.glob("allreduce-*.whl")):
            project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
            python = self.made("builder", *project["build-system"]["requires"], *_BUILDERS)
            settings = ("--no-build-isolation", "-C", f"build-dir={self._folder / 'build'}")
            _pip(python, "wheel", "--no-deps", *settings, "-w", str(folder), str(REPOSITORY))
        return next(folder.glob("allreduce-*.whl"))


def _digest() -> str:
    """Return a digest of all files of the wheel."""
    digest = hashlib.sha256()
    for name in _OURS:
        top = REPOSITORY / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0")
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _stamp(place: Path, name: str) -> str:
    path = place / name
    return path.read_text() if path.exists() else ""


def _pip(python: Path, command: str, *arguments: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    _run(str(python), "-m", "pip", command, *quiet, *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
