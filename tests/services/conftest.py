"""Data for real servers."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.tars import write_tar
from tests.services.losses import SAME, Losses, losses_of
from tests.services.slurm_cluster import SlurmCluster
from tests.web import FaultyServer
from trainyard.data.storage.manifest import Manifest, Shard, Split, write_manifest
from trainyard.data.storage.remote.retry import _last_said
from trainyard.files import sha256

NUM_SHARDS = 4


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("TRAINYARD_RETRY_S", "30")
    _last_said.clear()


@pytest.fixture(scope="session")
def shards(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as WebDataset shards with a manifest. Not to be written to."""
    folder = tmp_path_factory.mktemp("shards")
    classes = sorted(p.name for p in (digits / "train").iterdir() if p.is_dir())
    splits = {}
    for split, count in (("train", NUM_SHARDS), ("val", 1)):
        images = sorted((digits / split).glob("*/*"), key=lambda path: path.name)
        names = [f"digits-{split}-{number:06d}.tar" for number in range(count)]
        listed = []
        for number, name in enumerate(names):
            part = images[number::count]
            members = []
            for image in part:
                key = f"{image.parent.name}_{image.stem}".replace(".", "_")
                label = str(classes.index(image.parent.name)).encode()
                members += [(f"{key}{image.suffix}", image.read_bytes()), (f"{key}.cls", label)]
            path = write_tar(folder / name, members)
            listed.append(Shard(name, len(part), path.stat().st_size, sha256(path)))
        files = f"digits-{split}-{{000000..{count - 1:06d}}}.tar"
        splits[split] = Split(files, tuple(listed))
    write_manifest(folder, Manifest("webdataset", tuple(classes), splits))
    return folder


@pytest.fixture
def own_shards(shards: Path, tmp_path: Path) -> Path:
    """A copy of the shards, to be written to."""
    return Path(shutil.copytree(shards, tmp_path / "own_shards"))


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyServer]:
    with FaultyServer(tmp_path / "faulty") as server:
        yield server


@pytest.fixture(scope="session")
def local_losses(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Those of the debug recipe with the options SAME on two local ranks."""
    folder = tmp_path_factory.mktemp("local") / "run"
    command = [sys.executable, "-m", "trainyard", "launch", "local", "debug", "--ranks", "2"]
    command += ["--data", str(digits), "--run", str(folder), *SAME]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    return losses_of(folder)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    with cluster.running():
        yield cluster
