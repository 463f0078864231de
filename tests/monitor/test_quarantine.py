"""Bad samples are written down once, whoever meets them and however often."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from tests.spawn import spawn
from trainyard.errors import DataError
from trainyard.monitor.quarantine import Quarantine
from trainyard.world import World

SIZES = {"train": 100, "val": 10}


def quarantine(path: Path, max_bad: float = 1, world: World = World()) -> Quarantine:  # noqa: B008
    return Quarantine(path, world=world, max_bad=max_bad, num_samples=SIZES)


def bad(sample: int) -> tuple[int, str, int, str]:
    return (sample, f"cat/{sample}.jpg", 10 * sample, "not an image")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ids(path: Path) -> list[tuple[str, int]]:
    return [(line["split"], line["id"]) for line in lines(path)]


def test_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    kept = quarantine(path)
    kept.note("train", [bad(3)])
    assert not path.exists()  # not before all ranks have been told
    kept.exchange()
    assert lines(path) == [
        {
            "split": "train",
            "id": 3,
            "file": "cat/3.jpg",
            "offset": 30,
            "reason": "not an image",
        }
    ]


def test_each_once_however_often_it_is_met(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    kept = quarantine(path)
    for _ in range(2):
        kept.note("train", [bad(3), bad(1), bad(3)])
        kept.note("val", [bad(3)])  # another image, of the same number
        kept.exchange()
    assert ids(path) == [("train", 1), ("train", 3), ("val", 3)]
    assert (kept.count("train"), kept.count("val")) == (2, 1)


@pytest.mark.parametrize("cut", [0, 10])
def test_a_restart_knows_those_of_before(cut: int, tmp_path: Path) -> None:
    """But for a line that a kill cut short."""
    path = tmp_path / "quarantine.jsonl"
    first = quarantine(path)
    first.note("train", [bad(1), bad(2)])
    first.exchange()
    path.write_bytes(path.read_bytes()[: -cut or None])
    second = quarantine(path)
    assert second.count("train") == (1 if cut else 2)
    second.note("train", [bad(2), bad(5)])
    second.exchange()
    assert ids(path) == [("train", 1), ("train", 2), ("train", 5)]


@pytest.mark.parametrize("line", ["[]", "nonsense", '{"id": 3}', '{"split": "test", "id": 3}'])
def test_a_line_that_is_none_of_ours_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    path.write_text('{"split": "train", "id": 1}\n' + line + "\n")
    with raises("run.malformed-quarantine-line", path=path, line=2):
        quarantine(path)


@pytest.mark.parametrize(("split", "allowed"), [("train", 5), ("val", 1)])
def test_more_than_max_bad(split: str, allowed: int, tmp_path: Path) -> None:
    """5% of ten samples are rounded up to one: a few photographs may have one broken file."""
    path = tmp_path / "quarantine.jsonl"
    kept = quarantine(path, max_bad=0.05)
    kept.note(split, [bad(sample) for sample in range(allowed)])
    kept.exchange()
    kept.note(split, [bad(99)])
    counts = {"num_bad": allowed + 1, "num_samples": SIZES[split], "max_bad": 0.05}
    with raises(
        "data.too-many-bad-samples", path=path, split=split, reason="not an image", **counts
    ):
        kept.exchange()
    assert len(lines(path)) == allowed + 1  # the message sends people there


@pytest.mark.parametrize(("max_bad", "ends"), [(0, True), (1, False)])
def test_none_or_all_are_allowed(max_bad: float, ends: bool, tmp_path: Path) -> None:
    kept = quarantine(tmp_path / "quarantine.jsonl", max_bad=max_bad)
    kept.exchange()
    kept.note("val", [bad(sample) for sample in range(10)])
    with pytest.raises(DataError) if ends else nullcontext():
        kept.exchange()
    assert kept.count("val") == 10


def _meet(world: World, path: Path) -> tuple[int, object]:
    kept = quarantine(path, max_bad=0.05, world=world)
    kept.note("train", [bad(world.rank), bad(7)])  # 7 is met by all
    kept.exchange()
    count = kept.count("train")
    kept.note("train", [bad(10 + n) for n in range(5)] if world.rank == 1 else [])
    try:
        kept.exchange()
    except DataError as error:
        return count, error.fields["num_bad"] if error.is_shared else None
    return count, None


@pytest.mark.slow
def test_ranks_tell_each_other(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    results = spawn(_meet, 3, path)
    assert results == [(4, 9)] * 3
    assert ids(path) == [("train", n) for n in (0, 1, 2, 7, 10, 11, 12, 13, 14)]
