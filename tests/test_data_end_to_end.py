"""From the raw archives to trained models, by the commands alone."""

import json
from pathlib import Path

import pytest

from tests.command_line import Capture, run
from tests.mini_imagenet import WNIDS, MiniImageNet, write_mini_imagenet

pytestmark = pytest.mark.slow

FORMATS = ("webdataset", "hdf5", "folder")
SHORT = (
    *("--run.length", "12 epochs", "--batch.size", "20", "--run.log_every", "1 steps"),
    *("--augment.label_smoothing", "0", "--data.threads", "1"),
)


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> MiniImageNet:
    return write_mini_imagenet(tmp_path_factory.mktemp("archives"))


@pytest.fixture(scope="module")
def prepared(mini: MiniImageNet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The miniature ImageNet in every format that can be written."""
    folders = {kind: tmp_path_factory.mktemp("prepared") / kind for kind in FORMATS}
    for kind, folder in folders.items():
        arguments = ("--format", kind, "--no-checksum", "--processes", 1)
        assert run("data", "prepare", "imagenet-1k", mini.folder, folder, *arguments) == 0
    return folders


def train_losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_a_model_learns_alike_from_every_container(
    prepared: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    """Same images, same order, same crops: the same losses to the last bit."""
    losses = {}
    for kind in ("webdataset", "hdf5"):
        assert run("data", "verify", prepared[kind], "--deep", "--processes", 1) == 0
        capsys.readouterr()
        where = ("--data", prepared[kind], "--run", tmp_path / kind)
        assert run("train", "debug", *where, *SHORT, "--json") == 0
        assert json.loads(capsys.readouterr().out)["best"]["top1"] > 0.9
        losses[kind] = train_losses(tmp_path / kind)
    assert len(losses["webdataset"]) > 30
    assert losses["webdataset"] == losses["hdf5"]


def test_pixels_give_the_weights_of_a_folder_of_pngs(digits: Path, tmp_path: Path) -> None:
    words = ("--format", "packed", "--pixels", "--no-shuffle", "--processes", 1)
    assert run("data", "pack", digits, tmp_path / "packed", *words) == 0
    weights = []
    for name, data in (("folder", digits), ("pixels", tmp_path / "packed")):
        where = ("--data", data, "--run", tmp_path / name)
        assert run("train", "debug", *where, "--run.length", "8 steps") == 0
        [path] = (tmp_path / name / "checkpoints" / "latest").glob("model.safetensors")
        weights.append(path.read_bytes())
    assert weights[0] == weights[1]


def test_every_container_has_the_same_classes(prepared: dict[str, Path], capsys: Capture) -> None:
    capsys.readouterr()
    seen = []
    for folder in prepared.values():
        assert run("data", "show", folder, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert tuple(found["train"]["classes"]) == WNIDS
        seen.append(
            {split: (about["per_class"], about["samples"]) for split, about in found.items()}
        )
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("kind", FORMATS)
def test_any_container_becomes_any_other(
    kind: str, prepared: dict[str, Path], mini: MiniImageNet, tmp_path: Path
) -> None:
    from trainyard.data.index.build import open_index
    from trainyard.data.index.splits import find_splits
    from trainyard.data.reading.reader import Reader

    for other in FORMATS:
        packed = tmp_path / other
        assert run("data", "pack", prepared[kind], packed, "--format", other, "--processes", 1) == 0
        for split, location in find_splits(str(packed)).items():
            index = open_index(location)
            read = Reader(index).read
            pairs = [(int(index.label[sample]), read(sample)) for sample in range(len(index))]
            assert sorted(pairs) == mini.pairs(split)
            assert index.classes == WNIDS
