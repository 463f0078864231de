"""Feeds: batches are carried to the device ahead, in order, and given back at the right time."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.errors import raises
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.batch import HostBatch, samples_of
from trainyard.data.config import DataConfig
from trainyard.data.decode.crops import CentralCrop
from trainyard.data.device.copies import (
    HostTransfer,
    PendingEvents,
    StreamTransfer,
    page_locked,
    transfer_to,
)
from trainyard.data.device.feed import Feed, Normalise
from trainyard.data.feeds import Feeds
from trainyard.data.index.build import open_index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.sampler.plan import OnePassPlan
from trainyard.errors import LoaderError
from trainyard.world import World

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU at hand")


def host_batch(number: int, **changes: Any) -> HostBatch:
    """Four images of 6 x 6 pixels, whose values and ids tell them from other batches'."""
    ids = np.arange(4 * number, 4 * number + 4)
    pixels = np.random.default_rng(number).integers(0, 256, (4, 6, 6, 3), np.uint8)
    columns = samples_of(4, ids=ids, labels=ids % 3).columns()
    host = HostBatch(**columns, images_BHWC=pixels, capacity=number + 0.5)
    return replace(host, **changes)


class Batches:
    """A loader of which so many batches are ready; an error comes in place of the one after."""

    def __init__(self, count: int, *, ready: int = 0, error: Exception | None = None) -> None:
        self.taken, self.closed, self.released = 0, False, list[int]()
        self._count, self.ready, self._error = count, ready, error

    def __iter__(self) -> Iterator[HostBatch]:
        for number in range(self._count):
            self.taken += 1
            release = partial(self.released.append, number)
            yield host_batch(number, acquire=lambda release=release: release)
        if self._error:
            raise self._error

    def is_ready(self) -> bool:
        return self.taken < self.ready

    def close(self) -> None:
        self.closed = True


def normalise(device: torch.device = CPU) -> Normalise:
    return Normalise(device, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), channels_last=True)


def feed_of(loader: Batches, transfer: Any = None, **augmentation: Any) -> Feed:
    return Feed(loader, normalise(), transfer or HostTransfer(), **augmentation)


class Ahead(HostTransfer):
    """A GPU's way of asking for batches, on the host."""

    ahead = 1


# --- what comes out ---


def test_batches_are_those_of_the_loader_in_memory_of_their_own() -> None:
    with feed_of(loader := Batches(5)) as feed:
        batches = list(feed)
    assert loader.closed
    for number, batch in enumerate(batches):
        host = host_batch(number)
        expected = normalise()(torch.from_numpy(host.images_BHWC).permute(0, 3, 1, 2))
        assert torch.equal(batch.images_BCHW, expected)
        assert batch.ids.tolist() == host.ids.tolist()
        assert batch.capacity == host.capacity
        assert batch.labels.tolist() == batch.mixed_labels.tolist() == host.labels.tolist()
        assert batch.weights.tolist() == batch.lam.tolist() == [1, 1, 1, 1]
        for column in (host.images_BHWC, host.labels, host.ids, host.weights):
            column[:] = 9  # the loader fills the slot anew
        assert batch.ids.tolist() != host.ids.tolist()


def test_on_the_cpu_the_loader_gets_its_memory_back_before_the_step() -> None:
    loader = Batches(3)
    batches = iter(feed_of(loader))
    next(batches)
    assert (loader.taken, loader.released) == (1, [0])
    next(batches)
    assert (loader.taken, loader.released) == (2, [0, 1])


def test_positions_are_those_of_the_batches_and_not_of_what_was_sent_ahead() -> None:
    seen = []

    def note(pixels: torch.Tensor, keys: Any) -> torch.Tensor:
        seen.append((keys.position, int(keys.ids[0])))
        return pixels

    loader = Batches(4, ready=9)
    list(feed_of(loader, Ahead(), pixel_transforms=[note], position=100, global_batch=4))
    assert seen == [(100, 0), (104, 4), (108, 8), (112, 12)]


# --- ahead ---


def test_a_batch_is_sent_ahead_if_it_is_ready() -> None:
    loader = Batches(4, ready=9)
    batches = iter(feed_of(loader, Ahead()))
    taken = [(int(next(batches).ids[0]), loader.taken) for _ in range(4)]
    assert taken == [(0, 2), (4, 3), (8, 4), (12, 4)]
    assert next(batches, None) is None


def test_nobody_waits_for_a_batch_that_is_not_ready() -> None:
    loader = Batches(4, ready=0)
    batches = iter(feed_of(loader, Ahead()))
    next(batches)
    assert loader.taken == 1
    loader.ready = 3  # two more, of which one is wanted
    assert int(next(batches).ids[0]) == 4
    assert loader.taken == 3


def test_a_batch_is_taken_ahead_only_of_loaders_that_say_what_is_ready() -> None:
    """Passes over streams count a batch as seen when it is taken."""
    loader = SimpleNamespace(close=lambda: None)
    counted = Batches(3, ready=9)
    generator = type("Generator", (), {"__iter__": lambda self: iter(counted), **vars(loader)})()
    batches = iter(Feed(generator, normalise(), Ahead()))
    next(batches)
    assert counted.taken == 1


def test_an_error_comes_after_all_batches_before_it() -> None:
    loader = Batches(2, ready=9, error=LoaderError("loader.hung"))
    batches = iter(feed_of(loader, Ahead()))
    assert [int(next(batches).ids[0]) for _ in range(2)] == [0, 4]
    with raises("loader.hung"):
        next(batches)


# --- the loader's side ---


@pytest.fixture
def loader(digits: Path) -> Iterator[Loader]:
    """Eight batches of 16 digits."""
    spec = LoaderSpec(
        plan=OnePassPlan(128, 16), crop=CentralCrop(8, 1.0), image_size=8, stop=8, threads=1
    )
    with Loader(open_index(str(digits / "train")), spec) as found:
        yield found


def test_a_batch_that_is_kept_outlasts_others(loader: Loader) -> None:
    first = next(loader)
    images, ids = first.images_BHWC.copy(), first.ids.copy()
    release = first.acquire()
    while not loader.is_ready():
        pass
    for expected in (1, 2, 3):  # by way of the other two slots
        assert next(loader).ids[0] == 16 * expected
    assert np.array_equal(first.images_BHWC, images) and np.array_equal(first.ids, ids)
    release()
    last = next(loader).acquire()
    assert [int(batch.ids[0]) for batch in loader] == [80, 96, 112]
    loader.close()
    last()  # memory may be released to a loader that is closed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def test_evaluations_share_a_loader_and_differ_in_nothing(device: str, digits: Path) -> None:
    """A slot that stays behind, a pass that begins in the middle, or a process for each feed."""
    index, maker = open_index(str(digits / "val")), gpu_feeds(digits, torch.device(device))
    with maker.evaluation(index) as feed:
        plain = list(feed)
    with maker.evaluations(index) as evaluations:
        processes = set()
        for _ in range(4):
            with evaluations.one() as feed:
                found = list(feed)
            assert evaluations.loader is not None
            processes.add(evaluations.loader)
            for one, other in zip(plain, found, strict=True):
                assert torch.equal(one.images_BCHW, other.images_BCHW)
                assert torch.equal(one.ids, other.ids) and torch.equal(one.labels, other.labels)
        assert len(processes) == 1
    assert evaluations.loader is None


def test_an_evaluation_that_is_cut_off_leaves_nothing_to_the_next_one(digits: Path) -> None:
    """Its loader is in the middle of the data."""
    index, maker = open_index(str(digits / "val")), gpu_feeds(digits, CPU)
    with maker.evaluations(index) as evaluations:
        with pytest.raises(KeyError), evaluations.one() as feed:
            next(iter(feed))
            raise KeyError
        assert evaluations.loader is None
        with evaluations.one() as feed:
            assert [id for batch in feed for id in batch.ids.tolist()] == [*range(len(index))]


# --- on a stream of its own ---


class Copy:
    """An event that is recorded, and not yet done."""

    is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


def test_memory_goes_back_once_its_copy_is_done_and_after_the_last_batch_all_of_it() -> None:
    """Else a kept loader lacks a slot in each evaluation, until it has none."""
    pending, released = PendingEvents(), list[int]()
    copies = [Copy() for _ in range(4)]
    for number, copy in enumerate(copies[:2]):
        pending.add(copy, partial(released.append, number))  # type: ignore[arg-type]
    copies[0].is_done = True
    pending.release_finished()
    assert released == [0]
    pending.add(copies[2], partial(released.append, 2))  # type: ignore[arg-type]
    pending.release_finished()  # waits: at most one may be pending
    assert released == [0, 1]
    pending.release_all()
    assert released == [0, 1, 2]


def test_on_the_cpu_no_memory_is_locked(loader: Loader) -> None:
    assert page_locked(loader, CPU) is loader
    assert isinstance(transfer_to(CPU), HostTransfer)
    address = loader.memory.ctypes.data
    assert address % 4096 == 0
    images = next(loader).images_BHWC
    assert address <= images.ctypes.data < address + loader.memory.nbytes - images.nbytes


# --- with a GPU ---


def gpu_feeds(digits: Path, device: torch.device) -> Feeds:
    return Feeds(
        data=DataConfig(train=str(digits / "train"), image_size=64, threads=2),
        augment=AugmentConfig(),
        global_batch=96,
        seed=0,
        channels_last=True,
        world=World(),
        device=device,
    )


@needs_gpu
def test_a_gpu_gets_what_the_cpu_gets(digits: Path, capfd: pytest.CaptureFixture[str]) -> None:
    index = open_index(str(digits / "train"))
    with gpu_feeds(digits, CPU).evaluation(index) as feed:
        expected = list(feed)
    gpu = torch.device("cuda", 0)
    with gpu_feeds(digits, gpu).evaluation(index) as feed:
        found = []
        for batch in feed:
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # a slow step
            found.append(batch)
    assert len(found) == len(expected) > 5
    for one, other in zip(found, expected, strict=True):
        assert one.images_BCHW.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(one.images_BCHW.cpu(), other.images_BCHW, rtol=0, atol=3e-7)
        for name in ("labels", "weights", "ids"):
            assert torch.equal(getattr(one, name).cpu(), getattr(other, name))
    assert "page-locked" not in capfd.readouterr().err


@needs_gpu
def test_a_ring_is_read_by_the_gpu_itself(loader: Loader) -> None:
    gpu = torch.device("cuda", 0)
    page_locked(loader, gpu)
    batch = next(loader)
    assert torch.from_numpy(batch.images_BHWC).is_pinned()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # the trainer's stream is busy
    transfer = StreamTransfer(gpu)
    transfer.start(batch)
    copied, _ = transfer._copying._waiting[0]
    copied.synchronize()  # the copy does not wait for it
    assert not torch.cuda.current_stream(gpu).query()
