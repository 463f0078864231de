"""trainyard.torch and trainyard.numpy: the loader in a loop of the user's own."""

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.errors import raises
from tests.spawn import spawn
from tests.tiers import tiered
from trainyard import Loader, LoaderSpec, Normalise, RandomResizedCrop, ShuffledPlan, open_index
from trainyard import numpy as of_numpy
from trainyard.errors import InputError
from trainyard.torch import TorchLoader, loader
from trainyard.world import World

STRONG: dict[str, Any] = {
    "randaugment": "rand-m9-mstd0.5-inc1",
    "erasing": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
}


@pytest.fixture
def made() -> Iterator[Callable[..., TorchLoader]]:
    """Makes loaders of 32 pixels, which end with the test."""
    loaders = []

    def make(location: object, batch_size: int = 64, **arguments: Any) -> TorchLoader:
        loaders.append(loader(str(location), batch_size, **{"image_size": 32, **arguments}))
        return loaders[-1]

    yield make
    for one in loaders:
        one.close()


def batches(source: TorchLoader, most: int = 10**9) -> list[tuple[Tensor, ...]]:
    return [batch for _, batch in zip(range(most), source, strict=False)]


def assert_same(some: list[tuple[Tensor, ...]], others: list[tuple[Tensor, ...]]) -> None:
    assert len(some) == len(others) > 0
    for left, right in zip(some, others, strict=True):
        assert len(left) == len(right)
        assert all(map(torch.equal, left, right))


# --- the batches ---


def test_the_batches_are_those_of_the_data_path(made: Any, digits: Path) -> None:
    index = open_index(digits / "train")
    plan = ShuffledPlan(len(index), global_batch=64, seed=3)
    crop = RandomResizedCrop(seed=3, scale=(0.5, 1.0), ratio=(0.75, 4 / 3), flip=0.5)
    spec = LoaderSpec(plan=plan, crop=crop, image_size=32, stop=5)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    normalise = Normalise(torch.device("cpu"), mean=mean, std=std, channels_last=False)
    keys = {"seed": 3, "scale": (0.5, 1.0), "ratio": (0.75, 4 / 3), "mean": mean, "std": std}
    pixels = batches(made(digits, **keys, dtype=torch.uint8), 5)
    floats = batches(made(digits, **keys, channels_last=True), 5)
    with Loader(index, spec) as reference:
        for number, batch in enumerate(reference):
            images_BCHW = torch.from_numpy(batch.images_BHWC).permute(0, 3, 1, 2)
            assert torch.equal(pixels[number][0], images_BCHW)
            assert pixels[number][0].is_contiguous()
            assert torch.equal(floats[number][0], normalise(images_BCHW))
            assert floats[number][0].is_contiguous(memory_format=torch.channels_last)
            for _, labels in (pixels[number], floats[number]):
                assert labels.tolist() == batch.labels.tolist()


def test_ranks_share_the_batches_of_one_rank(made: Any, digits: Path) -> None:
    whole = batches(made(digits, 64))
    parts = [batches(made(digits, 32, rank=rank, world_size=2)) for rank in range(2)]
    for both, *shares in zip(whole, *parts, strict=True):
        for rank, share in enumerate(shares):
            assert_same([share], [tuple(one[rank::2] for one in both)])


def test_a_pass_shows_each_image_once_without_an_end_of_the_stream(made: Any, digits: Path) -> None:
    train = made(digits, 100, dtype=torch.uint8, scale=(1, 1), ratio=(1, 1), flip=0.0)
    assert len(train) == 1433 // 100
    images = torch.cat([images for _ in range(2) for images, _ in batches(train)])
    seen = [image.numpy().tobytes() for image in images[:1433]]
    alone = made(digits / "train", 256, train=False, dtype=torch.uint8, crop_pct=1.0)
    assert sorted(seen) == sorted(image.numpy().tobytes() for some, _ in alone for image in some)


def test_evaluation_gives_each_image_once_and_each_rank_equally_many_batches(
    made: Any, digits: Path
) -> None:
    whole = made(digits, 91, train=False)  # 364 = 4 x 91
    labels = torch.cat([labels for _, labels in whole])
    assert (len(whole), len(labels)) == (4, 364)
    assert_same(batches(whole), batches(whole))
    for size, batch in ((3, 11), (2, 91)):
        ranks = [made(digits, batch, train=False, rank=r, world_size=size) for r in range(size)]
        counts = [[len(labels) for _, labels in one] for one in ranks]
        assert [len(one) for one in ranks] == [len(count) for count in counts]
        assert len({len(count) for count in counts}) == 1
        assert sum(map(sum, counts)) == 364
        assert min(map(min, counts)) > 0
        assert max(map(max, counts)) <= batch
    with raises("loader.too-few-images", count=364, ranks=9, size=1):
        made(digits, 1, train=False, rank=0, world_size=9)


def test_labels_of_validation_data_are_numbers_of_the_training_classes(
    made: Any, digits: Path, tmp_path: Path
) -> None:
    shutil.copytree(digits, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "val" / "0")
    val = made(tmp_path / "data", train=False)
    assert val.dataset.classes == [str(digit) for digit in range(10)]
    labels = torch.cat([labels for _, labels in val]).tolist()
    assert set(labels) == set(range(1, 10))
    names = made(tmp_path / "data" / "val", train=False, classes=val.dataset.classes)
    assert torch.cat([labels for _, labels in names]).tolist() == labels
    alone = made(tmp_path / "data" / "val", train=False)  # as an ImageFolder has it
    assert alone.dataset.class_to_idx == {str(digit): digit - 1 for digit in range(1, 10)}
    assert len(alone.dataset) == len(alone.dataset.targets) == len(labels)


def test_a_share_of_data_without_parts_validates(made: Any, digits: Path) -> None:
    train, val = (made(digits / "train", train=side, val_share=0.2) for side in (True, False))
    assert len(train.dataset) + len(val.dataset) == 1433
    assert 250 < len(val.dataset) < 320
    with raises("recipe.val-share-beside-val-data"):
        made(digits, val_share=0.2)


def test_soft_labels_are_what_a_recipe_trains_with(
    made: Any, digits: Path, listed_digits: Path
) -> None:
    for images, targets in batches(made(digits, **STRONG), 3):
        assert targets.shape == (len(images), 10)
        assert targets.sum(dim=1).allclose(torch.ones(len(images)))
        assert targets.min() > 0.0099
        F.cross_entropy(torch.zeros(len(images), 10), targets)
    (_, plain), *_ = batches(made(digits, **{**STRONG, "mixup": 0.0, "cutmix": 0.0}), 1)
    (_, labels), *_ = batches(made(digits), 1)
    expected = F.one_hot(labels, 10) * 0.9 + 0.01
    assert plain.allclose(expected)
    lists = made(listed_digits, train=False)
    several = torch.cat([targets for _, targets in lists])
    assert several.shape[1] == len(lists.dataset.classes) == 11
    assert set(several.sum(dim=1).tolist()) == {0, 2}
    assert made(digits, train=False, **STRONG).dataset.classes  # validation has none of it
    (_, numbers), *_ = batches(made(digits, train=False, **STRONG), 1)
    assert numbers.dtype == torch.int64


@pytest.mark.parametrize("train", [True, False])
def test_loops_find_what_they_ask_a_data_loader_for(made: Any, digits: Path, train: bool) -> None:
    source = made(digits, train=train)
    assert source.batch_sampler is None  # as a DataLoader of an iterable data set has it
    assert callable(source.sampler.set_epoch)
    assert len(source.dataset) == (1433 if train else 364)


def test_numpy_gets_the_same_batches(digits: Path, made: Any) -> None:
    arrays = of_numpy.loader(digits, 64, image_size=32)
    for (images, labels), (pixels, numbers), _ in zip(arrays, made(digits), range(3), strict=False):
        assert isinstance(images, np.ndarray)
        assert images.flags.c_contiguous
        np.testing.assert_array_equal(images, pixels.permute(0, 2, 3, 1).numpy())
        np.testing.assert_array_equal(labels, numbers.numpy())
    assert (len(arrays), arrays.dataset.classes[3]) == (22, "3")
    arrays.close()
    with of_numpy.loader(digits, 64, train=False, image_size=32, dtype=np.uint8) as of_bytes:
        assert next(iter(of_bytes))[0].dtype == np.uint8


# --- epochs and states ---


def test_the_rest_of_an_epoch_is_the_same_after_a_state(made: Any, digits: Path) -> None:
    first = made(digits, **STRONG)
    first.set_epoch(3)
    whole = batches(first)
    following = batches(first)
    begun, resumed = made(digits, **STRONG), made(digits, **STRONG)
    for cut in (0, 1, 7, 22):
        begun.set_epoch(3)
        for _ in zip(range(cut), iter(begun), strict=False):
            pass
        resumed.load_state_dict(begun.state_dict())
        assert resumed.state_dict() == begun.state_dict()
        if cut < 22:  # as loops do that name each epoch
            resumed.set_epoch(3)
            assert_same(batches(resumed), whole[cut:])
        assert_same(batches(resumed), following)


def test_a_state_goes_on_with_other_ranks_and_batches(made: Any, digits: Path) -> None:
    plain = {"dtype": torch.uint8, "scale": (1, 1), "ratio": (1, 1), "flip": 0.0}
    whole = made(digits, **plain)
    stream = torch.cat([images for _ in range(3) for images, _ in whole])
    begun = made(digits, 64, **plain)
    batches(begun, 5)
    ranks = [made(digits, 40, rank=rank, world_size=2, **plain) for rank in range(2)]
    for one in ranks:
        one.load_state_dict(begun.state_dict())
    rest = [batches(one) for one in ranks]
    assert len(rest[0]) == len(rest[1]) == 17 - 5 * 64 // 80
    rest = [before + batches(one) for before, one in zip(rest, ranks, strict=True)]
    mixed = [image for parts in zip(*rest, strict=True) for image in _interleaved(parts)]
    assert torch.equal(torch.stack(mixed), stream[320 : 320 + len(mixed)])
    assert ranks[0].state_dict() == ranks[1].state_dict()


def _interleaved(parts: Any) -> Iterator[Tensor]:
    for images in zip(*(part[0] for part in parts), strict=True):
        yield from images


def test_an_epoch_depends_on_its_number_alone(made: Any, digits: Path) -> None:
    one, other = made(digits), made(digits)
    epochs = [batches(one) for _ in range(3)]
    other.set_epoch(2)
    assert_same(batches(other), epochs[2])
    other.sampler.set_epoch(0)
    batches(other, 4)  # a loop that breaks off
    other.set_epoch(0)
    assert_same(batches(other), epochs[0])
    assert_same(batches(other), epochs[1])
    assert not torch.equal(epochs[0][0][0], epochs[1][0][0])


def test_a_state_may_come_after_an_iterator_that_has_given_nothing(made: Any, digits: Path) -> None:
    """Lightning makes one to look whether there is data, and another for the epoch."""
    whole, begun, resumed = made(digits), made(digits), made(digits)
    for _ in zip(range(5), begun, strict=False):
        pass
    early = iter(resumed)
    resumed.load_state_dict(begun.state_dict())
    iter(resumed)
    resumed.sampler.set_epoch(0)
    rest = batches(whole)[5:]
    assert_same(list(early), rest)


def test_a_state_of_other_data_or_another_seed_is_refused(made: Any, digits: Path) -> None:
    state = made(digits).state_dict()
    with raises("loader.other-state", key="seed", theirs=0, ours=1):
        made(digits, seed=1).load_state_dict(state)
    with raises("loader.other-state", key="data"):
        made(digits / "val").load_state_dict(state)


# --- what cannot be read ---


@pytest.fixture
def damaged(digits: Path, tmp_path: Path) -> Path:
    shutil.copytree(digits / "val", tmp_path / "damaged")
    for number, path in enumerate(sorted((tmp_path / "damaged" / "3").iterdir())[:3]):
        path.write_bytes(path.read_bytes()[: 40 + number])
    return tmp_path / "damaged"


def test_images_that_cannot_be_read(made: Any, damaged: Path) -> None:
    with pytest.warns(UserWarning) as told:
        dropped = made(damaged, train=False)
        assert sum(len(labels) for _, labels in dropped) == 361
        assert sum(len(labels) for _, labels in dropped) == 361  # told once
    assert dropped.num_bad == 3
    assert sum(str(one.message).startswith(str(damaged)) for one in told) == 3
    with pytest.warns(UserWarning):
        weighed = batches(made(damaged, train=False, bad="weigh"))
    weights = torch.cat([weights for _, _, weights in weighed])
    assert (len(weights), int(weights.sum())) == (364, 361)
    for arguments in ({"bad": "raise"}, {"max_bad": 0.005}):
        with warnings.catch_warnings(), raises("loader.bad-sample", total=364):
            warnings.simplefilter("ignore")
            batches(made(damaged, train=False, **arguments))
    with warnings.catch_warnings(), raises("loader.batch-of-bad", count=1):
        warnings.simplefilter("ignore")
        batches(made(damaged, 1, train=False))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"rotate": 3}, "recipe.unknown-key"),
        ({"train_size": 3}, "recipe.unknown-key"),
        ({"samples": 3}, "recipe.unknown-key"),
        ({"image_size": "x"}, "recipe.invalid-value"),
        ({"erasing_mode": "rand"}, "recipe.needs-another-key"),
        ({"order": "join"}, "loader.no-join"),
        ({"dtype": torch.uint8, "mixup": 0.2}, "loader.needs-floats"),
        ({"bad": "skip"}, "loader.unknown-choice"),
        ({"rank": 2, "world_size": 2}, "loader.wrong-rank"),
        ({"rank": 0}, "loader.wrong-rank"),
        ({"batch_size": 0}, "recipe.invalid-value"),
        ({"decode": "gpu"}, "recipe.decode-without-gpu"),
        ({"range": "auto"}, "recipe.range-without-depth"),
    ],
)
def test_wrong_arguments(digits: Path, arguments: dict[str, Any], code: str) -> None:
    with raises(code):
        loader(digits, **{"batch_size": 8, **arguments})


# --- ends ---


def test_an_end_leaves_no_process(digits: Path) -> None:
    def begun() -> tuple[TorchLoader, Iterator[Any]]:
        source = loader(digits, 8, image_size=32)
        iterator = iter(source)
        next(iterator)
        return source, iterator

    before = _children()
    source, iterator = begun()
    assert len(_children() - before) == 1
    source.close()
    assert not _children() - before
    with raises("loader.closed"):
        next(iter(source))

    source, iterator = begun()
    del source, iterator
    gc.collect()
    assert not _children() - before

    with pytest.raises(KeyboardInterrupt), begun()[0] as source:
        for _ in source:
            raise KeyboardInterrupt
    assert not _children() - before

    source, iterator = begun()
    second = iter(source)
    next(second)
    with raises("loader.two-iterators"):
        next(iterator)
    next(second)
    assert len(_children() - before) == 1
    source.close()

    val = loader(digits, 8, train=False, image_size=32)
    for _ in val:
        break
    gc.collect()
    assert sum(1 for _ in val) == len(val)
    del val
    gc.collect()
    assert not _children() - before


def _children() -> set[str]:
    """The children of all threads. Those of earlier tests may end at any time."""
    found = set[str]()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):  # a thread that has ended
            found |= {*Path(f"/proc/self/task/{task}/children").read_text().split()}
    return found


def _cycle(source: Any, iterator: Any) -> None:
    both = [source, iterator]
    both.append(both)


def _throw(source: Any, iterator: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        iterator.throw(ZeroDivisionError())


def _in_a_thread(source: Any, iterator: Any) -> None:
    thread = threading.Thread(target=next, args=(iterator,))
    thread.start()
    thread.join()


ENDS: dict[str, Callable[[Any, Any], object]] = {
    "break": lambda source, iterator: None,
    "iterator closed": lambda source, iterator: iterator.close(),
    "closed twice": lambda source, iterator: (source.close(), source.close()),
    "exhausted": lambda source, iterator: list(iterator),
    "another epoch": lambda source, iterator: source.set_epoch(7),
    "two iterations": lambda source, iterator: next(iter(source)),
    "cycle": _cycle,
    "throw": _throw,
    "thread": _in_a_thread,
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_after_each_end_of_a_loop_no_process_is_left(digits: Path, end: str, train: bool) -> None:
    before = _children()
    source = loader(digits, 64, image_size=32, train=train)
    iterator = iter(source)
    next(iterator)
    ENDS[end](source, iterator)
    del source, iterator
    gc.collect()
    assert not _children() - before


@pytest.mark.parametrize("train", [True, False])
def test_an_iteration_of_a_closed_loader_says_so(made: Any, digits: Path, train: bool) -> None:
    """It died of signal 9, as of too little memory."""
    source = made(digits, train=train)
    iterator = iter(source)
    next(iterator)
    source.close()
    with raises("loader.closed"):
        next(iterator)


def test_two_loaders_at_a_time_have_the_batches_of_one_alone(made: Any, digits: Path) -> None:
    train, val = made(digits), made(digits, train=False)
    both = list(zip(train, val, strict=False))
    assert_same([some for some, _ in both], batches(made(digits), len(both)))
    assert_same([others for _, others in both], batches(made(digits, train=False)))


def test_the_epoch_of_a_call_inside_of_a_loop_is_the_next_one(made: Any, digits: Path) -> None:
    train, other = made(digits), made(digits)
    for _ in train:
        train.set_epoch(3)
    other.set_epoch(3)
    assert_same(batches(train), batches(other))


def test_a_loader_is_not_copied(made: Any, digits: Path) -> None:
    train = made(digits)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with raises("loader.no-copy"):
            copied(train)


PROGRAM = """import os, signal, sys, threading
from pathlib import Path
from trainyard.torch import loader
source = loader(sys.argv[1], 8, image_size=32)  # without if __name__ == "__main__"
iterator = iter(source)
next(iterator)
print(Path("/proc/self/task", str(os.getpid()), "children").read_text(), flush=True)
"""
PROGRAM_ENDS = {
    "end": "",
    "exit": "sys.exit(3)",
    "error": "raise ValueError",
    "at once": "os._exit(0)",
    "daemon thread": "threading.Thread(target=list, args=(source,), daemon=True).start()",
    "another program": "os.execv(sys.executable, [sys.executable, '-c', ''])",
    "fork": "os.fork()",
    **{name: f"os.kill(os.getpid(), signal.{name})" for name in ("SIGINT", "SIGTERM", "SIGKILL")},
}


@pytest.mark.slow
@pytest.mark.parametrize("end", tiered(PROGRAM_ENDS, night=PROGRAM_ENDS.keys() - {"SIGKILL"}))
def test_after_the_end_of_a_program_no_process_is_left(digits: Path, end: str) -> None:
    words = [sys.executable, "-c", PROGRAM + PROGRAM_ENDS[end], str(digits)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    started = done.stdout.split()
    assert started, done.stderr
    deadline = time.monotonic() + 20
    while left := [pid for pid in started if Path("/proc", pid).exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_fork_leaves_its_parents_loader_alone(made: Any, digits: Path) -> None:
    train, other = made(digits, 8), made(digits, 8)
    iterator = iter(train)
    next(iterator)
    child = os.fork()
    if not child:
        refused = [_refusal(iterator), _refusal(iter(train))]
        train.close()
        os._exit(refused != ["loader.other-process"] * 2)
    assert os.waitpid(child, 0)[1] == 0
    assert_same(list(iterator), batches(other)[1:])


def _refusal(iterator: Iterator[Any]) -> str:
    try:
        next(iterator)
    except InputError as error:
        return error.code
    return ""


def _on_a_rank(world: World, digits: str) -> tuple[list[int], int, dict[str, Any]]:
    with loader(digits, 32, image_size=32) as train:
        labels = [int(label) for _, some in train for label in some]
        return labels, len(train), train.state_dict()


@pytest.mark.slow
def test_ranks_are_those_of_torch_distributed(made: Any, digits: Path) -> None:
    ranks = spawn(_on_a_rank, 2, str(digits))
    whole = [labels for _, labels in batches(made(digits, 64))]
    for rank, (labels, length, state) in enumerate(ranks):
        assert labels == torch.cat([some[rank::2] for some in whole]).tolist()
        assert (length, state["epoch"]) == (22, 1)


def test_ranks_are_those_of_the_launcher_without_it(
    made: Any, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with monkeypatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        train = made(digits, 32)
    assert (len(train), train.batch_size) == (22, 32)
    (_, labels), (_, whole) = batches(train, 1)[0], batches(made(digits, 64), 1)[0]
    assert torch.equal(labels, whole[1::2])
