"""Fine-tuning: a run that begins with weights of another run, of a file, or of timm."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.command_line import Capture, shown
from tests.errors import raises
from tests.runs import curve, of_digits
from tests.runs import events as events_of
from tests.spawn import spawn, train_joined
from trainyard.config import load_recipe
from trainyard.files import sha256
from trainyard.world import World

ALONE = World()
VIT = "{embed_dim=32, depth=2, num_heads=2}"


def train(digits: Path, folder: Path, world: World = ALONE, /, **changes: str) -> None:
    """Two steps of the debug recipe; keys with __ in place of the dot."""
    torch.set_num_threads(1)
    keys = {"run.length": "2 steps", "run.eval_every": "2 steps", "data.threads": "1"}
    keys |= of_digits(digits)
    keys |= {key.replace("__", "."): text for key, text in changes.items()}
    config = load_recipe("debug", keys)
    # Ranks that tests.spawn starts have joined already.
    train_joined(config, folder, world)


def events(folder: Path) -> list[str]:
    return [event["message"] for event in events_of(folder, "initial weights")]


def weights_of(folder: Path, name: str = "model") -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / "latest" / f"{name}.safetensors")


# Steps with a learning rate this small leave the weights where they began.
STILL = {"optim__lr": "1e-30", "optim__weight_decay": "0"}


def began_with(folder: Path, weights: dict[str, Tensor], but: tuple[str, ...] = ("?",)) -> bool:
    ours = weights_of(folder)
    kept = [name for name in ours if not name.startswith(but)]
    return all(torch.allclose(ours[n], weights[n], rtol=0, atol=1e-20) for n in kept)


@pytest.fixture
def three_classes(digits: Path, tmp_path: Path) -> Path:
    """Three of the digits, as a data set of its own."""
    for split in ("train", "val"):
        for label in sorted((digits / split).glob("[0-9]"))[:3]:
            shutil.copytree(label, tmp_path / "three" / split / label.name)
    return tmp_path / "three"


# --- a run, a checkpoint ---


@pytest.mark.parametrize("what", ["run", "checkpoint", "file"])
def test_a_run_begins_with_the_weights_of_another(
    what: str, digits: Path, finished: Path, tmp_path: Path
) -> None:
    best = finished / "checkpoints" / "best"
    path = {"run": finished, "checkpoint": best, "file": best / "model.safetensors"}[what]
    train(digits, tmp_path / "run", model__checkpoint=str(path), **STILL)
    weights = load_file(best / "model.safetensors")
    assert began_with(tmp_path / "run", weights)
    assert len(events(tmp_path / "run")) == 1


def test_classes_keep_their_rows_by_name(
    three_classes: Path, finished: Path, tmp_path: Path
) -> None:
    """Classes "0" and "2" stay, "1" gets another name, and "a" is new."""
    for split in ("train", "val"):
        (three_classes / split / "1").rename(three_classes / split / "one")
        shutil.copytree(three_classes / split / "0", three_classes / split / "a")
    for path in (three_classes / "val" / "a").iterdir():
        path.write_bytes(path.read_bytes() + b" ")
    old = load_file(finished / "checkpoints" / "best" / "model.safetensors")
    for names, rows in (("{}", {0: 0, 1: 2}), ('{"1" = "one"}', {0: 0, 1: 2, 3: 1})):
        folder = tmp_path / f"run-{len(rows)}"
        keys = {"model__checkpoint": str(finished), "model__class_names": names, **STILL}
        train(three_classes, folder, **keys)
        assert began_with(folder, old, but=("head.",))
        new = weights_of(folder)
        assert len(new["head.weight"]) == len(new["head.bias"]) == 4
        for key, tensor in new.items():
            for row in range(4) if key.startswith("head.") else ():
                mine, before = tensor[row], old[key][rows.get(row, 0)]
                is_kept = torch.allclose(mine, before, rtol=0, atol=1e-20)
                assert is_kept == (row in rows)
        assert any(f"rows of {len(rows)} classes" in text for text in events(folder))


def test_old_and_new_classes_are_evaluated_apart(
    three_classes: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    train(three_classes, tmp_path / "old")
    train(digits, tmp_path / "new", model__checkpoint=str(tmp_path / "old"), **STILL)
    table = tmp_path / "said.csv"
    arguments = ("evaluate", tmp_path / "new", "--json", "--out", table)
    found = json.loads(shown(capsys, *arguments))
    with open(table, newline="") as lines:
        rows = [(row["class"] in "012", row["place"] == "1") for row in csv.DictReader(lines)]
    for name, is_old in (("old", True), ("new", False)):
        right = [hit for old, hit in rows if old == is_old]
        assert found[f"{name}_samples"] == len(right) > 0
        assert found[f"{name}_top1"] == pytest.approx(sum(right) / len(right))
    assert "old_top1" not in json.loads(shown(capsys, "evaluate", tmp_path / "old", "--json"))


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        ('{"x" = "0"}', "x"),
        ('{"3" = "x"}', "x"),
        ('{"3" = "0"}', "0"),
    ],
)
def test_wrong_names_of_classes(
    names: str, wrong: str, three_classes: Path, finished: Path, tmp_path: Path
) -> None:
    with raises("weights.wrong-class-name", name=wrong):
        train(
            three_classes,
            tmp_path / "run",
            model__checkpoint=str(finished),
            model__class_names=names,
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_moving_average_goes_first_unless_it_did_worse(digits: Path, tmp_path: Path) -> None:
    """At a decay of 0 the average is the weights, at 0.999 it is still at the beginning."""
    train(digits, tmp_path / "old", model__ema_decay="0.999", optim__lr="0.05")
    best = tmp_path / "old" / "checkpoints" / "best"
    for raw, averaged, name in ((0.5, 0.6, "ema"), (0.6, 0.5, "model"), (None, None, "ema")):
        progress = json.loads((best / "progress.json").read_text())
        progress["last"] = {"step": 2, "top1": raw, "ema_top1": averaged} if raw else {}
        seal(best, progress)
        folder = tmp_path / f"{raw}"
        train(digits, folder, model__checkpoint=str(tmp_path / "old"), **STILL)
        assert began_with(folder, load_file(best / f"{name}.safetensors"))
        assert ("the moving average" in events(folder)[0]) == (name == "ema")


def seal(checkpoint: Path, progress: dict[str, Any]) -> None:
    """Write progress.json, and its checksum."""
    (checkpoint / "progress.json").write_text(json.dumps(progress))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["progress.json"] = sha256(checkpoint / "progress.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_damaged_checkpoint_is_refused(digits: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "old", symlinks=True)
    weights = tmp_path / "old" / "checkpoints" / "best" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with raises("checkpoint.file-altered", name="model.safetensors"):
        train(digits, tmp_path / "run", model__checkpoint=str(tmp_path / "old"))
    assert not (tmp_path / "run").exists()


# --- files, timm ---


def test_a_file_by_key_and_prefix(digits: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    there = timm.create_model("test_vit", num_classes=10, img_size=32).state_dict()
    teacher = {f"net.{name}": tensor for name, tensor in there.items()}
    torch.save({"teacher": teacher, "epoch": 3}, tmp_path / "a.pth")
    keys = {"model__checkpoint_key": "teacher", "model__checkpoint_prefix": "net."}
    size = {"data__image_size": "32"}
    checkpoint = str(tmp_path / "a.pth")
    train(digits, tmp_path / "run", model__checkpoint=checkpoint, **keys, **size, **STILL)
    assert began_with(tmp_path / "run", there)


@pytest.mark.slow
def test_timms_pretrained_weights(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    there = timm.create_model("test_resnet").state_dict()
    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", lambda *_, **__: there)
    keys = {"model__name": "test_resnet", "model__checkpoint": "timm", "model__freeze": '["*bn*"]'}
    train(digits, tmp_path / "run", **keys, **STILL)
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    ours = weights_of(tmp_path / "run")
    body = {n for n in ours if not n.startswith("fc.") and not n.endswith(statistics)}
    assert all(torch.allclose(ours[n], there[n], rtol=0, atol=1e-20) for n in body)


# --- going on ---


@pytest.mark.slow
def test_a_run_goes_on_without_the_weights_that_it_began_with(digits: Path, tmp_path: Path) -> None:
    train(digits, tmp_path / "old")
    changes = {"model__checkpoint": str(tmp_path / "old"), "run__save_every": "1 step"}
    train(digits, tmp_path / "whole", **changes)
    shutil.copytree(tmp_path / "whole", tmp_path / "part", symlinks=True)
    last = tmp_path / "part" / "checkpoints" / "step-00000002"
    shutil.rmtree(last)
    shutil.rmtree(tmp_path / "old")
    train(digits, tmp_path / "part", **changes)
    assert began_with(tmp_path / "part", weights_of(tmp_path / "whole"))
    assert len(events(tmp_path / "part")) == 1


def test_weights_that_are_gone_are_one_line_for_a_new_run(digits: Path, tmp_path: Path) -> None:
    with raises("weights.not-found", value="old"):
        train(digits, tmp_path / "run", model__checkpoint="old")
    (tmp_path / "empty").mkdir()
    with raises("checkpoint.wrong-path", path=tmp_path / "empty"):
        train(digits, tmp_path / "run", model__checkpoint=str(tmp_path / "empty"))
    assert not (tmp_path / "run").exists()


def on_two_ranks(world: World, digits: Path, old: Path, folder: Path) -> None:
    still = STILL | {"model__freeze": '["blocks.*"]'}
    train(digits, folder, world, model__checkpoint=str(old), **still)


@pytest.mark.slow
def test_every_rank_begins_with_them(digits: Path, finished: Path, tmp_path: Path) -> None:
    spawn(on_two_ranks, 2, digits, finished, tmp_path / "run")
    best = finished / "checkpoints" / "best" / "model.safetensors"
    assert began_with(tmp_path / "run", load_file(best))
    assert len(events(tmp_path / "run")) == 1


# --- another resolution ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"model__name": "test_vit"},
        {"model__name": "vit_tiny_patch16_224", "model__options": VIT},
    ],
    ids=lambda keys: str(keys["model__name"]),
)
def test_evaluation_at_another_resolution(
    keys: dict[str, str], digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    """FixRes (Touvron et al. 2019): train at 32, evaluate at 48, in the run and afterwards."""
    sizes = {"data__image_size": "32", "data__eval_size": "48"}
    train(digits, tmp_path / "run", **sizes, **keys)
    ((evaluated, top1, loss),) = curve(
        tmp_path / "run", "val", "evaluated", "top1", "loss"
    ).values()
    assert weights_of(tmp_path / "run")["pos_embed"].shape[1] == 5
    found = json.loads(shown(capsys, "evaluate", tmp_path / "run", "--json"))
    assert (found["top1"], found["samples"]) == (top1, evaluated)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_fine_tuning_at_another_resolution(digits: Path, tmp_path: Path) -> None:
    keys = {"model__name": "vit_tiny_patch16_224", "model__options": VIT}
    train(digits, tmp_path / "old", data__image_size="32", **keys)
    keys |= {"data__image_size": "64", "model__checkpoint": str(tmp_path / "old")}
    train(digits, tmp_path / "run", **keys, **STILL)
    old = weights_of(tmp_path / "old")
    assert began_with(tmp_path / "run", old, but=("pos_embed",))
    assert "1x5x32" in events(tmp_path / "run")[1]
