"""Each recipe that names a source, against docs/_sources.toml, and against the originals.

Several heads said "every setting is the published one" where it was not.
"""

import runpy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.scheduler import create_scheduler_v2
from torch import nn

from tests.data.batches import batch_of_images
from tests.docs.pages import DOCS
from trainyard.config import RunConfig, all_keys, builtin_recipes, keys_set, load_recipe
from trainyard.model.build import build_model
from trainyard.optim.groups import parameter_shares
from trainyard.run.build import build_run_course, build_run_schedule
from trainyard.training.losses import build_loss

beside_source = runpy.run_path(str(DOCS / "_reference.py"))["beside_source"]

# These name no source, or one for a part of their settings only.
OF_OUR_OWN = {"debug", "digits", "fashion-mnist", "photos", "vit-s16-muon"}
OF_OUR_OWN |= {"finetune", "finetune-small"}
NAMES = [name for name in builtin_recipes() if name not in OF_OUR_OWN]
# Where data lie, and how often a run evaluates, changes no result.
NO_RESULT = {"data.train", "data.val", "run.eval_every", "run.save_every", "run.log_every"}
IMAGENET = 1_281_167


def value_of(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_settings_of_its_source(name: str) -> None:
    config, beside = load_recipe(name), beside_source(name)
    assert {key: value_of(config, key) for key in beside["same"]} == beside["same"]
    for setting, row in beside["differs"].items():
        is_key = setting in all_keys()
        assert set(row) == {"theirs", "why"} | (set() if is_key else {"ours"}), setting
        if is_key:
            assert str(value_of(config, setting)) != row["theirs"], f"{setting} is the same"


@pytest.mark.parametrize("name", NAMES)
def test_no_key_of_it_is_left_out(name: str) -> None:
    beside = beside_source(name)
    held = beside["same"].keys() | beside["differs"].keys()
    sections = keys_set(load_recipe(name)).items()
    found = {f"{section}.{key}" for section, keys in sections for key in keys}
    assert found - held - NO_RESULT == set()


def test_every_recipe_is_held_against_a_source_or_is_of_our_own() -> None:
    assert all(beside_source(name)["source"] for name in NAMES)
    assert all(beside_source(name) == {} for name in OF_OUR_OWN)


# --- against the originals ---


def rates(name: str, steps_per_epoch: int) -> Iterator[float]:
    """The learning rate of each epoch's first step."""
    config = load_recipe(name)
    course = build_run_course(config, steps_per_epoch * config.batch.size)
    schedule = build_run_schedule(config, course)
    return (schedule(step).lr for step in range(0, course.num_steps, steps_per_epoch))


@pytest.mark.parametrize(
    ("name", "lr", "epochs", "warmup_lr", "min_lr"),
    [
        ("resnet50-a1", 5e-3, 600, 1e-4, 1e-6),
        ("resnet50-a2", 5e-3, 300, 1e-4, 1e-6),
        ("resnet50-a3", 8e-3, 100, 1e-4, 1e-6),
        ("deit3-small", 4e-3, 800, 1e-6, 1e-5),
    ],
)
def test_rates_are_those_of_timm_s_scheduler(
    name: str, lr: float, epochs: int, warmup_lr: float, min_lr: float
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr)
    keys: dict[str, Any] = {"warmup_lr": warmup_lr, "min_lr": min_lr, "warmup_epochs": 5}
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=epochs, **keys)
    expected = []
    for epoch in range(epochs):
        scheduler.step(epoch)
        expected.append(optimizer.param_groups[0]["lr"])
    np.testing.assert_allclose(list(rates(name, 3)), expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["resnet50-a1", "resnet50-a2", "resnet50-a3"])
def test_the_ends_of_the_rates_are_of_the_release_that_is_named(name: str) -> None:
    """timm 0.5.4's of the time of the paper: train.py of 1.0 warms up from 1e-5 and decays to 0."""
    config = load_recipe(name)
    assert config.schedule.warmup_from * config.optim.lr == pytest.approx(1e-4)
    assert config.schedule.min_lr == 1e-6
    assert "timm 0.5.4, train.py" in beside_source(name)["source"]


@pytest.mark.parametrize(
    ("name", "epochs", "ramp"),
    [
        ("resnet50-16ep", 16, (11, 13)),
        ("resnet50-24ep", 24, (17, 20)),
        ("resnet50-32ep", 32, (23, 27)),
        ("resnet50-40ep", 40, (29, 34)),
        ("resnet50-88ep", 88, (65, 76)),
    ],
)
def test_ffcv_s_sizes_and_rates_written_out(name: str, epochs: int, ramp: tuple[int, int]) -> None:
    config = load_recipe(name)
    course = build_run_course(config, 10 * 4096)
    sizes = [course.phase(10 * epoch).image_size for epoch in range(epochs)]
    ramped = np.interp(range(epochs), ramp, [160, 192])
    assert sizes == [int(np.round(size / 32)) * 32 for size in ramped]
    expected = np.interp(range(epochs), [0, 2, epochs], [1.7e-4, 1.7, 0])
    np.testing.assert_allclose(list(rates(name, 10)), expected, rtol=1e-9)


@pytest.mark.parametrize("per_recipe", ["resnet50-16ep", "resnet50-step"])
def test_decay_is_the_source_s_on_torchvision_s_resnet(per_recipe: str) -> None:
    """FFCV exempts what is called bn: not the norms of shortcuts, nor fc.bias."""
    config = load_recipe(per_recipe)
    with torch.device("meta"):
        model, theirs = timm.create_model(config.model.name), torchvision.models.resnet50()
    shares = parameter_shares(model, config.optim)
    decayed = {name for name, _ in theirs.named_parameters()}
    if per_recipe == "resnet50-16ep":
        decayed = {name for name in decayed if "bn" not in name}
    assert {name for name, share in shares.items() if share.decay_scale} == decayed


@cache
def with_ten_classes(name: str) -> nn.Module:
    config = load_recipe(name).model
    with torch.device("cpu" if name == "deit3-small" else "meta"):
        return build_model(config, num_classes=10, image_size=224)


@pytest.mark.parametrize("name", [name for name in NAMES if "lamb-" in name])
def test_a_vit_of_colossal_ai_has_the_dropouts_of_timm_0_4(name: str) -> None:
    """After positions, attention and both layers of each MLP; none before the classifier."""
    model: Any = with_ten_classes(name)
    found = [n for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p == 0.1]
    each = ("attn.proj_drop", "mlp.drop1", "mlp.drop2")
    depth = len(model.blocks)
    assert found == ["pos_drop", *(f"blocks.{n}.{where}" for n in range(depth) for where in each)]
    assert not any(m.p for n, m in model.named_modules() if n == "head_drop")


def test_layer_scale_and_loss_of_deit_3() -> None:
    """Every class that is mixed in is a full target; its layers begin at 1e-4."""
    config, model = load_recipe("deit3-small"), with_ten_classes("deit3-small")
    scales = [p for name, p in model.named_parameters() if name.endswith(".gamma")]
    assert len(scales) == 24
    assert all(bool((scale == 1e-4).all()) for scale in scales)
    logits, labels = torch.randn(4, 6), torch.arange(4)
    batch = batch_of_images(torch.empty(4, 0), labels)
    batch = replace(batch, mixed_labels=labels.flip(0), lam=torch.full((4,), 0.7))
    loss = build_loss(config.loss, config.augment.label_smoothing, teacher=None, mixes=True)
    targets = torch.zeros(4, 6).scatter_(1, labels[:, None], 1.0)
    targets.scatter_(1, labels.flip(0)[:, None], 1.0)
    expected = nn.functional.binary_cross_entropy_with_logits(logits, targets)
    torch.testing.assert_close(loss(logits, batch).mean(), expected)


def test_airbench_s_rates_written_out() -> None:
    """Its constants belong to the sum of a batch's losses, and its decay to no rate."""
    scale = 1024 * (1 + 1 / (1 - 0.85))
    for name, lr, decay, last in (("cifar10-94", 11.5, 0.0153, 0.07), ("cifar10-96", 9, 0.012, 0)):
        config = load_recipe(name)
        assert config.optim.lr == pytest.approx(1024 * lr / scale, rel=5e-3)
        assert config.optim.weight_decay == pytest.approx(decay / lr, rel=1e-3)
        assert config.schedule.min_lr == pytest.approx(last * config.optim.lr, rel=1e-3)
        model = build_model(config.model, num_classes=10, image_size=32)
        shares = parameter_shares(model, config.optim)
        # Each parameter shrinks by decay * rate: as fast with 64 times the rate, all that learn.
        learn = [name for name, p in model.named_parameters() if p.requires_grad]
        assert {shares[name].lr_scale * shares[name].decay_scale for name in learn} == {1.0}
