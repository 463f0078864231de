"""How each parameter of a recipe's model is trained."""

import json

import pytest

from tests.errors import raises
from trainyard.cli.recipes import group_rows, parameter_rows
from trainyard.config import RunConfig, load_recipe
from trainyard.optim.optimizers import build_optimizer
from trainyard.run.model import build_run_model


def recipe(**keys: str) -> RunConfig:
    return load_recipe("digits", {key.replace("__", "."): text for key, text in keys.items()})


def test_a_row_for_each_parameter() -> None:
    config = recipe(optim__lr_scale='["conv1.*: 0.1"]')
    model = build_run_model(config, 10)
    rows = {row["parameter"]: row for row in parameter_rows(config, num_classes=10)}
    assert list(rows) == [name for name, _ in model.named_parameters()]
    assert rows["fc.weight"] == {
        "parameter": "fc.weight",
        "shape": list(dict(model.named_parameters())["fc.weight"].shape),
        "number": dict(model.named_parameters())["fc.weight"].numel(),
        "lr": 1.0,
        "decay": 1.0,
        "update": "adamw",
    }
    assert (rows["conv1.0.weight"]["lr"], rows["fc.bias"]["decay"]) == (0.1, 0.0)
    json.dumps(rows)


@pytest.mark.parametrize("name", ["muon", "lamb"])
def test_groups_are_the_optimizer_s(name: str) -> None:
    config = recipe(optim__name=name, model__freeze='["layer1.*"]', optim__layer_decay="0.7")
    optimizer = build_optimizer(build_run_model(config, 10), config.optim)
    groups = group_rows(parameter_rows(config, num_classes=10))
    frozen = [group for group in groups if group["update"] == "frozen"]
    assert [(group["lr"], group["decay"]) for group in frozen] == [(0.0, 0.0)]
    trained = sorted(
        (group["lr_scale"], group["decay_scale"], sum(p.numel() for p in group["params"]))
        for group in optimizer.param_groups
    )
    found = [group for group in groups if group["update"] != "frozen"]
    assert sorted((g["lr"], g["decay"], g["number"]) for g in found) == trained
    assert {group["update"] for group in found} == ({"muon", "adamw"} if name == "muon" else {name})
    assert groups == sorted(groups, key=lambda group: (-group["lr"], -group["decay"]))


def test_the_largest_model_takes_no_memory() -> None:
    """A ViT of two billion weights: 8 GB if they were made."""
    config = recipe(model__name="vit_gigantic_patch14_224", data__image_size="224")
    [decayed, undecayed] = group_rows(parameter_rows(config))
    assert decayed["number"] + undecayed["number"] > 1.8e9


def test_a_pattern_that_fits_nothing_is_refused() -> None:
    with raises("recipe.pattern-unmatched", key="optim.decay_scale", pattern="layr1.*"):
        parameter_rows(recipe(optim__decay_scale='["layr1.*: 0"]'))
