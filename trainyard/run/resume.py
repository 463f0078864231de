"""Start and resumption of a run: ownership of its directory, and choice of the checkpoint."""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from trainyard.compare import ROUNDING, check_same_recipe, differences
from trainyard.config import RunConfig, load_recipe, to_toml
from trainyard.course import Course
from trainyard.data._native import is_built
from trainyard.data.device.feed import TrainingFeed
from trainyard.data.device.join import JoinFeed, num_passes
from trainyard.data.storage.credentials import without_secrets
from trainyard.errors import CheckpointError, DataError, DivergedError
from trainyard.files import (
    RunDirectory,
    check_files,
    disk_error,
    find_checkpoint,
    is_at,
    open_own,
    read_json,
    write_text,
    writing,
)
from trainyard.monitor.config import WatchConfig
from trainyard.monitor.environment import describe_environment, versions
from trainyard.parent import LAUNCHER, starts_before
from trainyard.run.pretrained import NEW_CLASSES
from trainyard.training import checkpoint, saver
from trainyard.training.bn_statistics import batch_norms
from trainyard.training.checkpoint import TrainState
from trainyard.world import World, broadcast, gather, together

_NOT_FINITE = "the gradient was not finite for many updates running"
_OF_LOSS = "loss."  # of conditions on files
_AGAIN_S = 1.0
_LOOK_S = 0.1  # for `trainyard runs`, which takes a lock for a moment to see whether it is held
_ROOM = 200  # bytes for the paths in a run directory: the first save would be too late to find out
# Keys that only the process reads that has them: paths, threads, and what the first rank reports.
_OF_A_HOST = frozenset(
    (
        *("data.train", "data.val", "data.threads", "data.stage", "data.stage_gb"),
        *(f"watch.{key}" for key in WatchConfig.model_fields),
    )
)


def startup_facts(config: RunConfig) -> dict[str, str]:
    """Facts that must be equal on every rank of a run: versions, and all keys but _OF_A_HOST.

    Practical keys too: by run.log_every, say, a rank knows when to exchange figures with others.
    """
    values = _values(config)
    of_recipe = {k: f"{value!r}" for k, value in values.items() if k not in _OF_A_HOST}
    is_set = {f"a {key}": str(values[key] is not None) for key in ("data.train", "data.val")}
    # Decoded pixels differ without the extension.
    extension = {"the extension in C": "built" if is_built() else "not built"}
    return (
        {name: f"{number}" for name, number in versions().items()} | extension | of_recipe | is_set
    )


def _values(config: RunConfig) -> dict[str, Any]:
    """All values of a recipe, by section.key."""
    sections = config.model_dump().items()
    return {f"{name}.{key}": value for name, values in sections for key, value in values.items()}


def conditions(config: RunConfig, world: World, device: torch.device) -> dict[str, str]:
    """Facts besides the recipe that affect the last bits; a change after a resume is reported.

    The sums of a CPU are taken in an order that depends on its threads and on its instructions.
    """
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        device_name = (
            f"{threads} thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()}"
        )
    ranks = f"any that divides {config.batch.virtual_ranks}"
    return {
        "ranks": ranks if config.batch.virtual_ranks else f"{world.size}",
        "a rank's device": " | ".join(sorted(set(gather(world, device_name)))),
        "torch": torch.__version__,
        **{key: f"{value}" for key, value in _values(config).items() if key in ROUNDING},
    }


def _changes(state: TrainState, path: Path) -> Iterator[dict[str, Any]]:
    """Warnings of other files of the loss, and of what else the last bits depend on, if known."""
    before, now = checkpoint.read_progress(path).get("conditions", {}), state.conditions
    # A condition that one of the two lacks is of another release.
    both = {key: f"{key}: {before[key]} -> {now[key]}" for key in now if key in before}
    changed = {key: text for key, text in both.items() if before[key] != now[key]}
    if of_loss := [changed.pop(key) for key in [*changed] if key.startswith(_OF_LOSS)]:
        yield _warning("loss", f"the loss is another one from here on: {', '.join(of_loss)}")
    if changed and before.get("ranks") == now.get("ranks"):  # else no such promise is made
        seen = "batch.micro" in changed and batch_norms(state.model)
        more = "; batch norm normalises by the images of a micro-batch" if seen else ""
        text = f"not bit for bit as without a break: {', '.join(changed.values())}{more}"
        yield _warning("rounding", f"the run goes on, but {text}")


@contextmanager
def claim_directory(
    folder: RunDirectory,
    config: RunConfig,
    fingerprints: dict[str, str],
    world: World,
    *,
    new_classes: Sequence[str] = (),
    patience_s: float = 300,
) -> Iterator[Callable[[], None]]:
    """Inside, the directory belongs to this run: its lock is held, and it has this run's recipe.

    Yields a check, for before each write: CheckpointError if another directory has its path by now,
    such as that of a new run. CheckpointError or DataError, on all ranks, if another process trains
    in it or it holds a run of another recipe or other data. A directory without results yet takes
    the given recipe and data; for one that `is_named` see take_end. The lock ends with the process
    that holds it; the ranks of a launcher wait `patience_s` seconds for those of a lost one to end.
    """
    lock: int | None = None

    def check() -> None:
        if lock is not None and not is_at(folder.lock, lock):
            raise CheckpointError(
                "run.directory-replaced",
                "{path} was removed, renamed or replaced while the run trained in it: nothing "
                "more is written; to go on from a renamed one, give its name with --run",
                path=folder.path,
            )

    try:
        with together(world):
            if world.is_first:
                _check_writable(folder)
                lock = _lock(folder, patience_s if LAUNCHER in os.environ else 0)
                _claim(folder, config, fingerprints, new_classes)
        yield check
    finally:
        if lock is not None:
            os.close(lock)


def _claim(
    folder: RunDirectory,
    config: RunConfig,
    fingerprints: dict[str, str],
    new_classes: Sequence[str],
) -> None:
    saver.check_folder(folder.checkpoints)
    saver.recover(folder.checkpoints)
    if _has_begun(folder):
        check_same(folder, config, fingerprints)
        return
    environment = describe_environment() | {"fingerprints": fingerprints}
    if new_classes:
        environment[NEW_CLASSES] = [*new_classes]
    environment["command"] = [without_secrets(word) for word in environment["command"]]
    write_text(folder.environment, json.dumps(environment, indent=2) + "\n")
    # Last: a directory with a recipe is complete.
    write_text(folder.recipe, to_toml(config))


def _check_writable(folder: RunDirectory) -> None:
    try:
        if len(os.fsencode(folder.path.absolute())) + _ROOM > os.pathconf("/", "PC_PATH_MAX"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        folder.path.mkdir(parents=True, exist_ok=True)
        if os.access(folder.path, os.W_OK | os.X_OK):
            return
        reason = "it is not writable"
    except OSError as error:
        reason = str(error.strerror)
        full = disk_error(error, folder.path)
        if full is not None and full.errno != errno.EROFS:
            raise full from error
    raise CheckpointError(
        "run.directory-unusable",
        "{path} cannot be a run directory ({reason}): choose another with --run",
        path=folder.path,
        reason=reason,
    )


def _lock(folder: RunDirectory, patience_s: float) -> int:
    """The lock of a directory, held."""
    with writing(folder.lock):
        lock = open_own(folder.lock, os.O_RDWR | os.O_CREAT)
    deadline, is_first = time.monotonic() + patience_s, True
    while not _has_locked(lock, folder.path):
        holder = os.pread(lock, 100, 0).decode(errors="replace").strip()
        if time.monotonic() >= deadline:
            os.close(lock)
            raise CheckpointError(
                "run.in-use",
                "{path}: another process trains in it ({holder}): wait for it, stop it, or choose "
                "another directory with --run",
                path=folder.path,
                holder=holder,
            )
        if is_first:
            in_use = f"{folder.path}: another process trains in it ({holder})"
            sys.stderr.write(f"trainyard: {in_use}: waiting for it to end ({patience_s:g} s)\n")
        is_first = False
        time.sleep(_AGAIN_S)
    with suppress(OSError):  # the holder's name is optional: the disk may be full
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{socket.gethostname()}, process {os.getpid()}\n".encode(), 0)
    return lock


def _has_locked(lock: int, path: Path) -> bool:
    """False if another process holds the lock; True on a file system without locks."""
    for patience_s in (_LOOK_S, 0):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(patience_s)
        except OSError as error:
            reason = (
                f"no locks on its file system ({error.strerror}): train one run at a time in it"
            )
            sys.stderr.write(f"trainyard: {path}: {reason}\n")
            return True
        else:
            return True
    return False


def _has_begun(folder: RunDirectory) -> bool:
    """True if a run has a checkpoint or recorded figures, which belong to its recipe."""
    if saver.has_any(folder.checkpoints) or folder.quarantine.exists():
        return True
    has_metrics = folder.metrics.exists()
    lines = folder.metrics.read_text(errors="replace").splitlines() if has_metrics else []
    return not all(line.startswith('{"kind": "event"') for line in lines)


def check_same(folder: RunDirectory, config: RunConfig, fingerprints: dict[str, str]) -> None:
    """CheckpointError or DataError for a directory with a run of another recipe or other data."""
    check_same_recipe(folder, config)
    _check_same_data(folder, fingerprints)


def _check_same_data(folder: RunDirectory, fingerprints: dict[str, str]) -> None:
    try:
        before = dict(read_json(folder.environment)["fingerprints"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "run.environment-unreadable",
            "{path} cannot be read ({reason}), which records the data of the run: restore it, or "
            "start another run with --run",
            path=folder.environment,
            reason=repr(error),
        ) from None
    for split in ("train", "val"):  # which "both" follows from
        if before.get(split) != fingerprints[split]:
            raise DataError(
                "run.data-differs",
                "the {split} data differs from the data that the run in {path} started with "
                "(files, sizes, classes, or how data.val_share or data.val_fold divides them): "
                "restore it, or start another run with --run",
                split=split,
                path=folder.path,
            )


def take_end(folder: RunDirectory, config: RunConfig, course: Course, world: World) -> str:
    """Record the recipe of a run that is named; returns what changed, on the first rank, or "".

    CheckpointError, on all ranks, if the run is beyond its new end.
    """
    changed: list[str] = []
    with together(world):
        if folder.is_named and world.is_first:
            changed = differences(load_recipe(str(folder.recipe)), config)
            if changed and (latest := folder.checkpoints / "latest").exists():
                progress = checkpoint.read_progress(latest)
                check_end(course, progress["step"], progress["stream"])
            write_text(folder.recipe, to_toml(config))
    return "; ".join(changed)


def check_end(course: Course, step: int, stream: Mapping[str, Any]) -> None:
    """CheckpointError for a step, or ends of passes in a stream, beyond the end of a course."""
    passes, ends = num_passes(course), len(stream.get("ends", ()))
    if step > course.num_steps if passes is None or not ends else ends > passes:
        raise CheckpointError(
            "run.beyond-end",
            "run.length = {length!r} ends at step {num_steps}, and the checkpoint is of step "
            "{step}: give a longer --run.length",
            length=course.length,
            num_steps=course.num_steps,
            step=step,
        )


def is_new_run(setting: str, folder: RunDirectory, world: World) -> bool:
    """True if there is no checkpoint to resume from, so that initial weights are needed."""
    with together(world):
        check_files(folder.path)
        is_new = setting in ("auto", "never") and not saver.has_any(folder.checkpoints)
    return broadcast(world, is_new)


def resume(
    setting: str,
    folder: RunDirectory,
    state: TrainState,
    *,
    world: World,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Load into `state` the checkpoint that `setting`, `run.resume`, stands for, if any."""
    with together(world):
        choice = _find(setting, folder) if world.is_first else (None, [])
    # All ranks use the first one's choice, as it alone has checked every byte.
    path, passed_over = broadcast(world, choice)
    for problem in passed_over:
        report(_warning("bad checkpoint", f"{problem}; taking the one before it"))
    if path is None:
        if count := starts_before():
            remark = f"start {count + 1} of this run finds no checkpoint in {folder.path}, and "
            remark += "begins at step 0: all nodes are to share the run directory"
            report(_warning("no checkpoint", remark))
        return
    with together(world):
        note = checkpoint.load_checkpoint(state, path)
        if path.parent.resolve() != folder.checkpoints.resolve():
            # They belong to another run, whose checkpoints are not here.
            state.last, state.best, state.stale = {}, {}, 0
        if world.is_first:
            saver.point_best(folder.checkpoints, state.best.get("step", 0))
    replicas = "1 replica" if world.size == 1 else f"{world.size} replicas"
    message = f"going on from {path} at step {state.step:,} with {replicas}"
    ranks = {"world_size": world.size, "host": socket.gethostname()}
    report({"kind": "event", "event": "resumed", "message": message, **ranks})
    if note is not None:
        report(_warning("replicas", note))
    for warning in _changes(state, path):
        report(warning)


def _warning(event: str, message: str) -> dict[str, Any]:
    return {"kind": "event", "event": event, "level": "warning", "message": message}


def roll_back(
    folder: RunDirectory,
    state: TrainState,
    *,
    feed: TrainingFeed | JoinFeed,
    course: Course,
    limit: int,
    world: World,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """After `guard` has tripped: return the weights to a checkpoint, and continue with the data.

    The samples since that checkpoint are not repeated in this epoch. Later checkpoints are
    removed, as the run diverges from them. DivergedError if there is no earlier checkpoint, or
    after `most` rollbacks.
    """
    step, roll_backs, clock = state.step, state.roll_backs + 1, state.clock.state_dict()
    position = course.samples(step) + state.skipped
    with together(world):
        if roll_backs > limit:
            raise DivergedError(
                "run.diverged-again",
                "the gradient was not finite for many updates running again, after "
                "{num_rollbacks} rollbacks; take a lower optim.lr, a longer schedule.warmup, "
                "optim.clip_norm = 1.0, or bf16 for fp16",
                num_rollbacks=limit,
            )
        choice = _find_earlier(folder, state) if world.is_first else None
    path = broadcast(world, choice)
    assert path is not None
    with together(world):
        checkpoint.load_checkpoint(state, path)
        if world.is_first:
            saver.point_best(folder.checkpoints, state.best.get("step", 0))
            saver.drop_after(folder.checkpoints, path)
    state.roll_backs = roll_backs
    state.clock.load_state_dict(clock)
    state.skipped = position - course.samples(state.step)
    feed.seek(state.step, state.skipped)
    message = f"{_NOT_FINITE} up to step {step:,}: went back to step {state.step:,}, past its data"
    report(_warning("rolled back", message))


def _find_earlier(folder: RunDirectory, state: TrainState) -> Path:
    """The checkpoint to roll back to; if the last rollback did not help, the one before it."""
    paths = saver.finite(folder.checkpoints)
    newest = next(paths, None)
    if newest is None:
        raise DivergedError(
            "run.diverged-at-start",
            "the gradient was not finite for many updates running, and there is no earlier "
            "checkpoint; take a lower optim.lr, a longer schedule.warmup, optim.clip_norm = 1.0, "
            "or bf16 for fp16",
        )
    is_again = checkpoint.read_progress(newest)["roll_backs"] < state.roll_backs
    return next(paths, newest) if is_again else newest


def _find(setting: str, folder: RunDirectory) -> tuple[Path | None, list[str]]:
    """The checkpoint to load, and the problems of newer ones that were skipped."""
    passed_over: list[str] = []
    newest = saver.newest_good(folder.checkpoints, passed_over.append)
    if newest is None and passed_over:
        raise CheckpointError(
            "run.checkpoints-damaged",
            "no checkpoint of the run can be read: {reason}. To start again, choose another "
            "directory with --run",
            reason="; ".join(passed_over),
        )
    if newest is not None and setting == "never":
        raise CheckpointError(
            "run.already-begun",
            "{path} already has checkpoints, and with run.resume = 'never' the run would not "
            "resume from them: choose another directory with --run",
            path=folder.path,
        )
    if newest is not None or setting in ("auto", "never"):
        return newest, passed_over
    path = Path(setting)  # only to start from: later resumes use the run's own checkpoints
    if RunDirectory(path).checkpoints.is_dir():
        _, path = find_checkpoint(path, ("latest",))
    checkpoint.check(path)
    return path, []
