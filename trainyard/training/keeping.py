"""The checkpoints of a run: complete or absent, the newest good one first, old ones dropped.

checkpoints/step-00001234/    see checkpoint.py
checkpoints/latest -> step-00001234        checkpoints/best -> step-00001000
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from trainyard.errors import CheckpointError
from trainyard.files import fsync_folder, part_of
from trainyard.training.checkpoint import (
    Manifest,
    TrainState,
    find_problem,
    read_progress,
    write_common,
    write_manifest,
    write_replica,
)
from trainyard.world import World, gather, together

_ALONE = World()


def save_checkpoint(state: TrainState, folder: Path, *, keep: int, world: World = _ALONE) -> Path:
    """Write `state` to folder/step-…, then move `latest` to it and drop all but `keep` old ones.

    Every rank calls it, in the consensus of the averager; the checkpoint is complete or absent.
    """
    final = path_of(folder, state.step)
    part = None
    try:
        with together(world):
            part = begin(final) if world.is_first else None
        shared = gather(world, part)[0]
        assert shared is not None
        with together(world):
            manifest = write_replica(state, shared)
        with together(world):
            manifest |= write_common(state, shared, world)
        manifests = gather(world, manifest)
        with together(world):
            if world.is_first:
                whole = {k: v for each in manifests for k, v in each.items()}
                finish(shared, final, whole, keep=keep)
    except BaseException:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        raise
    return final


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def begin(final: Path) -> Path:
    """The folder in which a checkpoint comes to be."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final.parent)
    part = part_of(final)
    part.mkdir()
    return part


def finish(part: Path, final: Path, manifest: Manifest, *, keep: int) -> None:
    """Make it the latest checkpoint, and drop all but `keep` old ones."""
    write_manifest(part, manifest)
    _put(part, final)
    point(final.parent / "latest", final)
    _prune(final.parent, keep)


def _put(part: Path, final: Path) -> None:
    """One of this step is there if it was damaged, or if its evaluation is being made up for."""
    old = _hide(final) if final.exists() else None
    os.replace(part, final)
    fsync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old)


def newest_good(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint without a problem; `report` is told of each that is passed over."""
    for path in reversed(_checkpoints(folder)):
        problem = find_problem(path)
        if problem is None:
            return path
        report(f"{path}: {problem}")
    return None


def finite(folder: Path) -> Iterator[Path]:
    """Good checkpoints that were not saved while updates were being skipped, newest first."""
    paths = filter(_is_finite, reversed(_checkpoints(folder)))
    return (path for path in paths if find_problem(path) is None)


def drop_after(folder: Path, path: Path) -> None:
    """Make a checkpoint the latest, and remove those after it."""
    point(folder / "latest", path)
    paths = _checkpoints(folder)
    for later in paths[paths.index(path) + 1 :]:
        shutil.rmtree(_hide(later))


def point_best(folder: Path, state: TrainState) -> None:
    """Make `best` what `state` knows to be the best; a kill may have come between the two."""
    best = path_of(folder, state.best.get("step", 0))
    if best.is_dir() and (folder / "best").resolve() != best.resolve():
        point(folder / "best", best)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to a sibling, in one step."""
    part = part_of(link)
    part.symlink_to(target.name)
    os.replace(part, link)


def _prune(folder: Path, keep: int) -> None:
    kept = {(folder / name).resolve() for name in ("latest", "best")}
    # Those saved while updates were being skipped are not counted: there may be a way back.
    clean = [path.resolve() for path in _checkpoints(folder) if _is_finite(path)][-keep:]
    best_then = [read_progress(path)["best"].get("step", 0) for path in clean[-1:]]
    kept |= {*clean, *(path_of(folder, step).resolve() for step in best_then)}
    for path in _checkpoints(folder):
        if path.resolve() not in kept:
            shutil.rmtree(_hide(path))


def _is_finite(path: Path) -> bool:
    try:
        return not read_progress(path)["guard"]["running"]
    except CheckpointError:
        return False


def _checkpoints(folder: Path) -> list[Path]:
    """Those of a run, oldest first; a copy that someone set aside, step-00000100.bak, is none."""
    paths = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(paths, key=lambda path: int(path.name[5:]))


def _hide(path: Path) -> Path:
    """A doomed checkpoint's new name: there is never half a one under a checkpoint's name."""
    doomed = part_of(path)
    os.replace(path, doomed)
    return doomed


def _remove_leftovers(folder: Path) -> None:
    """What a killed run left half-written."""
    for part in folder.glob(".*.part"):
        if part.is_symlink():
            part.unlink()
        else:
            shutil.rmtree(part, ignore_errors=True)
