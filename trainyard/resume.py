"""To begin or to go on: is this run directory ours, and from which checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainyard.config import RunConfig, differences, load_recipe, to_toml
from trainyard.errors import CheckpointError, DataError
from trainyard.files import RunDirectory, write_text
from trainyard.monitor.environment import describe_environment
from trainyard.train import checkpoint
from trainyard.train.checkpoint import TrainState
from trainyard.world import World, gather, together


def claim(folder: RunDirectory, config: RunConfig, fingerprints: dict[str, str]) -> None:
    """Make the directory this run's, or make sure that it is: same recipe, same data."""
    if folder.recipe.exists():
        _check_same_recipe(folder, config)
        _check_same_data(folder, fingerprints)
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    environment = describe_environment() | {"fingerprints": fingerprints}
    write_text(folder.environment, json.dumps(environment, indent=2) + "\n")
    # Last: a directory with a recipe is a directory that is complete.
    write_text(folder.recipe, to_toml(config))


def _check_same_recipe(folder: RunDirectory, config: RunConfig) -> None:
    changed = differences(load_recipe(str(folder.recipe)), config)
    if changed:
        raise CheckpointError(
            f"{folder.path} holds a run of another recipe ({'; '.join(changed)}): choose another "
            "directory with --run, or give the same recipe to go on with it"
        )


def _check_same_data(folder: RunDirectory, fingerprints: dict[str, str]) -> None:
    before = json.loads(folder.environment.read_text())["fingerprints"]
    for split, fingerprint in fingerprints.items():
        if before[split] != fingerprint:
            raise DataError(
                f"the {split} data is not what the run in {folder.path} began with (other files, "
                "sizes or classes): restore it, or begin another run with --run"
            )


def resume(
    asked: str,
    folder: RunDirectory,
    state: TrainState,
    *,
    world: World,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Put the checkpoint that `asked` (`run.resume`) means, if there is one, into `state`."""
    with together(world):
        found = _find(asked, folder) if world.is_first else (None, [])
    # The first rank's choice holds for all: it alone has read and checked every byte.
    path, passed_over = gather(world, found)[0]
    for message in passed_over:
        report({"kind": "event", "event": "bad checkpoint", "level": "warning", "message": message})
    if path is not None:
        with together(world):
            checkpoint.load_checkpoint(state, path)
        replicas = "1 replica" if world.size == 1 else f"{world.size} replicas"
        message = f"going on from {path} at step {state.step:,} with {replicas}"
        report({"kind": "event", "event": "resumed", "message": message})


def _find(asked: str, folder: RunDirectory) -> tuple[Path | None, list[str]]:
    """The checkpoint to load, and what is wrong with those that were passed over."""
    passed_over: list[str] = []
    newest = checkpoint.newest_good(folder.checkpoints, passed_over.append)
    if asked == "auto":
        if newest is None and passed_over:
            raise CheckpointError(
                f"no checkpoint of the run can be read: {'; '.join(passed_over)}. To begin anew, "
                "choose another directory with --run"
            )
        return newest, passed_over
    if newest is not None:
        raise CheckpointError(
            f"{folder.path} already has checkpoints, and with run.resume = {asked!r} the run would "
            "not go on from them: choose another directory with --run"
        )
    if asked == "never":
        return None, []
    path = Path(asked)
    problem = checkpoint.find_problem(path)
    if problem is not None:
        raise CheckpointError(f"run.resume = {asked!r}: {problem}")
    return path, []
