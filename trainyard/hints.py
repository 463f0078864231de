"""Suggestions ("did you mean …?") for commands, options, recipe keys, recipes and other names."""

import difflib
import re
from collections.abc import Iterable, Sequence

_CUTOFF = 0.7  # of difflib's ratio; suggestions below it would be guesses
_NUMBER = re.compile(r"\d+")

# Options of timm, torchvision and the like under another name: a recipe key, or without a dot an
# option of `train`. After a colon: the form of the value, if it differs.
_FOREIGN = {
    "aa": "augment.randaugment",
    "amp": "batch.precision: bf16",
    "arch": "model.name",
    "a": "model.name",
    "aug_repeats": "data.repeats",
    "auto_augment": "augment.randaugment",
    "b": "batch.size",
    "checkpoint_hist": "run.keep",
    "clip_grad": "optim.clip_norm",
    "clip_grad_norm": "optim.clip_norm",
    "cutmix_alpha": "augment.cutmix",
    "data_dir": "data",
    "data_path": "data",
    "dataset": "data",
    "epochs": "run.length: {} epochs",
    "hflip": "augment.flip",
    "img_size": "data.image_size",
    "in_chans": "data.channels",
    "initial_checkpoint": "model.checkpoint",
    "j": "data.threads",
    "learning_rate": "optim.lr",
    "log_interval": "run.log_every: {} steps",
    "log_wandb": "watch.wandb: true",
    "lr_min": "schedule.min_lr",
    "lr_scheduler": "schedule.name",
    "lr_warmup_epochs": "schedule.warmup: {} epochs",
    "max_epochs": "run.length: {} epochs",
    "mixup_alpha": "augment.mixup",
    "model": "model.name",
    "num_epochs": "run.length: {} epochs",
    "num_workers": "data.threads",
    "opt": "optim.name",
    "opt_betas": "optim.betas",
    "opt_eps": "optim.eps",
    "optimizer": "optim.name",
    "output": "run",
    "output_dir": "run",
    "pretrained": "model.checkpoint: timm",
    "print_freq": "run.log_every: {} steps",
    "ra_reps": "data.repeats",
    "random_erase": "augment.erasing",
    "remode": "augment.erasing_mode",
    "reprob": "augment.erasing",
    "sched": "schedule.name",
    "smoothing": "augment.label_smoothing",
    "sync_bn": "average.batch_norm: sync",
    "train_crop_size": "data.image_size",
    "val_crop_size": "data.eval_size",
    "val_interval": "run.eval_every: {} epochs",
    "wandb_project": "watch.project",
    "warmup_epochs": "schedule.warmup: {} epochs",
    "wd": "optim.weight_decay",
    "workers": "data.threads",
}


def did_you_mean(word: str, known: Iterable[str], most: int = 3) -> str:
    """A suggestion to append to a message about an unknown word, or ""."""
    return asked(list(map(repr, closest(word, known, most))))


def asked(suggestions: Sequence[str]) -> str:
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

    Without one, the longest of at least 3 letters that the word begins with: --output is --out.

    For dotted names the last parts are compared; names in the word's section come first.
    """
    section, plain = word.rpartition(".")[0], _plain(_last(word))
    names = sorted(known, key=lambda name: name.rpartition(".")[0] != section)
    longer = [name for name in names if _plain(_last(name)).startswith(plain)]
    if not plain:
        return []
    if longer and len(plain) > 2:
        return sorted(longer, key=len)
    lasts: dict[str, str] = {}
    for name in names:
        lasts.setdefault(_plain(_last(name)), name)
    numbers = set(_NUMBER.findall(word))  # resnet101 is not a misspelt resnet50
    lasts = {last: name for last, name in lasts.items() if numbers <= set(_NUMBER.findall(name))}
    near = difflib.get_close_matches(plain, lasts, n=1, cutoff=_CUTOFF)
    begun = [last for last in lasts if len(last) > 2 and plain.startswith(last)]
    return [lasts[last] for last in near or sorted(begun, key=len)[-1:]]


def near_pattern(pattern: str, names: Sequence[str]) -> str:
    """Like `did_you_mean`, for a pattern that matches none of some dotted parameter names."""
    stem = pattern.strip().rstrip("*.")
    modules = {name[:dot] for name in names for dot, sign in enumerate(name) if sign == "."}
    near = difflib.get_close_matches(stem, [*sorted(modules), *names], n=1)
    return asked([repr(f"{name}.*" if name in modules else name) for name in near])


def foreign(word: str) -> tuple[str, str] | None:
    """The key or option behind another trainer's name, and the form of its value."""
    target, _, form = _FOREIGN.get(word.replace("-", "_").lower(), "").partition(": ")
    return (target, form or "{}") if target else None


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
