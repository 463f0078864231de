"""Notebooks, executed as Jupyter does."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"


def read(name: str) -> Any:
    import nbformat

    return nbformat.read(FOLDER / name, as_version=4)


def executed(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Execute a notebook in a folder, without colours; the outputs of all its cells."""
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(folder / name))
    NotebookClient(notebook, timeout=250, resources={"metadata": {"path": folder}}).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]
