"""Saves the checkpoints of a run beside its training, and keeps their folder.

checkpoints/step-00001234/    see checkpoint.py
checkpoints/latest -> step-00001234        checkpoints/best -> step-00001000
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from os.path import realpath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard.averaging.sharded import gathered
from trainyard.errors import CheckpointError, PeerError
from trainyard.files import WRITER, fsync, part_of, writing
from trainyard.training.checkpoint import (
    Manifest,
    TrainState,
    contents,
    find_problem,
    num_bytes,
    read_progress,
    write_files,
    write_manifest,
)
from trainyard.world import World, broadcast, gather, new_group, together

_LOOK_S = 0.5
_LEAVE_S = 300  # for a pending checkpoint after an error; launchers wait as long
_REPLACED = ".replaced"
_LOST_S = 5  # the same if ranks write together and one is lost


class HostCopies:
    """Copies of nested states on the host, in memory that the next set of copies reuses.

    GPU tensors go to page-locked memory, asynchronously, until `synchronise`. There is one set of
    copies: call `begin` only when the last set is no longer needed.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0
        self._has_gpu = False

    def begin(self) -> None:
        """Reuse the memory of the last copies."""
        del self._buffers[self._used :]
        self._used = 0

    def __call__(self, value: Any, *, keep: bool = True) -> Any:
        """Copies tensors in dicts, lists and tuples; other values are shared.

        Tensors of which each rank has a part are gathered one by one: every rank calls, and those
        that do not `keep` the copies get None.
        """
        if isinstance(value, Tensor):
            complete = gathered(value.detach())
            return self._buffer(complete).copy_(complete, non_blocking=True) if keep else None
        if isinstance(value, dict):
            return {key: self(each, keep=keep) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self(each, keep=keep) for each in value)
        return value

    def synchronise(self) -> None:
        """Wait until the GPU has made the copies."""
        if self._has_gpu:
            torch.cuda.current_stream().synchronize()

    def _buffer(self, like: Tensor) -> Tensor:
        """Memory of the same shape, dtype and strides. Reuse relies on a fixed order of tensors."""
        number, self._used = self._used, self._used + 1
        for old in self._buffers[number : number + 1]:
            if (old.shape, old.dtype, old.stride()) == (like.shape, like.dtype, like.stride()):
                return old
            del self._buffers[number:]
        self._has_gpu = self._has_gpu or like.is_cuda
        self._buffers.append(torch.empty_like(like, device="cpu", pin_memory=like.is_cuda))
        return self._buffers[number]


class Snapshot(NamedTuple):
    """A rank's copy of its part of a checkpoint, as of one step: later steps do not change it."""

    step: int
    best_step: int
    """The step of the best evaluation; 0 if there was none."""
    num_bytes: int
    files: dict[str, Any]
    """As of checkpoint.contents."""


class Saver:
    """Writes the checkpoints of a run, one at a time.

    `save` copies the state to the host and returns; a thread writes the copy. `wait` returns once
    the checkpoint is complete on disk. All ranks make the same calls.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        keep: int,
        all_write: bool = False,
        every_s: float | None = None,
    ) -> None:
        """`all_write`: each rank has a part of its own to write; else the first rank writes all.

        `every_s`: seconds after which a checkpoint is due, if saves depend on time.
        """
        self._folder, self._keep, self.every_s = folder, keep, every_s
        self._world = self._writers = world
        self._all_write = all_write
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._started_s = time.monotonic()

    def __enter__(self) -> "Saver":
        if not self._all_write:
            self._writers = World()
        elif self._world.size > 1:
            # A group of its own keeps its messages apart from those of training.
            self._writers = replace(self._world, group=new_group(backend="gloo"))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):  # not after a second Ctrl-C
            self.join(is_lost=isinstance(error, PeerError))

    def join(self, *, is_lost: bool = True) -> None:
        """Wait for a pending checkpoint, at most 300 s, or 5 s if `is_lost`: a rank is gone."""
        if self._thread is not None:
            self._thread.join(_LOST_S if is_lost and self._writers.size > 1 else _LEAVE_S)

    @property
    def has_failed(self) -> bool:
        """True if a checkpoint could not be written; `wait` raises the reason."""
        return self._error is not None

    @property
    def is_overdue(self) -> bool:
        """True if `every_s` has passed since the last save, by the first rank's clock."""
        if self.every_s is None or not self._world.is_first:
            return False
        return time.monotonic() - self._started_s >= self.every_s

    def save(self, state: TrainState) -> None:
        """Start a save once the last one is done; call it inside the averager's consensus.

        If the last one could not be written, raises the reason on all ranks, as `wait` does.
        """
        with together(self._world):
            error = self._outcome()
            self._copies.begin()  # after an error too: the other ranks may gather
            files = contents(state, self._world, self._copies)
            self._copies.synchronise()
            taken = Snapshot(state.step, state.best.get("step", 0), num_bytes(state), files)
            if error is not None:
                raise error
        self._started_s = time.monotonic()
        if self._all_write or self._world.is_first:
            self._thread = threading.Thread(
                target=self._write, args=(taken,), name=WRITER, daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Wait for a pending checkpoint.

        If it could not be written, raises the reason on all ranks.
        """
        with together(self._world):
            error = self._outcome()
            if error is not None:
                raise error

    def _outcome(self) -> BaseException | None:
        """Wait for this rank's part of a pending checkpoint. Returns its error, once."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_S)  # signals are handled in between
        error, self._error = self._error, None
        return error

    def _write(self, taken: Snapshot) -> None:
        try:
            write_checkpoint(taken, self._folder, keep=self._keep, world=self._writers)
        except BaseException as error:
            self._error = error


def write_checkpoint(taken: Snapshot, folder: Path, *, keep: int, world: World) -> None:
    """Write folder/step-…, move the links `latest` and `best`, and drop all but `keep` old ones.

    Every rank of `world` calls it; the checkpoint is complete or absent. DiskError, on all ranks,
    if the disk is full or read-only.
    """
    final = path_of(folder, taken.step)
    begun_part = part = None
    try:
        with _written(taken, final, None, world):
            begun_part = begin(final) if world.is_first else None
        part = broadcast(world, begun_part)
        assert part is not None
        with _written(taken, final, part, world):
            manifest = write_files(taken.files, part)
        manifests = gather(world, manifest)
        with _written(taken, final, part, world):
            if world.is_first:
                merged = {name: digest for each in manifests for name, digest in each.items()}
                finish(part, final, merged, keep=keep)
                point_best(folder, taken.best_step)
    except BaseException:
        if begun_part is not None:
            shutil.rmtree(begun_part, ignore_errors=True)
        raise


@contextmanager
def _written(taken: Snapshot, final: Path, part: Path | None, world: World) -> Iterator[None]:
    """Inside, a piece of a checkpoint is written; an error of one rank is raised on all."""
    with together(world), writing(final, taken.num_bytes, part):
        yield


# --- the folder ---


def path_of(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def begin(final: Path) -> Path:
    """Make the temporary folder in which a checkpoint is written."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for part in final.parent.glob(".*.part"):  # what a killed run left half-written
        _remove(part)
    part = part_of(final)
    part.mkdir()
    return part


def finish(part: Path, final: Path, manifest: Manifest, *, keep: int) -> None:
    """Make a written folder the latest checkpoint, and drop all but `keep` old ones."""
    write_manifest(part, manifest)
    # One of this step may be there, which is damaged or lacks its evaluation.
    old = final.with_name(f".{final.name}{_REPLACED}")
    if os.path.lexists(final):
        os.replace(final, old)
    os.replace(part, final)
    fsync(final.parent)
    _remove(old)
    point(final.parent / "latest", final)
    _prune(final.parent, keep)


def recover(folder: Path) -> None:
    """Give a checkpoint its name back, if a kill came before the new one of its step had it."""
    for old in folder.glob(f".step-*{_REPLACED}"):
        final = folder / old.name[1:].removesuffix(_REPLACED)
        if os.path.lexists(final):
            _remove(old)
        else:
            os.replace(old, final)


def point(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to a sibling, atomically."""
    part = part_of(link)
    part.symlink_to(target.name)
    os.replace(part, link)


def point_best(folder: Path, step: int) -> None:
    """Point `best` at the checkpoint of the best evaluation's step, if it exists."""
    best = path_of(folder, step)
    if best.is_dir() and realpath(folder / "best") != realpath(best):
        point(folder / "best", best)


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints, the linked ones, and what a run returns to."""
    paths = _checkpoints(folder)
    progress = {path: content for path in paths if (content := _progress_of(path)) is not None}
    # Checkpoints saved during skipped updates do not count: a rollback may need an older one.
    kept = [path for path in progress if not progress[path]["guard"]["running"]][-keep:]
    kept += [path_of(folder, progress[path]["best"].get("step", 0)) for path in kept[-1:]]
    # Data without an index can change its number of ranks only at the end of a pass.
    streams = {path: content.get("stream", {}) for path, content in progress.items()}
    kept += [path for path, of in streams.items() if of.get("ends") and not of.get("seen", 1)][-1:]
    targets = {*map(realpath, (folder / "latest", folder / "best", *kept))}
    for path in paths:
        if realpath(path) not in targets:
            _discard(path)


def _progress_of(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint's progress.json; None if it is damaged."""
    try:
        return read_progress(path)
    except CheckpointError:
        return None


def newest_good(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint without a problem; `report` receives the problems of newer ones."""
    for path in reversed(_named(folder)):
        problem = find_problem(path)
        if problem is None:
            return path
        report(str(problem))
    return None


def finite(folder: Path) -> Iterator[Path]:
    """Good checkpoints that were not saved during skipped updates, newest first."""
    for path in reversed(_checkpoints(folder)):
        if find_problem(path) is None and not read_progress(path)["guard"]["running"]:
            yield path


def drop_after(folder: Path, path: Path) -> None:
    """Make a checkpoint the latest, and remove later ones."""
    point(folder / "latest", path)
    paths = _checkpoints(folder)
    for later in paths[paths.index(path) + 1 :]:
        _discard(later)


def check_folder(folder: Path) -> None:
    """CheckpointError if an obstacle prevents saving the checkpoints of a run there."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(
            "run.checkpoints-not-a-folder",
            "{path}: is not a folder: move it away, or choose another with --run",
            path=folder,
        )
    for link in (folder / "latest", folder / "best"):
        if link.is_dir() and not link.is_symlink():
            raise CheckpointError(
                "run.link-is-a-folder",
                "{path}: is a folder and no link, as in a copy that has followed links: remove it "
                "if its step-… lies beside it, or else rename it to that",
                path=link,
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


def _discard(path: Path) -> None:
    """Remove a checkpoint, renamed before, so that no half of it has a checkpoint's name."""
    doomed = part_of(path)
    os.replace(path, doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a folder or a file; a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
