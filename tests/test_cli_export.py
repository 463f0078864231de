"""`trainyard export`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.command_line import Capture, complaint, run, shown
from tests.full_disk import full_disk

pytestmark = pytest.mark.slow


def test_a_file_and_a_folder_in_one_go(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    file, hub = tmp_path / "weights", tmp_path / "hub"
    asked = ("--format", "safetensors", "--hub", hub, "--json")
    first, second = json.loads(shown(capsys, "export", finished, file, *asked))["exports"]
    assert (first["path"], first["format"]) == (str(file), "safetensors")
    assert (second["path"], second["format"]) == (str(hub), "hub")
    assert first["bytes"] == file.stat().st_size
    assert first["max_difference"] == second["max_difference"] == 0
    assert first["images"] == 16


def test_what_was_exported_before_is_replaced(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    file, hub = tmp_path / "m.safetensors", tmp_path / "hub"
    said = shown(capsys, "export", finished, file, "--hub", hub)
    assert said.count("logits are the same (on 16 validation images and noise)") == 2
    for place in (file, hub / "model.safetensors"):
        place.write_bytes(b"")
    assert run("export", finished, file, "--hub", hub) == 0
    assert file.stat().st_size == (hub / "model.safetensors").stat().st_size > 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a FILE to export to, a folder with --hub, or --push"),
        (("{here}/m.pt2", "--private"), "--private is for --push"),
        (("{here}/m.pth",), "does not end in .safetensors, .onnx, .pt2; add --format"),
        (("--format", "onnx", "--hub", "{here}/new"), "--format onnx is for a FILE"),
        (("{here}/m.onnx", "--format", "torch"), "--format cannot be 'torch'"),
        (("{here}/none/m.onnx",), "none/m.onnx: there is no folder"),
        (("{here}", "--format", "pt2"), "is a folder; name a file, or say --hub"),
        (("--hub", "{here}"), "holds other files; name a new folder"),
        (("--hub", "{here}/notes.pt2.md"), "is a file; name a folder"),
        (("--hub", "{here}/none/hub"), "there is no folder"),
        (("{here}/notes.pt2",), "notes.pt2.md: exists, where the model card would be written"),
        (("{here}/m.pt2", "--ema"), "no moving average"),
        (("{here}/m.pt2", "--optim.lr", "1"), "optim.lr changes nothing about an export"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], message: str, finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "notes.pt2.md").write_text("my notes")
    words = [word.replace("{here}", str(tmp_path)) for word in arguments]
    assert message in complaint(capsys, "export", finished, *words)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.pt2.md"]


def test_a_run_that_is_none(tmp_path: Path, capsys: Capture) -> None:
    said = complaint(capsys, "export", tmp_path, tmp_path / "m.pt2")
    assert "neither a run directory nor a checkpoint" in said


def test_another_size_of_images(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    """A ViT of 32 pixels takes 48 ones, its position embeddings resampled."""
    said = shown(capsys, "export", finished, "--hub", tmp_path / "m", "--data.eval_size", "48")
    assert "logits are the same" in said
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [3, 48, 48]
    assert config["model_args"]["dynamic_img_size"]


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt2", "m.onnx", "hub"])
def test_a_full_disk(name: str, finished: Path, tmp_path: Path, capsys: Capture) -> None:
    where = ["--hub", tmp_path / name] if name == "hub" else [tmp_path / name]
    with full_disk(200_000):
        assert run("export", finished, *where) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"trainyard: {tmp_path / name}: File too large: 1.2 MB needed, ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
