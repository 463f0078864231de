"""Ranks of `trainyard train` start: many at once, and such as do not fit together."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.tars import write_shard
from tests.distributed.started import ranks
from tests.errors import check, refused
from tests.spawn import spawn
from tests.web import FaultyServer
from trainyard.data import open_datasets
from trainyard.data.index.table import load_index
from trainyard.data.open_datasets import Source, open_split
from trainyard.errors import TrainyardError
from trainyard.files import cache_folder
from trainyard.world import World

pytestmark = pytest.mark.slow

MANY = 16  # benchmarks/start.py starts 32
SHORT = ("--run.length", "2 steps", "--run.log_every", "1 step", "--data.threads", "1")


def words(data: Path, run: Path) -> list[object]:
    keys = ("--run.eval_every", "0 steps", "--batch.size", MANY)
    return ["train", "debug", "--data", data, "--run", run, *SHORT, *keys]


@pytest.mark.night
def test_many_ranks_start_and_train(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "said").mkdir()
    with ranks(tmp_path / "said", MANY, limit_s=200) as started:
        started.start(*range(MANY), command=words(digits, tmp_path / "run"))
        assert [rank.wait(250) for rank in started.all] == [0] * MANY
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]


def test_another_recipe_does_not_start(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "said").mkdir()
    run = tmp_path / "run"
    with ranks(tmp_path / "said", 2) as started:
        (first,) = started.start(0, command=words(digits, run))
        (second,) = started.start(1, command=[*words(digits, run), "--optim.lr", "0.3"])
        assert [first.wait(), second.wait()] == [2, 2]
        first.check("rank.run-differs", rank=1, pid=second.pid, first_pid=first.pid)
        assert "optim.lr is 0.3, not " in first.said
        assert second.said == ""
    assert not run.exists()


def _open_on_two_hosts(world: World, folders: list[str]) -> str:
    """Each without the other's cache."""
    setattr(open_datasets, "load_index", lambda path: None)  # noqa: B010
    with pytest.raises(TrainyardError) as caught:
        open_split(Source(folders[world.rank], "data.train"), world, lambda *_: None)
    assert caught.value.is_shared
    return caught.value.code


def test_other_data_does_not_start(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits / "train", tmp_path / "other")
    next((tmp_path / "other").glob("*/*")).unlink()
    folders = [str(digits / "train"), str(tmp_path / "other")]
    assert spawn(_open_on_two_hosts, 2, folders) == ["rank.failed", "data.differs-between-nodes"]


def _open_by_nodes(world: World, location: str, caches: str) -> tuple[str, str]:
    """Each rank is a node with a home of its own."""
    os.environ["TRAINYARD_CACHE"] = f"{caches}/{world.rank}"
    setattr(open_datasets, "_SENT_AT_ONCE", 100)  # noqa: B010
    own = lambda path: load_index(path) if path.parent == cache_folder() else None  # noqa: E731
    setattr(open_datasets, "load_index", own)  # noqa: B010
    source = Source(location, "data.train")
    index = open_split(source, replace(world, local_rank=0), lambda *_: None)
    return index.fingerprint, str(index.path.parent)


def test_other_nodes_receive_a_remote_index(tmp_path: Path) -> None:
    """In parts. To make it takes a request for each sample."""
    counts = {}
    with FaultyServer(tmp_path / "source") as server:
        write_shard(server.folder / "0.tar", [(b"image", label) for label in range(20)])
        for nodes in (1, 3):
            caches = tmp_path / f"caches-{nodes}"
            opened = spawn(_open_by_nodes, nodes, f"{server.url}/0.tar", str(caches))
            assert opened == [(opened[0][0], f"{caches}/{rank}") for rank in range(nodes)]
            counts[nodes] = len(server.requests)
            server.requests.clear()
    assert counts[1] == counts[3] > 0


def test_variables_that_contradict_each_other(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    error = refused(*words(digits, tmp_path / "run"))
    check(error, "rank.variable-missing", variable="WORLD_SIZE", given="RANK", launcher="torchrun")
