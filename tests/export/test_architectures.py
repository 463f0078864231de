"""Exports of the architectures that Trainyard adds to timm's, which timm alone does not know."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import SHORT, run
from tests.errors import check, raises, refused
from tests.tiers import tiered
from trainyard.classifier import load
from trainyard.export.export import Exporter

pytestmark = pytest.mark.slow

OPTIONS = {
    "plain_vit_small_patch16_224": "{patch_size = 8, embed_dim = 32, depth = 1, num_heads = 2}",
    "whitened_convnet": '{widths = "8-16-16"}',
}


@pytest.fixture(scope="module", params=tiered(OPTIONS, night=["whitened_convnet"]))
def trained(
    request: pytest.FixtureRequest, digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    model = ("--model.name", request.param, "--model.options", OPTIONS[request.param])
    assert run("train", "debug", "--data", digits, "--run", folder, *model, *SHORT, "--json") == 0
    return folder


def test_another_process_runs_the_code_in_the_card(
    trained: Path, digits: Path, tmp_path: Path
) -> None:
    """Nothing but the code itself lets timm know the architecture there."""
    assert run("export", trained, tmp_path / "m.safetensors") == 0
    text = (tmp_path / "m.safetensors.md").read_text()
    assert "` of Trainyard, " in text
    front = yaml.safe_load(text.split("---\n")[1])
    assert "library_name" not in front and "timm" not in front["tags"]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    image = min((digits / "val" / "3").iterdir())
    (tmp_path / "image.png").symlink_to(image)
    program = [sys.executable, "-c", code]
    said = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == load(trained).predict([image])[0][0].name


@pytest.mark.parametrize("file", [(), ("m.safetensors",)])
def test_a_folder_for_timm_is_refused_before_anything_is_written(
    file: tuple[str, ...], trained: Path, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in file]
    error = refused("export", trained, *files, "--hub", tmp_path / "hub")
    check(error, "export.unknown-to-timm", option=f"--hub {tmp_path / 'hub'}")
    assert list(tmp_path.iterdir()) == []


def test_only_a_file_is_uploaded(trained: Path, tmp_path: Path) -> None:
    class Hub:
        name, files = "hf://acme/digits", set[str]()

        def push(self, folder: Path, _: str, *, private: bool) -> str:
            self.files = {file.name for file in folder.iterdir() if file.read_bytes()}
            return ""

    exporter = Exporter(load(trained))
    hub: Any = Hub()
    with raises("export.unknown-to-timm", option="--push hf://acme/digits"):
        exporter.push(hub, private=False)
    file = exporter.to_file(tmp_path / "m.safetensors", "safetensors")
    exporter.push(hub, [file], private=False)
    assert hub.files == {"m.safetensors", "m.safetensors.md", "README.md"}
