"""The notebooks run from top to bottom, and are kept without what they print."""

from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import FOLDER, executed, read
from tests.services.ssh_hosts import needs_ssh

pytestmark = pytest.mark.night

pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: make .venv/.dev")


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Executes a notebook in the test's own folder; gives what its cells print."""

    def run(name: str) -> str:
        outputs = executed(read(name), tmp_path, monkeypatch)
        return "".join(out.get("text", "") for out in outputs)

    return run


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.ipynb")))
def test_kept_without_output(name: str) -> None:
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert cells
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def test_ray(execute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="needs Ray: make .venv/.dev")
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not one that runs here by chance
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    printed = execute("ray.ipynb")
    assert "1 x a node of Ray: 2 x" in printed
    assert "(RayTrainWorker pid=" in printed and "step 40/40" in printed
    assert "40 steps, top-1 " in printed


@needs_ssh
def test_ssh(execute: Any) -> None:
    printed = execute("ssh.ipynb")
    assert "one | step 40/40" in printed or "two | step 40/40" in printed
    assert "40 steps, top-1 " in printed
    assert "host nowhere.invalid: ssh has failed" in printed
