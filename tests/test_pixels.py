"""Mean, std, interpolation and crop of a run: its recipe's, or those of its initial weights.

timm's test_resnet was trained with a mean and std of 0.5, which are not the defaults.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.command_line import run as command
from tests.errors import raises
from tests.runs import curve, of_digits
from tests.spawn import train_joined
from trainyard.config import RunConfig, keys_set, load_recipe, on_data, override
from trainyard.files import RunDirectory
from trainyard.model.weights import pixels_in
from trainyard.run import pretrained
from trainyard.run.pretrained import (
    InitialWeights,
    put_initial_weights,
    resumed_weights,
    with_pixels,
)
from trainyard.world import World

FITTED = {"interpolation": "bilinear", "crop_pct": 0.95, "fit": "crop"}
OF_TIMM = {"mean": (0.5,) * 3, "std": (0.5,) * 3, **FITTED}
OF_HUB = {"mean": [0.1, 0.2, 0.3], "std": [0.4] * 3, "interpolation": "bicubic", "crop_pct": 0.8}
OF_DIGITS = {"mean": (0.31,) * 3, "std": (0.38,) * 3, **FITTED}
OF_DIGITS |= {"interpolation": "bicubic", "crop_pct": 1.0, "background": (124, 116, 104)}
KEYS = {
    "model.name": "test_resnet",
    "model.checkpoint": "timm",
    "data.image_size": "32",
    "data.threads": "1",
    "batch.size": "32",
    "run.length": "2 steps",
    "run.save_every": "1 step",
    "run.log_every": "1 step",
}


def recipe(tmp_path: Path, **more: str) -> RunConfig:
    path = tmp_path / "mine.toml"
    path.write_text("")
    return load_recipe(str(path), KEYS | {key.replace("__", "."): v for key, v in more.items()})


def of_run(folder: Path) -> dict[str, Any]:
    data = load_recipe(str(folder / "recipe.toml")).data
    return {key: getattr(data, key) for key in OF_TIMM}


def begun_with(path: Path | str, name: str = "test_resnet") -> dict[str, Any]:
    """The pixels of the weights. Without any, one more line of the log says so."""
    model = timm.create_model(name, num_classes=10)
    config = load_recipe("debug", {"model.name": name, "model.checkpoint": str(path)}).model
    begun = put_initial_weights(config, model, list("0123456789"))
    assert any("config.json" in line for line in begun.log) != bool(begun.pixels)
    return begun.pixels


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    there = timm.create_model("test_resnet").state_dict()
    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", lambda *_, **__: there)


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
def test_weights_of_timm_bring_theirs(digits: Path, tmp_path: Path) -> None:
    """They met images of the default mean, ImageNet's, without a word (BEiT, BiT, ViT)."""
    torch.set_num_threads(1)
    data = of_digits(digits)
    train_joined(override(recipe(tmp_path), data), tmp_path / "run", World())
    assert of_run(tmp_path / "run") == OF_TIMM
    asked = {f"data.{key}": value for key, value in OF_TIMM.items()}
    train_joined(override(recipe(tmp_path), data | asked), tmp_path / "asked", World())
    for kind in ("train", "val"):
        ours, theirs = (curve(tmp_path / name, kind, "loss") for name in ("run", "asked"))
        assert ours == theirs


@pytest.mark.usefixtures("hub")
def test_a_run_goes_on_with_those_it_began_with(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of the command line still has the defaults, which is no other recipe."""
    torch.set_num_threads(1)
    brought = {f"data.{key}": value for key, value in OF_TIMM.items()}
    config, folder = override(recipe(tmp_path), of_digits(digits)), tmp_path / "run"
    train_joined(config, folder, World())
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    monkeypatch.setattr(pretrained, "pretrained_weights", None)  # out of reach by now
    train_joined(config, folder, World())
    assert of_run(folder) == OF_TIMM
    with raises("run.recipe-differs") as caught:
        train_joined(override(config, brought | {"data.mean": [0.4] * 3}), folder, World())
    assert "data.mean" in str(caught.value.fields["changes"])


def test_what_the_recipe_sets_holds(tmp_path: Path) -> None:
    brought = InitialWeights("timm's", pixels=dict(OF_TIMM))
    config = with_pixels(recipe(tmp_path, data__std="1, 2, 3", data__crop_pct="0.875"), brought)
    found = config.data.model_dump()
    assert found.pop("background") == (124, 116, 104)
    # 0.875 is the default, written out.
    assert pixels_in(found) == OF_TIMM | {"std": (1, 2, 3), "crop_pct": 0.875}


def test_whole_images_see_all_of_them(tmp_path: Path) -> None:
    """A share of the short side is none of the whole image; timm's own shares hold."""
    assert recipe(tmp_path).data.crop_pct == 0.875
    assert recipe(tmp_path, data__fit="'pad'").data.crop_pct == 1
    center = InitialWeights("timm's", pixels=pixels_in({"crop_mode": "center", "crop_pct": 0.9}))
    border = InitialWeights("timm's", pixels=pixels_in({"crop_mode": "border", "crop_pct": 0.9}))
    for brought, fit, share in ((center, "crop", 0.9), (border, "pad", 0.9)):
        data = with_pixels(recipe(tmp_path), brought).data
        assert (data.fit, data.crop_pct) == (fit, share)
    data = with_pixels(recipe(tmp_path, data__fit="'pad'"), center).data
    assert (data.fit, data.crop_pct) == ("pad", 1)
    assert with_pixels(recipe(tmp_path, data__fit="'pad'"), border).data.crop_pct == 0.9
    with raises("recipe.keys-conflict"):
        recipe(tmp_path, data__fit="'pad'", data__decode="'gpu'")


def test_a_share_is_of_the_fit_that_it_was_set_for(tmp_path: Path) -> None:
    """A recipe that extends another one sets `data.fit`, or the command line does."""
    base = tmp_path / "base.toml"
    base.write_text("[data]\ncrop_pct = 0.9\n")
    for fit, share in (("pad", 1), ("squash", 1), ("crop", 0.9)):
        child = tmp_path / f"{fit}.toml"
        child.write_text(f"extends = 'base.toml'\n[data]\nfit = '{fit}'\n")
        changed = load_recipe(str(base), {"data.fit": fit})
        for config in (changed, load_recipe(str(child))):
            assert (config.data.fit, config.data.crop_pct) == (fit, share)
        asked = load_recipe(str(base), {"data.fit": fit, "data.crop_pct": "0.8"})
        assert asked.data.crop_pct == 0.8
        assert load_recipe(str(child), {"data.image_size": "32"}).data.crop_pct == share
    assert load_recipe(str(tmp_path / "pad.toml"), {"data.fit": "crop"}).data.crop_pct == 0.875


@pytest.mark.parametrize("mode", ["border", "squash"])
def test_a_share_goes_where_weights_bring_another_fit(mode: str, tmp_path: Path) -> None:
    """The recipe photos with weights of whole images was evaluated without their border."""
    own = recipe(tmp_path, data__crop_pct="0.95")
    for noted, share in (({}, 1), ({"crop_pct": 0.9}, 0.9)):
        brought = InitialWeights("timm's", pixels=pixels_in({"crop_mode": mode, **noted}))
        assert with_pixels(own, brought).data.crop_pct == share
        fit = "pad" if mode == "border" else mode
        asked = override(own, {"data.fit": fit, "data.crop_pct": 0.95})
        assert with_pixels(asked, brought).data.crop_pct == 0.95


def test_defaults_stay_defaults_where_other_keys_are_set(tmp_path: Path, digits: Path) -> None:
    """`--data` once wrote every key out, so that no default could be told from a wish."""
    config = on_data(recipe(tmp_path), [str(digits)])
    assert set(keys_set(config)["data"]) == {"image_size", "threads", "train", "val"}
    assert override(config, {}) == config


def test_other_channels_keep_their_own_mean(tmp_path: Path) -> None:
    brought = InitialWeights("timm's", pixels=dict(OF_TIMM))
    config = with_pixels(recipe(tmp_path, data__channels="1"), brought)
    assert config.data.mean == (0.449,)
    assert config.data.crop_pct == 0.95
    grey = InitialWeights("runs/grey", pixels={"mean": (0.286,), "std": (0.353,)})
    assert with_pixels(recipe(tmp_path, data__channels="1"), grey).data.mean == (0.286,)
    assert with_pixels(recipe(tmp_path), grey).data.mean == (0.485, 0.456, 0.406)


def test_values_that_no_recipe_can_have_are_one_line(tmp_path: Path) -> None:
    lanczos = InitialWeights("a.safetensors", pixels={"interpolation": "lanczos"})
    with raises("weights.invalid-pixels", source="a.safetensors"):
        with_pixels(recipe(tmp_path), lanczos)
    assert with_pixels(recipe(tmp_path, data__interpolation="bicubic"), lanczos)


def test_a_run_brings_its_own(finished: Path, tmp_path: Path) -> None:
    best = finished / "checkpoints" / "best"
    for path in (finished, best, best / "model.safetensors"):
        assert begun_with(path, "test_vit") == OF_DIGITS
    asked = resumed_weights(str(best), RunDirectory(tmp_path / "new"))
    assert asked.pixels == OF_DIGITS  # run.resume, in a directory without checkpoints
    exported = tmp_path / "away" / "digits.safetensors"
    exported.parent.mkdir()
    assert command("export", finished, exported) == 0
    pixels = begun_with(exported, "test_vit")
    assert (
        with_pixels(recipe(tmp_path), InitialWeights("it", pixels=pixels)).data.mean == (0.31,) * 3
    )


def test_a_file_has_those_of_the_config_beside_it_alone(tmp_path: Path) -> None:
    """As timm's hub keeps them. A bare file may have been trained with any."""
    weights = timm.create_model("test_resnet", num_classes=10).state_dict()
    save_file(weights, tmp_path / "model.safetensors")
    assert begun_with(tmp_path / "model.safetensors") == {}
    for tree in ({"pretrained_cfg": OF_HUB}, OF_HUB):  # of today, and of timm 0.6
        beside = {"architecture": "test_resnet", **tree}
        (tmp_path / "config.json").write_text(json.dumps(beside))
        assert begun_with(tmp_path / "model.safetensors") == OF_HUB
    for text in ('{"architecture": "bert"}', "[]", "{", '{"architecture": "test_resnet"}'):
        (tmp_path / "config.json").write_text(text)
        assert begun_with(tmp_path / "model.safetensors") == {}
