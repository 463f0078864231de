"""Initial weights of a run: from another run, a file, or timm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from trainyard.config import RunConfig, load_recipe, override
from trainyard.errors import CheckpointError, RecipeError
from trainyard.files import RunDirectory, find_checkpoint, read_json
from trainyard.model.adapt import adapt_weights
from trainyard.model.config import ModelConfig
from trainyard.model.weights import (
    LoadedWeights,
    Pixels,
    pixels_in,
    pretrained_weights,
    read_weights,
)
from trainyard.training import checkpoint, saver
from trainyard.training.weight_names import prefix_of

NEW_CLASSES = "new_classes"
"""The key in environment.json of the classes that the initial weights of a run did not have."""


@dataclass(frozen=True)
class InitialWeights:
    """Where the weights of a run come from."""

    description: str = ""
    """A description for users; empty for weights that are drawn at random."""
    log: Sequence[str] = ()
    """How they were adapted, as sentences."""
    pixels: Pixels = field(default_factory=dict)
    new_classes: Sequence[str] = ()
    """Classes that they lack, if they have others of the data."""


def put_initial_weights(
    config: ModelConfig, model: nn.Module, classes: Sequence[str]
) -> InitialWeights:
    """Load the weights of `model.checkpoint` into the model."""
    if config.checkpoint is None:
        return InitialWeights()
    source = _renamed(initial_source(config), config.class_names, classes)
    log, _ = adapt_weights(
        model, source, classes=classes, name=config.name, prefix=config.checkpoint_prefix
    )
    if not source.pixels:
        log = [
            *log,
            "how images were prepared for these weights is not known, as neither they nor a "
            f"config.json of {config.name} beside them says it: data.mean and data.std are the "
            "recipe's",
        ]
    new = [name for name in classes if name not in (source.classes or ())]
    new = new if len(new) < len(classes) else []
    return InitialWeights(source.description, log, source.pixels, new)


def _renamed(
    source: LoadedWeights, names: Mapping[str, str], classes: Sequence[str]
) -> LoadedWeights:
    """The weights with the names that `model.class_names` gives to their classes."""
    if not names:
        return source
    old = source.classes or ()
    new = [names.get(name, name) for name in old]
    wrong = [
        *((name, f"{source.description} has no such class") for name in names if name not in old),
        *((name, "the data has no such class") for name in names.values() if name not in classes),
        *((name, "it is that of another class too") for name in new if new.count(name) > 1),
    ]
    if wrong:
        raise CheckpointError(
            "weights.wrong-class-name",
            "model.class_names: {name!r}: {reason}; write names of the initial weights and names "
            'of the data: {{"old name" = "new name"}}',
            name=wrong[0][0],
            reason=wrong[0][1],
        )
    return replace(source, classes=new)


def resumed_weights(setting: str, folder: RunDirectory) -> InitialWeights:
    """The beginning of a run that goes on from a checkpoint: its own, or else `run.resume`'s."""
    if saver.has_any(folder.checkpoints):
        return InitialWeights(
            "a checkpoint of this run", pixels=pixels_in(_noted_in_run(folder.path))
        )
    path = Path(setting)
    run = path if RunDirectory(path).recipe.is_file() else path.resolve().parent.parent
    return InitialWeights(setting, pixels=pixels_in(_noted_in_run(run)))


def with_pixels(config: RunConfig, initial: InitialWeights) -> RunConfig:
    """The recipe with the pixels of its weights, but for the keys that it sets itself.

    A `crop_pct` stays with its `fit`, of the recipe or the weights. Mean and std of other channels
    than the recipe's are left out. CheckpointError if a value is none for a recipe.
    """
    known, pixels = config.data.model_fields_set, initial.pixels
    known = known - {"range"} if config.data.range == "auto" else known
    has_other_fit = pixels.get("fit", "crop") != config.data.fit
    if has_other_fit and "fit" not in known:
        known, pixels = known - {"crop_pct"}, {"crop_pct": 1.0} | pixels
    brought = {
        f"data.{key}": value
        for key, value in pixels.items()
        if key not in known
        and not (key == "crop_pct" and has_other_fit and "fit" in known)
        and not (key in ("mean", "std", "bands") and len(value) != config.data.channels)
    }
    try:
        return override(config, brought)
    except RecipeError as error:
        raise CheckpointError(
            "weights.invalid-pixels",
            "{source} was trained with {error}: set the key in the recipe",
            source=initial.description,
            error=error,
        ) from None


def initial_source(config: ModelConfig) -> LoadedWeights:
    """The weights that `model.checkpoint` names. CheckpointError if there are none."""
    setting = config.checkpoint
    assert setting is not None
    if setting == "timm":
        return pretrained_weights(config.name)
    path = Path(setting)
    if path.is_file():
        source = read_weights(path, config.checkpoint_key)
        return source if source.pixels else replace(source, noted=_noted_beside(path, config.name))
    if not path.is_dir():
        raise CheckpointError(
            "weights.not-found",
            "model.checkpoint = {value!r}: no such run, checkpoint or file",
            value=setting,
        )
    if config.checkpoint_key is not None:
        raise CheckpointError(
            "weights.entry-of-folder",
            "model.checkpoint_key: {path} is a folder, which has no entries",
            path=setting,
        )
    return _source_in(path)


def _source_in(folder: Path) -> LoadedWeights:
    """The weights of a checkpoint, or of a run's best or latest; see `choose_weights`."""
    run, path = find_checkpoint(folder)
    checkpoint.check(path)
    progress = checkpoint.read_progress(path)
    name = choose_weights(path, progress)
    kind = "the moving average of the weights" if name else "the weights"
    of = name.partition("-")[2]
    description = f"{path}, {kind}{f' of decay {of}' if of else ''}"
    weights = checkpoint.load_weights(path, name)
    return LoadedWeights(weights, description, progress["classes"], noted=_noted_in_run(run))


def _noted_in_run(run: Path) -> dict[str, Any]:
    recipe = RunDirectory(run).recipe
    return load_recipe(str(recipe)).data.model_dump() if recipe.is_file() else {}


def _noted_beside(path: Path, name: str) -> dict[str, Any]:
    """The [data] section of the run that a file is of, or else timm's configuration beside it."""
    if (path.parent / "manifest.json").is_file():
        return _noted_in_run(find_checkpoint(path.parent)[0])
    try:
        beside = read_json(path.parent / "config.json")
        is_of_model = beside["architecture"] == name.partition(".")[0]
        return dict(beside.get("pretrained_cfg", beside)) if is_of_model else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def choose_weights(path: Path, progress: dict[str, Any], ema: bool | float | None = None) -> str:
    """The name of the weights to use in a checkpoint at `path`; see training/weight_names.py.

    `ema`: False for the weights themselves, True for their moving average, a decay for one of
    several. By default the average, unless both were evaluated when it was saved, and the weights
    scored higher. Of several averages the one that scored highest in the last evaluation before,
    and the shortest without one. CheckpointError if there is none.
    """
    averages, last = checkpoint.averages(path), progress["last"]
    by = progress.get("best_by", "top1")
    if ema is False or (ema is None and not averages):
        return ""
    if not averages:
        raise CheckpointError(
            "checkpoint.no-average",
            "{path}: has no moving average of the weights: leave --ema out",
            path=path,
        )
    if ema is not None and ema is not True:
        return _of_decay(path, averages, ema)
    best = max(averages, key=lambda name: float(last.get(f"{prefix_of(name)}{by}", -1.0)))
    is_worse = last.get(f"{prefix_of(best)}{by}", 1.0) < last.get(by, 0.0)
    is_measured = last.get("step") == progress["step"]
    return "" if ema is None and is_measured and is_worse else best


def _of_decay(path: Path, averages: Sequence[str], decay: float) -> str:
    if f"ema-{decay}" in averages:
        return f"ema-{decay}"
    decays = ", ".join(name.removeprefix("ema-") for name in averages)
    has = "a single average: write --ema" if averages == ["ema"] else f"averages of {decays}"
    raise CheckpointError(
        "checkpoint.no-such-average",
        "{path}: has no average of decay {decay}, but {hint}",
        path=path,
        decay=decay,
        hint=has,
    )
