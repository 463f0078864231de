"""Checks of folders that are written to: run directory, caches, temporary files."""

import os
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainyard.doctor.patient import Patient
from trainyard.doctor.rows import FAIL, WARN, Check, Row, differing, spread
from trainyard.files import cache_folder
from trainyard.monitor.units import in_bytes
from trainyard.world import gather

_BLOCK = 1 << 24  # bytes written at a time
_LARGEST_WRITE = 1 << 28
_SLOW_WRITE = 50e6  # bytes per second
_UNKNOWN_CHECKPOINT = 1 << 30
_LITTLE_SPACE = 2e9  # bytes, for a cache or temporary files
_TOO_LITTLE_SPACE = 1e8
_SEEN_S = 5  # for another machine to see a new file: network file systems refresh now and then


def _existing(folder: Path) -> Path:
    """A folder, or its nearest parent that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _write(patient: Patient) -> float | None:
    """Bytes per second of a synced write about the size of a checkpoint; None on other ranks."""
    if not patient.world.is_first:
        return None
    size = min(checkpoint_bytes(patient), _LARGEST_WRITE)
    block = os.urandom(_BLOCK)
    deadline = time.perf_counter() + 10 * patient.question.seconds
    with tempfile.TemporaryFile(dir=_existing(patient.question.run), buffering=0) as file:
        begun, written = time.perf_counter(), 0
        while written < size and time.perf_counter() < deadline:
            written += file.write(block[: size - written])
        os.fsync(file.fileno())
    return written / (time.perf_counter() - begun)


def _judge_write(values: list[float | None], patient: Patient) -> Row:
    speed = values[0]
    assert speed is not None
    size = checkpoint_bytes(patient)
    found = f"{in_bytes(speed)}/s in {_existing(patient.question.run)}"
    if patient.question.has_recipe:
        found += f": a checkpoint of {in_bytes(size)} takes {size / speed:.2g} s"
    row = Row("writing checkpoints", found)
    if speed < _SLOW_WRITE:
        advice = "training waits for it: choose a faster disk with --run, or save less often"
        return row._replace(verdict=WARN, advice=advice)
    return row


def checkpoint_bytes(patient: Patient) -> int:
    """Approximate size: weights, their moving average, and two moments of the optimizer."""
    if not patient.question.has_recipe:
        return _UNKNOWN_CHECKPOINT
    import torch

    from trainyard.run.build import build_run_model

    with torch.device("meta"):
        model = build_run_model(patient.question.config, num_classes=1000)
    weights = sum(weight.numel() for weight in model.parameters())
    has_average = patient.question.config.model.ema_decay is not None
    return 4 * weights * (3 + has_average)


# --- free space ---


def _free(folder: Path) -> float:
    found = os.statvfs(_existing(folder))
    return float(found.f_bavail * found.f_frsize)


def _judge_free(
    values: list[float], patient: Patient, *, what: str, folder: Path, needs: tuple[float, float]
) -> Row:
    found = spread(values, patient.names, in_bytes, "least")
    row = Row(what, f"{found} in {_existing(folder)}")
    least, enough = needs
    if min(values) < enough:
        verdict = FAIL if min(values) < least else WARN
        return row._replace(verdict=verdict, advice=f"make room for {in_bytes(enough)}")
    return row


def _space(what: str, folder: Path, least: float, enough: float) -> Check:
    judge = partial(_judge_free, what=what, folder=folder, needs=(least, enough))
    return Check(what, lambda _: _free(folder), judge, f"{folder} is to be a folder")


def folders(patient: Patient) -> list[Check]:
    """Checks of the run directory and of two folders whose lack of space would end a run."""
    size, keep = checkpoint_bytes(patient), patient.question.config.run.keep
    passing = Path(tempfile.gettempdir())
    write_advice = "choose another directory with --run, or make this one writable"
    return [
        Check("writing checkpoints", _write, _judge_write, write_advice),
        _space("space for the run", patient.question.run, 2 * size, (keep + 2) * size),
        _space("space for caches", cache_folder(), _TOO_LITTLE_SPACE, _LITTLE_SPACE),
        _space("space for passing files", passing, _TOO_LITTLE_SPACE, _LITTLE_SPACE),
    ]


# --- a directory shared by all ranks ---


def seen_by_all(patient: Patient) -> Row:
    """Check that all ranks see a file that the first one writes there; all ranks call it."""
    folder, world = _existing(patient.question.run), patient.world
    sign = None
    if world.is_first:
        with suppress(OSError):  # reported by another check
            sign = tempfile.NamedTemporaryFile(dir=folder, prefix=".trainyard-doctor-")  # noqa: SIM115
    try:
        name = gather(world, sign and os.path.basename(sign.name))[0]
        is_seen = gather(world, name is None or _comes(folder / name))
    finally:
        if sign is not None:
            sign.close()
    blind = {rank: "does not see it" for rank, seen in enumerate(is_seen) if not seen}
    if not blind:
        return Row("run directory", f"{folder} is the same for all ranks")
    advice = (
        "put --run on a file system that all machines share: sharded weights, replicas that "
        "differ, and what is saved after a rank is lost need it"
    )
    return Row("run directory", f"{folder}: {differing(blind, patient)}", WARN, advice)


def _comes(path: Path) -> bool:
    deadline = time.monotonic() + _SEEN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        with suppress(OSError):
            os.listdir(path.parent)  # makes a network file system refresh
    return True
