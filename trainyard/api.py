"""Trainyard as a library: functions of the main commands, for notebooks and programs.

Every function raises a TrainyardError with one line that names the wrong key, file or value and
says what to do. Accuracies are fractions of 1, losses mean cross-entropies in nats, times seconds.
Heavy imports wait until a function is called.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from trainyard.config import RunConfig
    from trainyard.files import RunDirectory
    from trainyard.monitor.history import History
    from trainyard.monitor.outcome import Outcome
    from trainyard.training.recorded import Recorded
    from trainyard.world import World

StrPath = str | os.PathLike[str]


def train(
    recipe: "StrPath | RunConfig",
    run: StrPath,
    *,
    data: StrPath | Sequence[StrPath] | None = None,
    overrides: Mapping[str, Any] | None = None,
    world: "World | None" = None,
    console: "Console | None" = None,
) -> "Outcome":
    """Train a recipe in a run directory, or resume the run in it.

    `recipe` is a built-in name, the path of a TOML file, or a RunConfig. `data` is a location with
    train and val data, or several to be merged; it overrides the recipe's. `overrides` are recipe
    keys such as {"optim.lr": 0.1, "run.length": "8 epochs"}; a text is parsed as on the command
    line. `world` defaults as in `trainyard train` (one rank, or this process's rank under torchrun,
    srun, …); every rank of it makes the same call. `console` shows progress, by default in the
    terminal or the notebook's cell; Console(quiet=True) shows none.

    The Outcome has `step`, `seconds`, and the `last` and `best` evaluations: dicts with "top1",
    "top5", "loss", and "ema_top1" … if there is a moving average; with lists of labels "map",
    "micro_f1", "macro_f1" instead of "top1", "top5". `stopped` is set if Ctrl-C, or
    the kernel's Interrupt, ended the run early: a checkpoint is saved, and the same call resumes.
    RecipeError, DataError or CheckpointError for wrong input.
    """
    world, console = _joined(world, console)
    from trainyard.config import on_data
    from trainyard.data.index.layout import location_remarks
    from trainyard.data.open_datasets import warn
    from trainyard.run import trainer as composition

    config = _config(recipe, _plain(overrides))
    config = config if data is None else on_data(config, _texts(data), overrides or ())
    if data is not None and world.is_first:
        warn(console, (text for location in _texts(data) for text in location_remarks(location)))
    return composition.train(config, os.fspath(run), world=world, console=console)


def evaluate(
    run: StrPath | Sequence[StrPath],
    *,
    data: StrPath | Sequence[StrPath] | None = None,
    overrides: Mapping[str, Any] | None = None,
    flip: bool = False,
    ema: bool | float | None = None,
    all_classes: bool = False,
    world: "World | None" = None,
    console: "Console | None" = None,
) -> dict[str, Any]:
    """The accuracy of a checkpoint, or of a run's best one, with every validation image used once.

    `data` is other validation data than the run's own, or several locations taken as one; only
    classes that it has are predicted, unless `all_classes`. `overrides` are keys of the sections
    model, data and batch, such as {"data.eval_size": 288}. `flip` uses the mean softmax of
    an image and of its mirror image. `ema` is False for the weights alone, True for their moving
    average alone, the best of several, or the decay of one. `world` and `console` are as for
    `train`. Several runs are taken together: "mean_top1", "run_1_top1" …; "mean" tells how.

    Returns the content of `trainyard evaluate --json`: "samples", "bad" (unreadable images),
    "bad_reasons" (a list of dicts: "reason", "samples", and "file", an example),
    "top1", "top1_interval" (Wilson's of 95%: low, high), "top5", "loss", "ece" (expected
    calibration error), and "ema_top1" … if there is a moving average; with lists of labels "map",
    "micro_f1", "macro_f1", "loss". CheckpointError or DataError if something is missing or does not
    fit.
    """
    world, console = _joined(world, console)
    from trainyard.data.index.merge import validation_splits
    from trainyard.files import find_checkpoint
    from trainyard.run.evaluation import EvaluationOptions, evaluate_checkpoint
    from trainyard.training.evaluate import Views

    (config, checkpoint), *further = (
        (evaluation_recipe(folder, overrides, on_other_data=data is not None), path)
        for folder, path in map(find_checkpoint, map(Path, _texts(run)))
    )
    locations = None if data is None else tuple(validation_splits(_texts(data)))
    how = EvaluationOptions(
        data=locations, views=Views(flip), ema=ema, all_classes=all_classes, others=further
    )
    return evaluate_checkpoint(config, checkpoint, how, world=world, console=console).as_dict()


def history(run: StrPath) -> "History":
    """The reports of a run: `.train`, `.val` and `.events`, each a list of dicts by step.

    Train reports have "step", "epoch", "samples", "time" (s), "loss", "top1", "lr", "grad_norm",
    "images_per_s" (of all ranks), "data_wait" (share of time); val reports "top1", "top5", "loss",
    "ema_top1" …; events "event" and "message". Steps repeated after a kill count once.
    InputError if the run has no reports.
    """
    from trainyard.files import RunDirectory
    from trainyard.monitor.history import read_history

    return read_history(RunDirectory(Path(run)).metrics)


def predictions(run: StrPath) -> "Recorded":
    """Predictions of a run's best weights for each validation sample, in the order of its index.

    `.labels` is int32[samples], and `.classes` the names of the numbers; `.scores` has columns of
    all samples: `guess` (int64), `confidence`, `rank_of_truth` (1: the true class is the best)
    and `loss`; `.step` is the step of the weights. `.files` has the path or URL of each sample; it
    is empty where the validation data is not there or has changed. With lists of labels, `.labels`
    is bool[samples, classes], and `.scores` has `logits`, float32[classes, samples], and `read`,
    bool[samples]. DataError if there are none yet, or of an evaluation behind which the run went
    back alone.
    """
    from dataclasses import replace

    import numpy as np

    from trainyard.errors import DataError
    from trainyard.files import RunDirectory, find_checkpoint
    from trainyard.monitor.history import best_of
    from trainyard.training.checkpoint import read_progress
    from trainyard.training.recorded import load_recorded

    path = RunDirectory(Path(run)).predictions
    recorded = load_recorded(path)
    if recorded is None:
        raise DataError(
            "run.no-predictions",
            "{path}: no predictions yet: the first evaluation of a run writes them",
            path=path,
        )
    _, saved = find_checkpoint(Path(run))
    progress = read_progress(saved)
    if not recorded.is_of(best_of(history(run).val, progress.get("best_by", "top1"))):
        raise DataError(
            "run.predictions-dropped",
            "{path}: of the evaluation at step {step:,}, behind which the run went back: its next "
            "best evaluation writes others, and `trainyard evaluate RUN --out FILE.csv` "
            "those of a checkpoint",
            path=path,
            step=recorded.step,
        )
    classes = tuple(progress["classes"])
    recorded = recorded._replace(classes=classes, files=_files(RunDirectory(Path(run)), classes))
    if not hasattr(recorded.scores, "guess"):
        return recorded
    numbers = recorded.scores.guess.astype(np.int64)
    return recorded._replace(scores=replace(recorded.scores, guess=numbers))


def _files(run: "RunDirectory", classes: Sequence[str]) -> tuple[str, ...]:
    """The files of a run's validation samples; () if its data is not there or has changed."""
    from trainyard.config import load_recipe
    from trainyard.data.open_datasets import open_validation
    from trainyard.errors import TrainyardError
    from trainyard.files import read_json
    from trainyard.world import World

    try:
        data = load_recipe(str(run.recipe)).data
        index = open_validation(data, classes, World(), lambda *_: None)
        before = read_json(run.environment)["fingerprints"]["val"]
    except (TrainyardError, OSError, ValueError, KeyError, TypeError):
        return ()
    is_same = index.fingerprint == before
    return tuple(index.locate(n)[0] for n in range(len(index))) if is_same else ()


def evaluation_recipe(
    run: Path, overrides: Mapping[str, Any] | None = None, *, on_other_data: bool = False
) -> "RunConfig":
    """The recipe of a run directory for an evaluation, which may run on another machine.

    RecipeError for a key without effect on an evaluation, or on one of data that are not the run's.
    """
    from trainyard.compare import check_keys, check_size
    from trainyard.config import DIVISION, load_recipe, refuse_beside_data

    overrides = overrides or {}
    check_keys(overrides, "an evaluation")
    if on_other_data:
        refuse_beside_data(overrides, ("train", "val", *DIVISION, "corrections"))
    config = load_recipe(str(run / "recipe.toml"), _plain(overrides))
    check_size(config, overrides, "an evaluation")
    if "data.stage" in overrides:
        return config
    on_disk = config.data.model_copy(update={"stage": None})  # it was a folder on other nodes
    return config.model_copy(update={"data": on_disk})


# --- arguments in the forms that users give ---


def _config(recipe: "StrPath | RunConfig", overrides: Mapping[str, Any]) -> "RunConfig":
    from trainyard.config import RunConfig, load_recipe, override

    if isinstance(recipe, RunConfig):
        return override(recipe, overrides)
    return load_recipe(os.fspath(recipe), overrides)


def _plain(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        key: os.fspath(value) if isinstance(value, os.PathLike) else value
        for key, value in (overrides or {}).items()
    }


def _texts(data: StrPath | Sequence[StrPath]) -> list[str]:
    if isinstance(data, str | os.PathLike):
        return [os.fspath(data)]
    return [os.fspath(location) for location in data]


def _joined(world: "World | None", console: "Console | None") -> "tuple[World, Console]":
    """By default this process's rank, and the first rank's terminal or notebook cell."""
    from trainyard.distributed import discover
    from trainyard.monitor.terminal import console_of

    world = discover() if world is None else world
    return world, console_of(world) if console is None else console
