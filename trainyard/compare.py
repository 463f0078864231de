"""In what two recipes differ, and which keys matter where."""

from collections.abc import Iterable, Sequence

from trainyard.config import RunConfig, all_keys, explain_unknown_key
from trainyard.errors import RecipeError
from trainyard.monitor.config import WatchConfig

# Keys that change where or how a run is carried out, not what comes of it. All others must be
# the same when a run directory is resumed; the data is compared by its fingerprint.
PRACTICAL = frozenset(
    (
        *("data.train", "data.val", "data.max_bad", "data.threads", "data.stage", "data.stage_gb"),
        *("batch.micro", "model.compile", "model.grad_checkpointing", "optim.compile"),
        *("run.keep", "run.log_every", "run.save_every", "run.resume"),
        *("run.max_silence", "run.max_save"),
        *(f"watch.{key}" for key in WatchConfig.model_fields),
    )
)


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The keys, PRACTICAL ones aside, in which two recipes differ: "section.key: old -> new"."""
    changed = []
    for section in RunConfig.model_fields:
        before, after = getattr(old, section), getattr(new, section)
        for key in type(before).model_fields:
            was, now = getattr(before, key), getattr(after, key)
            if was != now and f"{section}.{key}" not in PRACTICAL:
                changed.append(f"{section}.{key}: {was} -> {now}")
    return changed


def keys_of(sections: Sequence[str]) -> list[str]:
    """The recipe keys of some sections."""
    return [key for key in all_keys() if key.partition(".")[0] in sections]


def check_keys(keys: Iterable[str], sections: Sequence[str], what: str) -> None:
    """RecipeError for a key of no recipe, or of other sections, which changes nothing there."""
    known = keys_of(sections)
    for key in keys:
        section = key.partition(".")[0]
        if section in sections and key not in known:
            raise RecipeError(explain_unknown_key(key, known))
        if section not in sections:
            raise RecipeError(
                f"{key} changes nothing about {what}; keys of {', '.join(sections)} may"
            )
