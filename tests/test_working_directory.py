"""Files of the working directory take the place of no module, in this process or its children."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import SHORT

MODULES = ("random", "queue", "pickle", "struct", "numpy", "torch", "trainyard/__init__")
"""Names that the loader, the ranks and the workers of `pack` and `verify` import."""


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """A folder of somebody else, each of whose modules writes its name when it is imported."""
    folder = tmp_path / "taken"
    (folder / "trainyard").mkdir(parents=True)
    for name in MODULES:
        code = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        (folder / f"{name}.py").write_text(code)
    return folder


def in_folder(folder: Path, *words: object) -> None:
    script = Path(sys.executable).with_name("trainyard")
    done = subprocess.run(
        [str(script), *map(str, words)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not (folder.parent / "ran").exists()


@pytest.mark.slow
def test_ranks_import_nothing_of_it(taken: Path, digits: Path) -> None:
    run = taken.parent / "run"
    words = ("launch", "local", "debug", "--ranks", 2, "--data", digits, "--run", run, *SHORT)
    in_folder(taken, *words)


def test_workers_import_nothing_of_it(taken: Path, digits: Path) -> None:
    in_folder(taken, "data", "verify", digits / "val", "--deep", "--processes", 2)
    packed = taken.parent / "packed"
    words = ("--format", "webdataset", "--processes", 2)
    in_folder(taken, "data", "pack", digits / "val", packed, *words)


@pytest.mark.slow
def test_the_module_imports_nothing_of_it(taken: Path, digits: Path) -> None:
    """`python -m trainyard`, where the package itself is found first in the working directory."""
    (taken / "trainyard" / "__init__.py").unlink()
    (taken / "trainyard").rmdir()
    run = taken.parent / "run"
    words = ["train", "debug", "--data", str(digits), "--run", str(run), *SHORT]
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "trainyard", *words],
        cwd=taken,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (taken.parent / "ran").exists()
