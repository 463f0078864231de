"""docs/twelve-minutes.md: each step ends with the weights of the file that it begins with."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT, blocks
from tests.notebooks import FOLDER, executed, read

PAGE, NOTEBOOK = DOCS / "twelve-minutes.md", FOLDER / "twelve-minutes.ipynb"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file where the page has it, and its commands on the path."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "examples" / "reference.py", tmp_path / "examples")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)  # 7 starts, which beside others take minutes; that of the night has 17
def test_every_step_has_the_same_weights_and_losses(clone: Path) -> None:
    """Where the page has two ranks one is enough: the notebook has two, in the night."""
    printed = ""
    for block in blocks(PAGE):
        if block.language == "python":
            name, _, program = block.text.partition("\n")
            (clone / name[2:]).write_text(program)
            continue
        command = [
            "bash",
            "-e",
            "-c",
            alone(shorter(block.text)),
        ]  # ends where `cmp` finds a difference
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.text}{done.stdout}{done.stderr}"
        printed += done.stdout
    assert "goes on at step 20" in printed
    plain, *others = (losses(clone / name) for name in ("own/plain", "own/report", "runs/whole"))
    assert len(plain) > 40
    assert others == [plain, plain]


def shorter(text: str) -> str:
    return text.replace('"4 epochs"', '"40 steps"').replace('"1 epoch"', '"20 steps"')


def alone(text: str) -> str:
    """One process for two, and the weights of one to compare with."""
    lines = text.replace("torchrun --nproc-per-node 2", "python").splitlines()
    kept = [line for line in lines if not re.search(r"plain-2$|whole-2", line)]
    return "\n".join(kept).replace("plain-2", "plain")


def losses(run: Path) -> list[Any]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    wanted = ("kind", "step", "loss", "top1")
    return [[row[key] for key in wanted] for row in rows if row["kind"] in ("train", "val")]


def test_the_notebook_is_the_page() -> None:
    """Else `python docs/_notebook.py` writes it."""
    notebook = runpy.run_path(str(DOCS / "_notebook.py"))["notebook"]
    assert NOTEBOOK.read_text() == notebook(PAGE.read_text())


@pytest.mark.night
@pytest.mark.timeout(900)
def test_the_notebook_runs(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: make .venv/.peers")
    notebook = read(NOTEBOOK.name)
    for cell in notebook.cells:
        cell.source = shorter(cell.source)
    executed(notebook, clone / "notebooks", monkeypatch)
    assert (clone / "both.html").is_file()
