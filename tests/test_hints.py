"""Suggestions: near misses, and other trainers' names for keys and options."""

import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.docs.pages import (
    DOCS,
    check_mention,
    options_of,
    options_of_training,
    rows_beside_ours,
)
from tests.errors import raises
from trainyard import hints
from trainyard.command_line import COMMANDS, _Parser, _parser
from trainyard.compare import keys_of
from trainyard.config import RunConfig, all_keys, override
from trainyard.hints import (
    ALIASES,
    answers_of,
    closest,
    foreign_names,
    from_other_trainer,
    hint_at_argument,
    ignoring_punctuation,
    instead_of,
    near_pattern,
    nearest,
    with_our_names,
)

ANSWERED = {name for command in COMMANDS for name in answers_of(command)}
VALUES = {"augment.randaugment": "rand-m9-n2", "optim.betas": "0.9,0.95", "model.name": "resnet50"}
VALUES |= {"augment.label_smoothing": "0.1", "loss.bce_threshold": "0.2", "data.val_share": "0.1"}
VALUES |= {"augment.mix_mode": "pair", "data.interpolation": "bicubic"}
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


KNOWN = ("data", "run", "gpus", "json", "quiet", "plain", "all-ranks", *all_keys())  # of `train`
# Words that follow a key in a text.
WORDS = ["and", "begins", "draws", "for", "has", "is", "of", "seconds"]
WORDS += ["sets", "step", "takes", "weighs", "module:function"]
# What a value needs beside it.
BESIDE = {
    "augment.mix_mode": {"augment.mixup": "1"},
    "augment.switch_prob": {"augment.cutmix": "1", "augment.mixup": "1"},
    "loss.bce_threshold": {"loss.name": "bce"},
    "model.ema_cpu": {"model.ema_decay": "0.9"},
    "schedule.gamma": {"schedule.name": "step", "schedule.milestones": '["30 epochs"]'},
    "schedule.milestones": {"schedule.name": "step"},
    "schedule.warmup_from": {"schedule.warmup": "1 epoch"},
}
FLAGS = Path(__file__).parent / "cli" / "foreign_flags"


@pytest.mark.parametrize("trainer", [path.stem for path in FLAGS.iterdir()])
def test_every_flag_of_other_trainers_has_an_answer(trainer: str) -> None:
    """An alias, a line to type, or what to do instead: none is guessed."""
    flags = (FLAGS / f"{trainer}.txt").read_text().split()
    assert flags == sorted(set(flags)) and len(flags) > 50
    aliases = {flag for flag in flags if with_our_names(["train", f"--{flag}", "1"])[1]}
    asked = {flag for flag in flags if hint_at_argument(f"--{flag}", "1", KNOWN, "train")}
    assert {*flags} - aliases - asked - {"data"} == set()
    others = asked - foreign_names().keys()
    assert {flag for flag in others if not ignoring_punctuation(flag, KNOWN)} == set()


def test_the_table_is_read_for_an_unknown_word_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be parsed at each start of a command."""
    monkeypatch.setattr(hints, "foreign_names", lambda: pytest.fail("is read"))
    words = ["train", "debug", "--epochs", "3", "--data", "x", "--optim.lr", "1", "--help"]
    assert with_our_names(words)[0][2] == "--run.length=3 epochs"


def check_value(key: str, text: str) -> None:
    beside = BESIDE.get(key, {}) | ({} if key == "optim.momentum" else {"optim.name": "adamw"})
    override(RunConfig(), beside | {key: text})


def test_what_to_do_instead_is_valid() -> None:
    """Keys with their values, and commands. No name stands twice."""
    table = tomllib.loads(Path(hints.__file__).with_name("foreign_names.toml").read_text("utf-8"))
    texts, _, commands = table.pop("instead"), table.pop("at"), table.pop("commands")
    assert commands.keys() <= COMMANDS.keys()
    names = [*table, *ALIASES, *(name for names in texts.values() for name in names.split())]
    assert len(names) == len({*names})
    for key, value in re.findall(r"--(\w+\.\w+)(?: ('[^']*'|[\w.,:-]*\w))?", "\n".join(texts)):
        assert key in all_keys()
        if value and not value.isupper() and value not in WORDS:
            check_value(key, value.strip("'"))
    named = re.findall(r"trainyard (\w+)", "\n".join(texts))
    assert {*named} <= COMMANDS.keys()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("--per_device_train_batch_size", "32"), "on all devices together"),
        (("--warmup_ratio", "0.1"), "--schedule.warmup '10%'"),
        (("--compile",), "--optim.compile"),
        (("--mixup", "0.2"), "--augment.mixup 0.2 (alpha"),
        (("epochs=3",), "--run.length '3 epochs'"),
        (("imgsz=96",), "--data.image_size 96"),
    ],
)
def test_another_meaning_is_said(words: tuple[str, ...], meant: str) -> None:
    assert meant in hint_at_argument(words[0], [*words, None][1], KNOWN, "train")


@pytest.mark.parametrize(
    ("key", "code", "hint"),
    [
        ("trainer.max_epochs", "recipe.unknown-section", "run.length"),
        ("trainer.strategy", "recipe.unknown-section", "average.name"),
        ("optim.warmup_ratio", "recipe.unknown-key", "schedule.warmup"),
        ("trainer.nonsense", "recipe.unknown-section", "recipes --keys"),
    ],
)
def test_a_key_of_another_trainer_has_the_same_answer(key: str, code: str, hint: str) -> None:
    with raises(code) as caught:
        override(RunConfig(), {key: "1"})
    assert hint in str(caught.value.fields["hint"])


@pytest.mark.parametrize("word", ["decay", "size", "order", "every", "evaluate_all", "drop_last_n"])
def test_another_quantity_is_no_hint(word: str) -> None:
    assert hint_at_argument(f"--{word}", "1", KNOWN, "train") == ""


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
    if not target or instead_of(name):
        return
    if "." not in target:
        assert f"--{target}" in options_of_training() or target in ANSWERED
        return
    assert name in ALIASES or not ignoring_punctuation(name, all_keys()), (
        "the key has that name itself"
    )
    check_value(target, form.format(VALUES.get(target, "1")))


def parsers(command: str) -> list[_Parser]:
    """The parser of a command, or those of its own commands."""
    parser, _ = _parser().commands[command]
    return [parser.commands[path][0] for path in parser.paths() if path in parser.commands] or [
        parser
    ]


@pytest.mark.parametrize("command", [command for command in COMMANDS if answers_of(command)])
def test_each_answer_of_a_command_is_given(command: str) -> None:
    """With options that a parser of the command has: no other answer comes before it."""
    of_training = [*RunConfig.model_fields]
    for name, text in answers_of(command).items():
        for line in re.findall(r"trainyard [^;?]+", text):
            check_mention(re.sub(r"{\w+}", "X", line.partition(" leaves")[0]))
        shown = re.sub(r"{\w+}", "7", text)
        for parser in parsers(command):
            given = parser.get_default("takes_overrides")
            keys = keys_of(of_training if given is True else given or ())
            known = [*(option[2:] for option in options_of(parser)), *keys]
            if hint_at_argument(f"--{name}", "7", known, command) == f"; {shown}":
                break
        else:
            targets = {from_other_trainer(each)[0] for each in foreign_names()}
            assert name in targets, (name, text)


@pytest.mark.parametrize("trainer", ["timm", "torchvision"])
def test_the_documentation_maps_them_in_the_same_way(trainer: str) -> None:
    documented: defaultdict[str, set[str]] = defaultdict(set)
    for theirs, ours in rows_beside_ours(DOCS / "come-from" / f"{trainer}.md"):
        for flag in re.findall(r"`--([\w-]+)", theirs):
            documented[flag] |= set(re.findall(r"`(?:--)?([a-z_.]+)", ours))
    keys = {flag: from_other_trainer(flag)[0] for flag in documented}
    ours_of = {
        flag: key
        for flag, key in keys.items()
        if key not in ("", ";") and key != "CUDA_VISIBLE_DEVICES"
    }
    assert len(ours_of) > 10
    assert [flag for flag, key in ours_of.items() if key not in documented[flag]] == []
