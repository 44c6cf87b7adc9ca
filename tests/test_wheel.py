"""The wheel: what is in it, and that it trains in an environment that has nothing else of ours."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

# Builds the native module, where there is none, and installs: minutes, if nothing is cached.
pytestmark = pytest.mark.timeout(300)

TRAIN_ONE_STEP = """
    import json, pathlib
    import numpy as np
    import allreduce as ar
    import allreduce._native
    import allreduce.strategies

    ar.set_seed(0)
    rng = np.random.default_rng(0)
    x = rng.random((32, 8), dtype=np.float32)
    y = rng.integers(0, 3, 32)
    with ar.MirroredStrategy().scope():
        model = ar.nn.Sequential(
            [ar.nn.Dense(16, activation="relu"), ar.nn.Dense(3, activation="softmax")]
        )
        model.compile(optimizer=ar.optim.SGD(0.1), loss="sparse_categorical_crossentropy")
    before = model.evaluate(x, y, verbose=0, return_dict=True)["loss"]
    history = model.fit(x, y, batch_size=32, epochs=1, verbose=0)
    after = model.evaluate(x, y, verbose=0, return_dict=True)["loss"]
    print(json.dumps({
        "before": before,
        "during": history.history["loss"][0],
        "after": after,
        "package": str(pathlib.Path(ar.__file__).parent),
        "native": ar._native.__file__,
        "strategies": ar.strategies.__file__,
    }))
"""

# Other packages have these names: installing ours would break them.
NO_STRANGERS = """
import importlib.util
for name in ("strategies", "kernels"):
    assert importlib.util.find_spec(name) is None, f"top-level {name} is installed"
"""


def run(*command: str | Path, cwd: Path, seconds: float = 240) -> str:
    """Run a command away from this checkout, and give what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel; where `make` has compiled the native module, without doing so again."""
    folder = tmp_path_factory.mktemp("wheel")
    build: list[str | Path] = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    if importlib.util.find_spec("scikit_build_core"):
        build.append("--no-build-isolation")
    else:
        build.append(f"--config-settings=build-dir={folder / 'build'}")
    run(sys.executable, *build, REPOSITORY, cwd=folder)
    (made,) = folder.glob("allreduce-*.whl")
    return made


def test_it_holds_the_package_and_nothing_beside_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    (information,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {"allreduce", information}
    for wanted in ("__init__.py", "py.typed", "strategies/__init__.py", "devices/cpu.py"):
        assert f"allreduce/{wanted}" in names
    assert [name for name in names if name.startswith("allreduce/_native.") and ".so" in name]
    assert f"{information}/licenses/LICENSE" in names
    unwanted = (".proto", ".cpp", ".h", ".pyc", ".o")
    assert [name for name in names if name.endswith(unwanted)] == []
    kernels = {path.name for path in (REPOSITORY / "kernels").rglob("*.cu")}
    assert {Path(name).name for name in names if name.endswith(".cu")} == kernels


def test_every_module_of_the_sources_is_in_it(wheel: Path) -> None:
    sources = {f"allreduce/{path.relative_to(REPOSITORY / 'allreduce')}" for path in _modules()}
    for path in (REPOSITORY / "strategies").rglob("*.py"):
        sources.add(f"allreduce/strategies/{path.relative_to(REPOSITORY / 'strategies')}")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".py")} == sources


def _modules() -> list[Path]:
    return list((REPOSITORY / "allreduce").rglob("*.py"))


def test_it_trains_one_step_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=elsewhere)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    # Uncompiled: most modules of what it depends on are never imported.
    run(*pip, "install", "--quiet", "--no-compile", wheel, cwd=elsewhere)
    script = elsewhere / "train.py"
    script.write_text(textwrap.dedent(TRAIN_ONE_STEP))
    # -I: neither this folder nor anything else that is not installed can be imported.
    said = json.loads(run(python, "-I", script, cwd=elsewhere).splitlines()[-1])
    assert said["after"] < said["before"]
    assert said["during"] == pytest.approx(said["before"], rel=1e-5)
    for part in ("package", "native", "strategies"):
        assert Path(said[part]).is_relative_to(environment)
    assert Path(said["strategies"]).parent.name == "strategies"
    run(python, "-I", "-c", NO_STRANGERS, cwd=elsewhere)


def test_the_installation_under_test_has_the_same_names(tmp_path: Path) -> None:
    # Under `make test` this is the editable one, which finds strategies/ by other means.
    find = "import allreduce.strategies as found; print(found.__name__, found.__file__)"
    name, file = run(sys.executable, "-I", "-c", find, cwd=tmp_path).split()
    assert name == "allreduce.strategies"
    assert Path(file).name == "__init__.py"
    installed = metadata.files("allreduce") or []
    assert installed
    for path in installed:
        assert path.parts[0] not in ("strategies", "kernels"), path
