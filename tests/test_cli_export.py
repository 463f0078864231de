"""`trainyard export`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
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
    assert first["images"] == second["images"] > 0


def test_what_was_exported_before_is_replaced(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    file, hub = tmp_path / "m.safetensors", tmp_path / "hub"
    shown(capsys, "export", finished, file, "--hub", hub)
    for place in (file, hub / "model.safetensors"):
        place.write_bytes(b"")
    assert run("export", finished, file, "--hub", hub) == 0
    assert file.stat().st_size == (hub / "model.safetensors").stat().st_size > 1e6


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), "export.no-destination"),
        (("{here}/m.pt2", "--private"), "option.private-without-push"),
        (("{here}/m.pth",), "export.unknown-suffix"),
        (("--format", "onnx", "--hub", "{here}/new"), "option.format-without-file"),
        (("{here}/m.onnx", "--format", "torch"), "option.unknown-choice"),
        (("{here}/none/m.onnx",), "export.no-parent-folder"),
        (("{here}", "--format", "pt2"), "export.file-is-folder"),
        (("--hub", "{here}"), "export.hub-not-empty"),
        (("--hub", "{here}/notes.pt2.md"), "export.hub-is-file"),
        (("--hub", "{here}/none/hub"), "export.no-parent-folder"),
        (("{here}/notes.pt2",), "export.card-exists"),
        (("{here}/m.pt2", "--ema"), "checkpoint.no-average"),
        (("{here}/m.pt2", "--opset", "20"), "export.option-of-onnx"),
        (("{here}/m.onnx", "--opset", "17"), "export.opset-too-old"),
        (("{here}/m.pt2", "--optim.lr", "1"), "recipe.key-without-effect"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], code: str, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.pt2.md").write_text("my notes")
    words = [word.replace("{here}", str(tmp_path)) for word in arguments]
    check(refused("export", finished, *words), code)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.pt2.md"]


def test_a_run_that_is_none(tmp_path: Path) -> None:
    error = refused("export", tmp_path, tmp_path / "m.pt2")
    check(error, "checkpoint.wrong-path", path=tmp_path)


def test_another_size_of_images(finished: Path, tmp_path: Path, capsys: Capture) -> None:
    """A ViT of 32 pixels takes 48 ones, its position embeddings resampled."""
    shown(capsys, "export", finished, "--hub", tmp_path / "m", "--data.eval_size", "48")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [3, 48, 48]
    assert config["model_args"]["dynamic_img_size"]


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt2", "m.onnx", "hub"])
def test_a_full_disk(name: str, finished: Path, tmp_path: Path, capsys: Capture) -> None:
    where = ["--hub", tmp_path / name] if name == "hub" else [tmp_path / name]
    with full_disk(200_000):
        assert run("export", finished, *where) == 1
    assert capsys.readouterr().err.startswith(f"trainyard: {tmp_path / name}: ")
    assert list(tmp_path.iterdir()) == []
