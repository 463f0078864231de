"""The loader: batches in the plan's order, and no way of dying that goes unnoticed."""

import contextlib
import dataclasses
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests import loaders
from tests.data.loading import CROP, all_batches, copied, jpeg, spec
from tests.data.tars import Patch, write_files, write_shard
from tests.errors import raises
from trainyard.data.batch import COLUMNS, BadSample
from trainyard.data.decode.crops import CentralCrop, RandomResizedCrop
from trainyard.data.index.build import open_index
from trainyard.data.index.table import Index
from trainyard.data.loader.loader import Loader, LoaderProcess
from trainyard.data.loader.process import BatchTask, announcement
from trainyard.data.loader.ring import num_slices, num_slots
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.reader import Reader
from trainyard.data.sampler.plan import OnePassPlan, ShuffledPlan
from trainyard.errors import STOPS, LoaderError
from trainyard.image_size import height_width

BILINEAR = Image.Resampling.BILINEAR


@pytest.fixture
def index(digits: Path) -> Index:
    return open_index(str(digits / "train"))


def plain_images(index: Index, config: LoaderSpec, step: int) -> NDArray[np.int_]:
    """The images of a batch by Pillow, one at a time; those of the loader differ by at most 1."""
    ids = config.plan.batch(step, config.rank, config.size)
    epochs = config.plan.epochs(step, config.rank, config.size)
    images = [Image.open(index.locate(int(sample))[0]).convert("RGB") for sample in ids]
    crops = config.crop.draw(ids, epochs)(np.array([image.size for image in images]))
    height, width = height_width(config.image_size)
    pixels = []
    for image, box in zip(images, crops.boxes.tolist(), strict=True):
        if crops.resizes_first:
            image = image.resize((width, height), Image.Resampling.BILINEAR, box=box)
        else:
            image = image.crop(box).resize((width, height), Image.Resampling.BILINEAR)
        pixels.append(np.asarray(image).astype(int))
    flips = crops.flips.tolist()
    return np.stack([p[:, ::-1] if flip else p for p, flip in zip(pixels, flips, strict=True)])


@pytest.mark.parametrize("process", ["loader", "stream"])
def test_the_process_starts_without_heavy_imports(process: str) -> None:
    """A new process starts for every feed; pydantic and torch would take most of the time."""
    code = f"import sys, trainyard.data.{process}.process; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"pydantic", "torch", "trainyard.data.augment", "trainyard.data.loader.loader"}
    assert "trainyard.data.loader.fill" in names.stdout.split()
    assert not heavy & set(names.stdout.split())


# --- what comes out ---


@pytest.mark.parametrize(("threads", "rank", "size"), [(1, 0, 1), (3, 4, 7)])
def test_batches_come_in_the_plans_order(index: Index, threads: int, rank: int, size: int) -> None:
    config = spec(threads=threads, rank=rank, size=size)
    with Loader(index, spec(start=0, stop=9)) as another:  # at the same time
        next(another)
        batches = all_batches(index, config)
    assert len(batches) == 6
    assert all_batches(index, spec(start=49)) == []
    for step, batch in enumerate(batches, start=43):
        ids = config.plan.batch(step)[rank::size]
        np.testing.assert_array_equal(batch.ids, ids)
        np.testing.assert_array_equal(batch.epochs, config.plan.epochs(step)[rank::size])
        np.testing.assert_array_equal(batch.labels, index.label[ids])
        assert abs(batch.images_BHWC - plain_images(index, config, step)).max() <= 1
        assert (batch.weights == 1).all()
        assert batch.bad == []


@pytest.mark.parametrize("crop", [CROP, CentralCrop((16, 40), 0.8)], ids=["random", "central"])
def test_rectangles_lie_in_the_ring_as_they_are(
    index: Index, crop: RandomResizedCrop | CentralCrop
) -> None:
    """Height and width, changed for each other, have as many bytes."""
    config = spec(crop=crop, image_size=(16, 40), stop=44)
    (batch,) = all_batches(index, config)
    assert batch.images_BHWC.shape == (32, 16, 40, 3)
    off = batch.images_BHWC.astype(int) - plain_images(index, config, 43)
    assert np.abs(off).max() <= 1


def test_the_last_batch_of_one_pass_is_as_short_as_it_is(index: Index) -> None:
    """11 samples in batches of 5 on 3 ranks: the last one has a sample for the first rank only."""
    central = spec(plan=OnePassPlan(11, 5), crop=CentralCrop(24, 0.9), start=0, stop=3, size=3)
    seen = []
    for rank, counts in ((0, [2, 2, 1]), (1, [2, 2, 0]), (2, [1, 1, 0])):
        config = dataclasses.replace(central, rank=rank)
        batches = all_batches(index, config)
        assert [len(batch.ids) for batch in batches] == counts
        assert [len(batch.images_BHWC) for batch in batches] == counts
        seen += [sample for batch in batches for sample in batch.ids.tolist()]
        assert abs(batches[0].images_BHWC - plain_images(index, config, 0)).max() <= 1
    assert sorted(seen) == list(range(11))


def test_another_pass_is_the_same_and_nothing_more(index: Index) -> None:
    """Small batches are planned many at a time, and the last of them end with the pass."""
    with Loader(index, spec(plan=OnePassPlan(11, 5), start=0, stop=3)) as loader:
        passes = [[copied(batch) for batch in loader] for _ in range(3)]
    for again in passes[1:]:
        for batch, first in zip(again, passes[0], strict=True):
            assert batch.ids.tolist() == first.ids.tolist()
            assert np.array_equal(batch.images_BHWC, first.images_BHWC)


def test_each_batch_says_how_fast_the_loader_could_be(index: Index) -> None:
    for batch in all_batches(index, spec()):
        assert batch.capacity > 0
    work = BatchTask(30, lambda slot, part: [])
    bad = BadSample(7, "a", 0, "bad")
    said = announcement(1, work, [([], 0.5), ([bad], 0.25)], threads=4)
    assert said["capacity"] == 30 * 4 / 0.75
    assert said["bad"] == [bad]
    assert announcement(1, work, [], threads=4)["capacity"] == 0


@pytest.mark.parametrize("threads", [1, 2, 8, 64, 300])
@pytest.mark.parametrize("count", [1, 63, 64, 128, 4096])
def test_slices_are_long_and_slots_enough_for_all_threads(count: int, threads: int) -> None:
    slices, slots = num_slices(count, threads), num_slots(count, threads)
    assert (slots - 2) * slices >= threads  # all have something to do
    assert 3 <= slots <= 10
    assert slices <= threads
    assert slices == 1 or count // slices >= 64 or slots == 10


def test_slots_are_not_overwritten_while_they_are_held(index: Index) -> None:
    with Loader(index, spec(start=0, stop=12)) as loader:
        for batch in loader:
            then = copied(batch)
            time.sleep(0.05)  # ample for the loader to fill every slot it has
            for name in ("images_BHWC", *COLUMNS):
                np.testing.assert_array_equal(getattr(batch, name), getattr(then, name))


def test_bad_samples_weigh_nothing_and_are_described(tmp_path: Path, digits: Path) -> None:
    shutil.copytree(digits / "val" / "0", tmp_path / "0")
    index = open_index(str(tmp_path))
    gone, changed, broken, *_ = (Path(index.locate(sample)[0]) for sample in range(len(index)))
    gone.unlink()
    changed.write_bytes(changed.read_bytes() + b"more")
    broken.write_bytes(bytes(broken.stat().st_size))
    (batch,) = all_batches(index, spec(plan=OnePassPlan(len(index), 32), start=0, stop=1))
    assert [(row.id, row.file) for row in batch.bad] == [(0, str(gone)), (2, str(broken))]
    for row, reason in zip(batch.bad, ("No such file", "not an image"), strict=True):
        assert reason in row.reason
    # The changed one is read as it is.
    assert batch.weights.tolist() == [0, 1, 0, *[1] * (len(batch.ids) - 3)]
    assert not batch.images_BHWC[[0, 2]].any()
    assert batch.images_BHWC[3:].any(axis=(1, 2, 3)).all()


# --- shards ---


def shards_of_jpegs(folder: Path, sizes: list[int]) -> Index:
    """Shards of so many JPEGs each, of photographs."""
    for number, size in enumerate(sizes):
        rows = [(jpeg(97 * number + row), 0) for row in range(size)]
        write_shard(folder / f"shard-{number}.tar", rows)
    return open_index(str(folder / "*.tar"))


def test_shards_and_folders_and_single_reads_give_the_same(tmp_path: Path) -> None:
    shards = shards_of_jpegs(tmp_path / "shards", [7, 1, 20])
    reader = Reader(shards)
    files = {f"0/{sample:03d}.jpg": reader.read(sample) for sample in range(28)}
    folder = open_index(write_files(tmp_path / "folder", files))
    config = spec(plan=ShuffledPlan(28, 10, seed=0), start=0, stop=9, image_size=64)
    one, other = all_batches(shards, config), all_batches(folder, config)
    for batch, another in zip(one, other, strict=True):
        assert (batch.bad, another.bad) == ([], [])
        np.testing.assert_array_equal(batch.images_BHWC, another.images_BHWC)
        expected = [pillow(reader.read(sample)) for sample in batch.ids.tolist()]
        crops = CROP.draw(batch.ids, batch.epochs)(np.array([(150, 130)] * len(expected)))
        for row, image in enumerate(expected):
            image = image.crop(crops.boxes[row].tolist()).resize((64, 64), BILINEAR)
            pixels = np.asarray(image)[:, ::-1] if crops.flips[row] else np.asarray(image)
            difference = np.abs(batch.images_BHWC[row].astype(int) - pixels)
            assert np.median(difference) <= 1
            assert difference.max() <= 24


def pillow(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


def test_a_shard_that_is_cut_short_while_it_is_open(tmp_path: Path) -> None:
    """Its samples are bad from then on; the others and the run are not."""
    index = shards_of_jpegs(tmp_path, [40, 40])
    config = spec(plan=ShuffledPlan(80, 16, seed=0), start=0, stop=400, image_size=32)
    cut, offset = np.flatnonzero(index.file == 1), int(index.offset[41])
    bad: dict[int, str] = {}
    with Loader(index, config) as loader:
        for step, batch in enumerate(loader):
            if step == 20:
                os.truncate(index.locate(79)[0], offset)
            assert step >= 20 or not batch.bad
            assert all(step < 20 or weight for weight in batch.weights[index.file[batch.ids] == 0])
            bad |= {row.id: row.reason for row in batch.bad}
    assert sorted(bad) == cut[1:].tolist()  # the first one is whole
    assert all("is truncated or has changed since it was indexed" in why for why in bad.values())


# --- errors and deaths ---


def test_an_error_in_a_thread_arrives_with_its_traceback(index: Index) -> None:
    too_many = spec(plan=ShuffledPlan(5000, 32, seed=3))  # ids that the index does not have
    with Loader(index, too_many) as loader:
        with raises("loader.failed") as caught:
            next(loader)
        assert "IndexError" in str(caught.value.fields["traceback"])
        with raises("loader.died"):  # and no hang if asked again
            next(loader)


def test_batches_before_an_error_are_still_given(index: Index) -> None:
    two_good = spec(plan=OnePassPlan(1443, 481), crop=CentralCrop(24, 0.9), start=0, stop=3)
    with Loader(index, two_good) as loader:
        assert [len(next(loader).ids) for _ in range(2)] == [481, 481]
        with raises("loader.failed"):
            next(loader)


def test_an_index_that_is_gone_is_named(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits / "val" / "0", tmp_path / "0")
    index = open_index(str(tmp_path))
    index.path.unlink()
    with Loader(index, spec()) as loader, raises("loader.failed") as caught:
        next(loader)
    assert str(index.path) in str(caught.value.fields["traceback"])


@pytest.fixture
def real_start(monkeypatch: Patch) -> None:
    """Loaders start as they do for users."""
    monkeypatch.setattr(loaders.REAL, "is_wanted", True)


@pytest.mark.usefixtures("real_start")
def test_the_death_of_the_loader_is_noticed(index: Index) -> None:
    """While the trainer waits in next(), which a stopped loader keeps it doing."""
    with Loader(index, spec(start=0, stop=1000)) as loader:
        next(loader)
        os.kill(loader._process.pid, signal.SIGSTOP)
        timer = threading.Timer(0.3, os.kill, (loader._process.pid, signal.SIGKILL))
        timer.start()
        with raises("loader.died", reason="signal 9"):
            for _ in loader:
                pass
        timer.join()


def process(code: str) -> LoaderProcess:
    """A loader process that runs this code in place of its own."""
    command = (sys.executable, "-c", code)
    return LoaderProcess(command, {}, batch=2, image_size=8, channels=3, threads=1)


def test_a_loader_that_cannot_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory was blamed, as for signal 9, and the module that was not to be imported was not."""
    with raises("loader.died", reason="exit code 1"), process("import no_such_module") as it:
        it.receive()
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")


def test_a_loader_that_hangs_up_and_stays_is_an_error_and_ends() -> None:
    # Not before it has been told what to load: that would be another error.
    code = "import os, sys, time; time.sleep(1); os.close(int(sys.argv[1])); time.sleep(60)"
    with raises("loader.hung"), process(code) as it:
        it.death_s = 0.2
        it.receive()
    assert it._process.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("real_start")
@pytest.mark.parametrize("dies", [False, True], ids=["closed", "died"])
def test_a_loader_is_reaped_after_its_group_is_killed_not_before(
    index: Index, monkeypatch: Patch, dies: bool
) -> None:
    """A reaped process frees its pid, which may then be that of another group."""
    killed: list[int | None] = []
    kill = os.killpg

    def killpg(group: int, number: int) -> None:
        assert (group, number) == (loader._process.pid, signal.SIGKILL)
        killed.append(loader._process.returncode)
        kill(group, number)

    monkeypatch.setattr(os, "killpg", killpg)
    loader = Loader(index, spec())
    if dies:
        os.kill(loader._process.pid, signal.SIGKILL)
        with raises("loader.died", reason="signal 9"):
            list(loader)
    loader.close()
    assert killed == [None]
    assert loader._process.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("real_start")
def test_signals_that_end_a_run_do_not_end_the_loader(index: Index) -> None:
    """Neither while it starts nor later: the trainer still wants its last batches."""
    config = spec(start=0, stop=4)
    with Loader(index, config) as loader:
        for step in range(4):
            for number in STOPS:
                os.kill(loader._process.pid, number)
            np.testing.assert_array_equal(next(loader).ids, config.plan.batch(step))


# --- nothing is left behind ---


@pytest.mark.usefixtures("real_start")
def test_closing_in_the_middle_and_twice(index: Index) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    loader = Loader(index, spec(start=0, stop=1000))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == signals  # the trainer's own come through
    next(loader)
    loader.close()
    assert loader._process.returncode is not None
    loader.close()
    with pytest.raises(LoaderError):
        next(loader)
    del loader
    assert len(os.listdir("/proc/self/fd")) == descriptors


TRAINER = """
import json, sys, time
from pathlib import Path
from tests.data.loading import spec
from trainyard.data.index.table import load_index
from trainyard.data.loader.loader import Loader

loader = Loader(load_index(Path(sys.argv[1])), spec(start=0, stop=10**6))
next(loader)
print(json.dumps(loader._process.pid), flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["time.sleep(60)", "[None for _ in loader]"], ids=["idle", "busy"])
def test_the_loader_ends_with_a_trainer_that_is_killed(index: Index, then: str) -> None:
    shared_before = shared_memory()
    with trainer(index, then) as process:
        assert process.stdout is not None
        loader = os.pidfd_open(json.loads(process.stdout.readline()))
        process.kill()
        ended, _, _ = select.select([loader], [], [], 20)
        os.close(loader)
    assert ended
    assert shared_memory() <= shared_before


@contextlib.contextmanager
def trainer(index: Index, then: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", TRAINER.format(then=then), str(index.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def shared_memory() -> set[str]:
    """Named shared memory, but for torch's and multiprocessing's of other tests."""
    names = os.listdir("/dev/shm")
    return {name for name in names if not name.startswith(("torch_", "sem.", "mp-", "pym-"))}
