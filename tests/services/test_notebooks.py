"""The notebooks run from top to bottom, and are kept without what they print."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.ssh_hosts import needs_ssh

pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: make .venv/.peers")
FOLDER = Path(__file__).parents[2] / "notebooks"


def read(name: str) -> Any:
    import nbformat

    return nbformat.read(FOLDER / name, as_version=4)


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Executes a notebook in the test's own folder; gives what its cells print."""
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NO_COLOR", "1")  # in what is looked for below
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))

    def run(name: str) -> str:
        notebook = read(name)
        NotebookClient(notebook, timeout=250, resources={"metadata": {"path": tmp_path}}).execute()
        outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
        return "".join(out.get("text", "") for out in outputs)

    return run


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_kept_without_output(name: str) -> None:
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert cells
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_ray(execute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs Ray: make .venv/.peers")
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not one that runs here by chance
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    printed = execute("ray.ipynb")
    assert "1 x a node of Ray: 2 x" in printed
    assert "/0 | " in printed and "step 40/40" in printed
    assert "40 steps, top-1 " in printed


@needs_ssh
def test_ssh(execute: Any) -> None:
    printed = execute("ssh.ipynb")
    assert "one/0 | step 40/40" in printed and "two/1 | " not in printed
    assert "40 steps, top-1 " in printed
    assert "1 of 3 hosts is not ready" in printed and "host nowhere.invalid: unknown" in printed
