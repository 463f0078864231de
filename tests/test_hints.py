"""Suggestions: near misses, and other trainers' names for keys and options."""

import re
from collections import defaultdict

import pytest

from tests.docs.pages import DOCS, options_of_training, rows_beside_ours
from trainyard.config import RunConfig, all_keys, override
from trainyard.hints import (
    closest,
    foreign_names,
    from_other_trainer,
    hint_at_argument,
    ignoring_punctuation,
    near_pattern,
    nearest,
)

VALUES = {"augment.randaugment": "rand-m9-n2", "optim.betas": "0.9,0.95", "model.name": "resnet50"}
VALUES |= {"augment.label_smoothing": "0.1"}
VALUES |= {"optim.name": "adamw", "schedule.name": "cosine", "augment.erasing_mode": "pixel"}


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("resnet-50", ["resnet18", "resnet50"], ["resnet50"]),
        ("ResNet50", ["resnet50-a1", "resnet50-16ep", "vit"], ["resnet50-a1", "resnet50-16ep"]),
        ("resnet101", ["resnet50", "resnet152"], []),  # a different number is another thing
        ("n01440765", ["n01440764"], []),
        ("T4s", ["t4", "l4"], ["t4"]),
        ("batch.momentum", ["batch.size", "optim.momentum"], ["optim.momentum"]),
        ("optim.lrr", ["schedule.lrs", "optim.lr"], ["optim.lr"]),  # its own section first
        ("datas", ["data.std", "data.stage", "data"], ["data"]),
        ("siamese", ["siamese cat", "cat"], ["siamese cat"]),
        ("qqq", ["resnet50"], []),
        ("--", ["-", "a"], []),
        ("", ["a"], []),
    ],
)
def test_the_closest_names(word: str, known: list[str], meant: list[str]) -> None:
    assert closest(word, known) == meant


def test_names_that_are_the_same_come_before_similar_ones() -> None:
    assert ignoring_punctuation("val", ["value", "data.val"]) == ["data.val"]
    assert nearest("val", ["value", "data.val"]) == ["value", "data.val"]
    assert closest("val", ["value", "data.val"]) == ["data.val"]


def test_patterns_that_are_suggested_fit() -> None:
    names = ["stem.weight", "blocks.0.weight", "head.bias"]
    assert near_pattern("block.*", names) == "; did you mean 'blocks.*'?"
    assert near_pattern("head.bais", names) == "; did you mean 'head.bias'?"
    assert near_pattern("qqq", names) == ""


# Of timm, Hugging Face, Lightning, Ultralytics and torchvision; each was taken for another.
OF_OTHERS = """
warmup_ratio warmup_steps warmup_momentum warmup-lr batch size name eval eval_steps lrf fraction
train-split drop clip-mode decay-rate vflip lr_scheduler_type do_train norm-weight-decay weights
"""


@pytest.mark.parametrize("word", OF_OTHERS.split())
def test_another_quantity_is_no_hint(word: str) -> None:
    known = {option.lstrip("-") for option in options_of_training()} | all_keys().keys()
    assert hint_at_argument(f"--{word}", "1", known, "train") == ""


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("optim.momentun", "optim.momentum"),
        ("batch.sizee", "batch.size"),
        ("optim.lrr", "optim.lr"),
        ("data.trian", "data.train"),
        ("weight_decya", "optim.weight_decay"),
        ("image-sizes", "data.image_size"),
        ("schedule.warmup_from", "schedule.warmup_from"),
        ("epochs", "run.length"),
    ],
)
def test_a_misspelt_key_is_a_hint(word: str, meant: str) -> None:
    assert f"--{meant} " in hint_at_argument(f"--{word}", "1", all_keys(), "train")


@pytest.mark.parametrize("name", foreign_names())
def test_other_trainers_names_lead_to_values_that_are_valid(name: str) -> None:
    target, form = from_other_trainer(name.replace("_", "-"))
    if not target:  # no hint
        return
    if "." not in target:
        assert f"--{target}" in options_of_training() or target == "CUDA_VISIBLE_DEVICES"
        return
    is_alias = foreign_names()[name].startswith("alias ")
    assert is_alias or not ignoring_punctuation(name, all_keys()), "the key has that name itself"
    value = {target: form.format(VALUES.get(target, "1"))}
    override(
        RunConfig(), ({"optim.name": "adamw"} | value) if target != "optim.momentum" else value
    )


@pytest.mark.parametrize("trainer", ["timm", "torchvision"])
def test_the_documentation_maps_them_in_the_same_way(trainer: str) -> None:
    documented: defaultdict[str, set[str]] = defaultdict(set)
    for theirs, ours in rows_beside_ours(DOCS / "come-from" / f"{trainer}.md"):
        for flag in re.findall(r"`--([\w-]+)", theirs):
            documented[flag] |= set(re.findall(r"`(?:--)?([a-z_.]+)", ours))
    keys = {flag: from_other_trainer(flag)[0] for flag in documented}
    ours_of = {flag: key for flag, key in keys.items() if key and key != "CUDA_VISIBLE_DEVICES"}
    assert len(ours_of) > 10
    assert [flag for flag, key in ours_of.items() if key not in documented[flag]] == []
