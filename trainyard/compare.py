"""Differences between recipes, and groups of recipe keys."""

import shlex
from collections.abc import Collection, Iterable, Sequence

from trainyard.config import RunConfig, all_keys, load_recipe, unknown_key
from trainyard.errors import CheckpointError, RecipeError
from trainyard.files import RunDirectory
from trainyard.image_size import size_text
from trainyard.monitor.config import WatchConfig
from trainyard.printable import how_many

ROUNDING = (
    *("batch.micro", "model.compile", "model.grad_checkpointing", "optim.compile"),
    "average.accumulate",
)
"""Practical keys that change the order of sums, and with `batch.micro` what batch norm sees."""
# Keys that affect where or how a run executes, but not its results, except for ROUNDING. All others
# must stay equal when a run directory is resumed; the data is compared by its fingerprint.
PRACTICAL = frozenset(
    (
        *("data.train", "data.val", "data.corrections"),
        *("data.max_bad", "data.threads", "data.stage", "data.stage_gb"),
        *ROUNDING,
        *("run.keep", "run.log_every", "run.save_every", "run.resume"),
        *("run.hang_timeout", "run.max_save"),
        *(f"watch.{key}" for key in WatchConfig.model_fields),
    )
)

_OF_TRAINING = frozenset(
    f"data.{key}"
    for key in ("order", "samples", "locality", "weights", "balance", "repeats", "max_bad")
)
"""Keys of [data] that no evaluation and no prediction reads."""

SECTIONS = ("model", "data", "batch")
"""Sections with keys on which the scores of a trained model can depend."""

_OF_THE_END = ("length", "patience")  # keys of [run] that may change in a run which is named
_MOST_SHOWN = 4  # differences

REPEATS = ("run.seed", "data.val_fold")
"""Keys that repeat a run: sweeps over them are averaged."""


def differences(old: RunConfig, new: RunConfig, keys: Collection[str] | None = None) -> list[str]:
    """Differences between two recipes in some keys, by default in all but PRACTICAL ones.

    "section.key: old -> new" for each.
    """
    keys = [key for key in all_keys() if key not in PRACTICAL] if keys is None else keys
    changed = []
    for section in RunConfig.model_fields:
        before, after = getattr(old, section), getattr(new, section)
        for key in type(before).model_fields:
            was, now = getattr(before, key), getattr(after, key)
            if was != now and f"{section}.{key}" in keys:
                changed.append(f"{section}.{key}: {was} -> {now}")
    return changed


def check_same_recipe(
    folder: RunDirectory, config: RunConfig, left_out: Collection[str] = ()
) -> None:
    """CheckpointError for a directory with a run of another recipe, in other keys than some."""
    option = f"--run.resume {shlex.quote(str(folder.path))}"
    if not folder.recipe.exists():
        raise CheckpointError(
            "run.recipe-missing",
            "{path} is missing, which records the recipe of the run: restore it, or start another "
            "run from the checkpoint: --run NEW {option}",
            path=folder.recipe,
            option=option,
        )
    recorded = load_recipe(str(folder.recipe))
    keys = [key for key in all_keys() if key not in PRACTICAL and key not in left_out]
    changed = differences(recorded, config, keys)
    ends = [
        f"--run.{key} {shlex.quote(f'{now}'.lower())}"
        for key in _OF_THE_END
        if (now := getattr(config.run, key)) != getattr(recorded.run, key)
    ]
    is_of_end = len(ends) == len(changed)
    if changed and not (is_of_end and folder.is_named):
        hint = ""
        if is_of_end:
            again = f"trainyard train {shlex.quote(str(folder.path))} {' '.join(ends)}"
            hint = f"; to train on from its end: {again}"
        count = len(changed) - _MOST_SHOWN
        others = f"; and {how_many(count, 'other key')}" if count > 0 else ""
        raise CheckpointError(
            "run.recipe-differs",
            "{path} holds a run of another recipe ({changes}): use the same recipe to resume it, "
            "or choose another directory with --run{hint}",
            path=folder.path,
            changes="; ".join(changed[:_MOST_SHOWN]) + others,
            hint=hint,
        )


def keys_of(sections: Sequence[str]) -> list[str]:
    """The recipe keys of some sections."""
    return [key for key in all_keys() if key.partition(".")[0] in sections]


def check_keys(
    keys: Iterable[str],
    what: str,
    sections: Sequence[str] = SECTIONS,
    of_model: Sequence[str] = ("name", "options", "channels_last"),
) -> None:
    """RecipeError for an unknown key, or one without effect: of other sections, or for training.

    `of_model`: the keys of [model] with an effect.
    """
    known = keys_of(sections)
    for key in keys:
        section, _, name = key.partition(".")
        if section in sections and key not in known:
            raise unknown_key(key, known)
        is_of_training = key in _OF_TRAINING or (section == "model" and name not in of_model)
        if section not in sections or is_of_training:
            raise RecipeError(
                "recipe.key-without-effect",
                "{key} changes nothing about {purpose}; some keys of {sections} do",
                key=key,
                purpose=what,
                sections=", ".join(sections),
            )


def check_size(config: RunConfig, keys: Iterable[str], what: str) -> None:
    """RecipeError if data.image_size is among the keys, and the recipe has data.eval_size."""
    size = config.data.eval_size
    if "data.image_size" in keys and size is not None:
        raise RecipeError(
            "recipe.size-without-effect",
            "data.image_size changes nothing about {purpose}, whose images have data.eval_size = "
            "{eval_size}: set data.eval_size",
            purpose=what,
            eval_size=size_text(size),
        )
