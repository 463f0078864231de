"""The examples of docs/predict-export.md work."""

import re
import shlex
from pathlib import Path

import pytest

from tests.command_line import run

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parent.parent / "docs" / "predict-export.md").read_text()


@pytest.fixture
def page_folder(
    finished: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with what the page speaks of, to be in."""
    for name, target in (("runs/digits", finished), ("data/digits", digits), ("photos", digits)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{re.escape(language)}\n(.*?)```", PAGE, re.DOTALL)


def test_commands(page_folder: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 12
    # Those that need a network, shards, minutes of exporting or of training are elsewhere.
    slow = ("example.org", "shards/", ".onnx", ".pt2", "trainyard train")
    done = [line for line in lines if not any(word in line for word in slow)]
    assert len(done) == 4
    for line in done:
        assert run(*shlex.split(line)[1:]) == 0, line
    assert (page_folder / "photos.csv").is_file()
    assert (page_folder / "digits.safetensors").is_file()
    assert (page_folder / "digits-timm" / "config.json").is_file()
