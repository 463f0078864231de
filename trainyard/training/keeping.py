"""The checkpoint folder of a run: complete checkpoints only, and removal of old ones.

checkpoints/step-00001234/    see checkpoint.py
checkpoints/latest -> step-00001234        checkpoints/best -> step-00001000
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os.path import realpath
from pathlib import Path

from trainyard.errors import CheckpointError
from trainyard.files import fsync, part_of, writing
from trainyard.training.checkpoint import (
    Manifest,
    Snapshot,
    TrainState,
    find_problem,
    read_progress,
    snapshot,
    write_common,
    write_manifest,
    write_own,
)
from trainyard.world import World, gather, together

_ALONE = World()


def save_checkpoint(
    state: TrainState,
    folder: Path,
    *,
    keep: int,
    world: World = _ALONE,
    progress: Callable[[], None] = lambda: None,
) -> Path:
    """Write `state` as a checkpoint and wait for it; see write_checkpoint."""
    with together(world):
        taken = snapshot(state, world)
    return write_checkpoint(taken, folder, keep=keep, world=world, progress=progress)


def write_checkpoint(
    taken: Snapshot,
    folder: Path,
    *,
    keep: int,
    world: World = _ALONE,
    progress: Callable[[], None] = lambda: None,
) -> Path:
    """Write folder/step-…, move the links `latest` and `best`, and drop all but `keep` old ones.

    Every rank calls it; the checkpoint is complete or absent. `progress` is called when a part of
    it is written. DiskError, on all ranks, if the disk is full or read-only.
    """
    final = path_of(folder, taken.step)
    part = None
    try:
        with _written(taken, final, None, world):
            part = begin(final) if world.is_first else None
        shared = gather(world, part)[0]
        assert shared is not None
        with _written(taken, final, shared, world):
            manifest = write_own(taken, shared)
        progress()
        with _written(taken, final, shared, world):
            manifest |= write_common(taken.common, shared) if taken.common else {}
        progress()
        manifests = gather(world, manifest)
        with _written(taken, final, shared, world):
            if world.is_first:
                whole = {k: v for each in manifests for k, v in each.items()}
                finish(shared, final, whole, keep=keep)
                point_best(folder, taken.best_step)
    except BaseException:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        raise
    return final


@contextmanager
def _written(taken: Snapshot, final: Path, part: Path | None, world: World) -> Iterator[None]:
    """Inside, a piece of a checkpoint is written; an error of one rank is raised on all."""
    with together(world), writing(final, lambda: taken.num_bytes, part):
        yield


def path_of(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def begin(final: Path) -> Path:
    """Make the temporary folder in which a checkpoint is written."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final.parent)
    part = part_of(final)
    part.mkdir()
    return part


def finish(part: Path, final: Path, manifest: Manifest, *, keep: int) -> None:
    """Make a written folder the latest checkpoint, and drop all but `keep` old ones."""
    write_manifest(part, manifest)
    _put(part, final)
    point(final.parent / "latest", final)
    _prune(final.parent, keep)


def _put(part: Path, final: Path) -> None:
    """Move into place, over one of this step that is damaged or lacks its evaluation."""
    old = _hide(final) if os.path.lexists(final) else None
    os.replace(part, final)
    fsync(final.parent)
    if old is not None:
        _remove(old)


def newest_good(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint without a problem; `report` receives the problems of newer ones."""
    for path in reversed(_named(folder)):
        problem = find_problem(path)
        if problem is None:
            return path
        report(f"{path}: {problem}")
    return None


def finite(folder: Path) -> Iterator[Path]:
    """Good checkpoints that were not saved during skipped updates, newest first."""
    paths = filter(_is_finite, reversed(_checkpoints(folder)))
    return (path for path in paths if find_problem(path) is None)


def drop_after(folder: Path, path: Path) -> None:
    """Make a checkpoint the latest, and remove later ones."""
    point(folder / "latest", path)
    paths = _checkpoints(folder)
    for later in paths[paths.index(path) + 1 :]:
        _remove(_hide(later))


def point_best(folder: Path, step: int) -> None:
    """Point `best` at the checkpoint of the best evaluation's step, if it exists."""
    best = path_of(folder, step)
    if best.is_dir() and realpath(folder / "best") != realpath(best):
        point(folder / "best", best)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to a sibling, atomically."""
    part = part_of(link)
    part.symlink_to(target.name)
    os.replace(part, link)


def _prune(folder: Path, keep: int) -> None:
    kept = {realpath(folder / name) for name in ("latest", "best")}  # even if one leads to itself
    # Checkpoints saved during skipped updates do not count: a rollback may need an older one.
    clean = [path for path in _checkpoints(folder) if _is_finite(path)][-keep:]
    best_then = [read_progress(path)["best"].get("step", 0) for path in clean[-1:]]
    kept |= {*map(realpath, clean), *(realpath(path_of(folder, step)) for step in best_then)}
    # Data without an index can change its number of ranks only at the end of a pass.
    kept |= {realpath(path) for path in [*filter(_ends_pass, _checkpoints(folder))][-1:]}
    for path in _checkpoints(folder):
        if realpath(path) not in kept:
            _remove(_hide(path))


def _is_finite(path: Path) -> bool:
    try:
        return not read_progress(path)["guard"]["running"]
    except CheckpointError:
        return False


def _ends_pass(path: Path) -> bool:
    try:
        progress = read_progress(path)
    except CheckpointError:
        return False
    stream = progress.get("stream", {})
    return bool(stream.get("ends")) and not stream.get("seen", 1)


def check_folder(folder: Path) -> None:
    """CheckpointError if an obstacle prevents saving the checkpoints of a run there."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(
            f"{folder}: is not a folder: move it away, or choose another with --run"
        )
    for link in (folder / "latest", folder / "best"):
        if link.is_dir() and not link.is_symlink():
            raise CheckpointError(
                f"{link}: is a folder and no link, as in a copy that has followed links: remove it "
                "if its step-… lies beside it, or else rename it to that"
            )


def has_any(folder: Path) -> bool:
    """True if the folder of a run holds a checkpoint, or any entry with the name of one."""
    return bool(_named(folder))


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first, including links to folders. Plain files do not count."""
    return [path for path in _named(folder) if path.is_dir()]


def _named(folder: Path) -> list[Path]:
    """Entries with the name of a checkpoint; not step-00000100.bak, a copy set aside."""
    paths = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.name[5:]))


def _hide(path: Path) -> Path:
    """Rename a checkpoint before its removal, so that no half of it has a checkpoint's name."""
    doomed = part_of(path)
    os.replace(path, doomed)
    return doomed


def _remove_leftovers(folder: Path) -> None:
    """Remove files that a killed run left half-written."""
    for part in folder.glob(".*.part"):
        _remove(part)


def _remove(path: Path) -> None:
    """Remove a folder or a file; a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
