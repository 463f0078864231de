"""Suggestions ("did you mean …?") for commands, options, recipe keys, recipes and other names."""

import difflib
import re
from collections.abc import Iterable, Sequence

_CUTOFF = 0.7  # of difflib's ratio; suggestions below it would be guesses
_NUMBER = re.compile(r"\d+")

# Names that other trainers have for a recipe key, or for an option of `train` (without a dot).
# The form of the value follows a colon if it differs.
_FOREIGN = {
    "augment.cutmix": "cutmix_alpha",
    "augment.erasing": "random_erase reprob",
    "augment.erasing_mode": "remode",
    "augment.flip": "hflip",
    "augment.label_smoothing": "smoothing",
    "augment.mixup": "mixup_alpha",
    "augment.randaugment": "aa auto_augment",
    "average.batch_norm: sync": "sync_bn",
    "batch.precision: bf16": "amp",
    "batch.size": "b",
    "data": "data_dir data_path dataset",
    "data.channels": "in_chans",
    "data.eval_size": "val_crop_size",
    "data.image_size": "img_size train_crop_size",
    "data.repeats": "aug_repeats ra_reps",
    "data.threads": "j num_workers workers",
    "model.checkpoint": "initial_checkpoint",
    "model.checkpoint: timm": "pretrained",
    "model.name": "a arch model",
    "optim.betas": "opt_betas",
    "optim.clip_norm": "clip_grad clip_grad_norm",
    "optim.eps": "opt_eps",
    "optim.lr": "learning_rate",
    "optim.name": "opt optimizer",
    "optim.weight_decay": "wd",
    "run": "output output_dir",
    "run.eval_every: {} epochs": "val_interval",
    "run.keep": "checkpoint_hist",
    "run.length: {} epochs": "epochs max_epochs num_epochs",
    "run.log_every: {} steps": "log_interval print_freq",
    "schedule.min_lr": "lr_min",
    "schedule.name": "lr_scheduler sched",
    "schedule.warmup: {} epochs": "lr_warmup_epochs warmup_epochs",
    "watch.project": "wandb_project",
    "watch.tensorboard: true": "trackio",
    "watch.wandb: true": "log_wandb",
}
FOREIGN = {name: ours for ours, names in _FOREIGN.items() for name in names.split()}
"""Ours by the names of other trainers."""


def did_you_mean(word: str, known: Iterable[str], most: int = 3) -> str:
    """A suggestion to append to a message about an unknown word, or ""."""
    return suggestion_text(list(map(repr, closest(word, known, most))))


def suggestion_text(suggestions: Sequence[str]) -> str:
    """The text "; did you mean A, B or C?", or "" without a suggestion."""
    if not suggestions:
        return ""
    *others, last = suggestions
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def closest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that a word may stand for, the most likely first."""
    known = list(known)
    return (same(word, known) or similar(word, known))[:most]


def same(word: str, known: Iterable[str]) -> list[str]:
    """The known names that differ from a word only in case, punctuation or section.

    "resnet-50" is "resnet50"; "batch.momentum" and "momentum" are "optim.momentum".
    """
    if not _plain(word):
        return []
    known = list(known)
    found = [name for name in known if _plain(name) == _plain(word)]
    return found or [name for name in known if _plain(_last(name)) == _plain(_last(word))]


def similar(word: str, known: Iterable[str]) -> list[str]:
    """The known names that begin with a word, shortest first, or else the most similar one.

    For dotted names the last parts are compared; names in the word's section come first.
    """
    section, plain = word.rpartition(".")[0], _plain(_last(word))
    if not plain:
        return []
    names = sorted(known, key=lambda name: name.rpartition(".")[0] != section)
    longer = [name for name in names if _plain(_last(name)).startswith(plain)]
    if len(plain) > 2 and longer:
        return sorted(longer, key=len)
    numbers = set(_NUMBER.findall(word))  # resnet101 is not a misspelt resnet50
    names = [name for name in names if numbers <= set(_NUMBER.findall(name))]
    lasts = [_plain(_last(name)) for name in names]
    near = difflib.get_close_matches(plain, lasts, n=1, cutoff=_CUTOFF)
    return [names[lasts.index(last)] for last in near]


def near_pattern(pattern: str, names: Sequence[str]) -> str:
    """Like `did_you_mean`, for a pattern that matches none of some dotted parameter names."""
    modules = {name[:dot] for name in names for dot, sign in enumerate(name) if sign == "."}
    stem = pattern.strip().rstrip("*.")
    near = difflib.get_close_matches(stem, [*sorted(modules), *names], n=1)
    return suggestion_text([repr(f"{name}.*" if name in modules else name) for name in near])


def foreign(word: str) -> tuple[str, str] | None:
    """The key or option behind another trainer's name, and the form of its value."""
    target, _, form = FOREIGN.get(word.replace("-", "_").lower(), "").partition(": ")
    return (target, form or "{}") if target else None


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
