"""Which parameter has which rate and decay, in models of timm."""

import re
import tomllib
from functools import cache
from typing import Any

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn, optim

from tests.docs.pages import DOCS
from tests.errors import raises
from trainyard.config import check
from trainyard.optim.config import OptimConfig
from trainyard.optim.groups import (
    classifier_parameters,
    parameter_groups,
    parameter_shares,
    set_group_rates,
)

FAMILIES = ["test_resnet", "test_convnext", "test_vit"]


@cache
def timm_model(name: str) -> nn.Module:
    model: nn.Module = timm.create_model(name, num_classes=10)
    return model


def groups_of(model: nn.Module, **keys: Any) -> list[dict[str, Any]]:
    return parameter_groups(model, check({"optim": {"weight_decay": 0.05, **keys}}).optim)


def values(model: nn.Module, key: str, **keys: Any) -> dict[str, float]:
    """What each trained parameter has for a key of its group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = groups_of(model, **keys)
    found = {names[id(p)]: group[key] for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups)  # each in one
    return found


@pytest.mark.parametrize("name", [*FAMILIES, "test_efficientnet"])
def test_every_parameter_is_in_one_of_two_groups(name: str) -> None:
    model = timm_model(name)
    assert set(values(model, "lr")) == {name for name, _ in model.named_parameters()}
    assert sorted(group["weight_decay"] for group in groups_of(model)) == [0.0, 0.05]


def test_norms_biases_and_vectors_do_not_decay() -> None:
    found = values(timm_model("test_resnet"), "weight_decay")
    assert found["fc.weight"] == found["layer1.0.conv1.weight"] == 0.05
    assert found["fc.bias"] == found["layer1.0.bn1.weight"] == found["layer1.0.bn1.bias"] == 0
    assert all(found[name] == 0 for name in found if "bn" in name or name.endswith("bias"))


def test_what_the_model_exempts_does_not_decay() -> None:
    model: Any = timm_model("test_vit")
    found = values(model, "weight_decay")
    exempt = {name for name in model.no_weight_decay() if name in found}
    assert {"pos_embed", "cls_token"} <= exempt  # matrices by their shape
    assert {found[name] for name in exempt} == {0.0}


def test_a_list_of_patterns_exempts_too() -> None:
    class Exempting(nn.Sequential):
        def no_weight_decay(self) -> set[str]:
            return {"*.weight"}

    assert set(values(Exempting(nn.Linear(3, 3)), "weight_decay").values()) == {0.0}


def test_everything_decays_if_asked() -> None:
    [group] = groups_of(timm_model("test_vit"), decay="all")
    assert group["decay_scale"] == 1


def test_frozen_parameters_are_in_no_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert values(model, "weight_decay") == {"1.weight": 0.05, "1.bias": 0.0}
    model.requires_grad_(False)
    with raises("model.all-frozen"):
        groups_of(model)


def test_the_last_fitting_pattern_counts() -> None:
    model = timm_model("test_vit")
    scales = values(model, "lr_scale", lr_scale=["blocks.*: 0.5", "blocks.0.*:2e-1", "head.*: 10"])
    assert scales["blocks.1.attn.qkv.weight"] == 0.5
    assert scales["blocks.0.attn.qkv.weight"] == 0.2
    assert scales["head.bias"] == 10
    assert scales["pos_embed"] == 1


def test_a_decay_of_its_own_takes_the_place_of_the_rule() -> None:
    scales = values(timm_model("test_vit"), "decay_scale", decay_scale=["*.bias: 1", "head.*: 2"])
    assert scales["blocks.0.attn.qkv.bias"] == 1
    assert scales["head.weight"] == scales["head.bias"] == 2
    assert scales["norm.weight"] == 0


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("block.*", "blocks.*"),
        ("head.weigth", "head.weight"),
        ("pos_emb", "pos_embed"),
        ("qqq", None),
    ],
)
@pytest.mark.parametrize("key", ["lr_scale", "decay_scale"])
def test_a_pattern_that_fits_nothing_is_refused(key: str, pattern: str, hint: str | None) -> None:
    with raises("recipe.pattern-unmatched", key=f"optim.{key}", pattern=pattern) as caught:
        groups_of(timm_model("test_vit"), **{key: [f"{pattern}: 0.1"]})
    found = caught.value.fields["hint"]
    assert f"'{hint}'" in str(found) if hint else found == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_lower_rate_for_the_backbone(name: str) -> None:
    model: Any = timm_model(name)
    classifier = {id(parameter) for parameter in model.get_classifier().parameters()}
    scales = values(model, "lr_scale", backbone_lr=0.1)
    for parameter_name, parameter in model.named_parameters():
        assert scales[parameter_name] == (1 if id(parameter) in classifier else 0.1)


def test_a_distilled_model_has_two_classifiers() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=10)
    shapes = [tuple(parameter.shape) for parameter in classifier_parameters(model)]
    assert shapes == [(10, 192), (10,)] * 2


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_decay_is_timm_s(name: str) -> None:
    model = timm_model(name)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {
        names[id(parameter)]: group["lr_scale"]
        for group in param_groups_layer_decay(model, layer_decay=0.7)
        for parameter in group["params"]
    }
    assert values(model, "lr_scale", layer_decay=0.7) == expected
    assert max(expected.values()) == 1
    assert min(expected.values()) < 0.5
    # As many groups as there are layers, with and without decay: equal ones are one.
    assert len(groups_of(model, layer_decay=0.7)) <= 2 * len(set(expected.values()))


def convnext_layer(name: str) -> int:
    """The layer of a parameter in ConvNeXt's optim_factory, of 0 to 13, for timm's names."""
    kind, _, rest = name.partition(".")
    if kind != "stages":
        return 0 if kind == "stem" else 13
    stage, part, block = rest.split(".")[:3]
    if stage == "2" and part == "blocks":
        return 3 + int(block) // 3
    return {"0": 1, "1": 2, "2": 3, "3": 12}[stage]


def test_the_page_for_convnext_s_users_has_convnext_s_layers() -> None:
    """optim.layer_decay stood beside its --layer_decay, and is another: a stem 200 times slower."""
    page = (DOCS / "come-from" / "convnext-cluster.md").read_text()
    (recipe,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    scales = values(timm_model("convnext_tiny"), "lr_scale", **tomllib.loads(recipe)["optim"])
    expected = {name: 0.8 ** (13 - convnext_layer(name)) for name in scales}
    assert scales == pytest.approx(expected, rel=1e-4)
    assert len(set(expected.values())) == 8


def test_layer_decay_needs_layers() -> None:
    with raises("model.no-layer-decay"):
        groups_of(nn.Linear(2, 2), layer_decay=0.5)


def test_factors_multiply() -> None:
    keys: dict[str, Any] = {"backbone_lr": 0.5, "layer_decay": 0.7, "lr_scale": ["*.qkv.*: 3"]}
    scales = values(timm_model("test_vit"), "lr_scale", **keys)
    layers = values(timm_model("test_vit"), "lr_scale", layer_decay=0.7)
    assert scales["blocks.2.attn.qkv.weight"] == layers["blocks.2.attn.qkv.weight"] * 3 * 0.5
    assert scales["head.weight"] == 1


def test_muon_takes_what_maps_channels_to_channels() -> None:
    shares = parameter_shares(timm_model("test_convnext"), OptimConfig(name="muon"))
    assert shares["stem.0.weight"].rule == "muon"
    assert shares["stages.0.blocks.0.mlp.fc1.weight"].rule == "muon"
    assert shares["stages.0.blocks.0.conv_dw.weight"].rule == "adamw"  # [C, 1, 7, 7]
    assert shares["stages.0.blocks.0.mlp.fc1.bias"].rule == "adamw"
    assert shares["head.fc.weight"].rule == "adamw"
    vit = parameter_shares(timm_model("test_vit"), OptimConfig(name="muon"))
    assert vit["pos_embed"].rule == vit["cls_token"].rule == "adamw"
    assert {group["use_muon"] for group in groups_of(timm_model("test_vit"), name="muon")} == {
        *(True, False)
    }


def test_rates_are_shared_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    groups = groups_of(model, lr=0.4, lr_scale=["*.bias: 0.5"])
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.4, 0.05), (0.2, 0.0)]
    optimizer = optim.SGD(groups)
    optimizer.param_groups[1]["lr"] = torch.tensor(0.0)
    set_group_rates(optimizer, lr=0.1, weight_decay=0.01)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(optimizer.param_groups[1]["lr"], torch.tensor(0.05))
