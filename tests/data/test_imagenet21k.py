"""ImageNet-21K-P: which classes and images are kept, and how they are made smaller."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command_line import Capture, complaint, run, shown
from tests.data.tars import Patch, open_splits, stored
from tests.images import encode
from tests.mini_imagenet import tar_of
from trainyard.data.storage.manifest import read_manifest

KEPT = {"n00007846": 501, "n02084071": 510}
DROPPED = {"n00001740": 500, "n01503061": 60}
UNREADABLE = "n02084071_9.JPEG"
Content = dict[str, list[tuple[int, bytes]]]


@pytest.fixture(scope="module")
def classes() -> dict[str, dict[str, bytes]]:
    """Images by name by class. A few are large, all others are tiny; one is no image."""
    made = {
        wnid: {f"{wnid}_{number}.JPEG": tiny(label, number) for number in reversed(range(count))}
        for label, (wnid, count) in enumerate((KEPT | DROPPED).items())
    }
    random = np.random.default_rng(0)
    for number, (width, height) in enumerate([(400, 300), (223, 300), (223, 223), (224, 40)]):
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        made["n00007846"][f"n00007846_{number + 100}.JPEG"] = encode(
            Image.fromarray(pixels), "JPEG"
        )
    made["n02084071"][UNREADABLE] = b"\xff\xd8\xff\xe0 damaged"
    return made


def tiny(label: int, number: int) -> bytes:
    """A JPEG unlike any other."""
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = (number % 64 * 4, number // 64 * 16, label * 64)
    pixels[:, 8:] = 255 - pixels[:, :8]
    return encode(Image.fromarray(pixels), "JPEG")


@pytest.fixture(scope="module")
def fall11(classes: dict[str, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "fall11_whole.tar"
    path.write_bytes(tar_of({f"{wnid}.tar": tar_of(images) for wnid, images in classes.items()}))
    return path


@pytest.fixture(scope="module")
def squashed(fall11: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is made of it by default. Not to be written to."""
    folder = tmp_path_factory.mktemp("packed") / "out"
    assert prepare(fall11, folder) == 0
    return folder


def prepare(source: Path, destination: Path, *options: object) -> int:
    return run("data", "prepare", "imagenet-21k-p", source, destination, "--workers", 1, *options)


def content(folder: Path) -> Content:
    """Sorted (label, image) of each split."""
    return {
        split: sorted((sorted(KEPT).index(name), image) for name, image in stored(index))
        for split, index in open_splits(folder).items()
    }


def by_rule(classes: dict[str, dict[str, bytes]]) -> Content:
    """What the published script keeps, before it resizes: `ls | head -n 50` of each class."""
    splits: Content = {"train": [], "val": []}
    for label, wnid in enumerate(sorted(KEPT)):
        for rank, name in enumerate(sorted(classes[wnid])):
            splits["val" if rank < 50 else "train"].append((label, classes[wnid][name]))
    return {split: sorted(pairs) for split, pairs in splits.items()}


def dimensions(image: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(image)) as file:
        return file.size


def test_large_classes_are_kept_and_their_first_50_are_for_validation(
    classes: dict[str, dict[str, bytes]], squashed: Path
) -> None:
    found, expected = content(squashed), by_rule(classes)
    assert {split: len(pairs) for split, pairs in found.items()} == {"train": 911, "val": 100}
    for split in ("train", "val"):
        for label in (0, 1):
            # Those of under 224 pixels stay as they are, byte for byte.
            mine = {image for known, image in found[split] if known == label and len(image) < 1000}
            wanted = {
                image for known, image in expected[split] if known == label and len(image) < 1000
            }
            assert mine == wanted
            assert len(mine) > 40


def test_by_default_images_are_squashed_as_published(
    classes: dict[str, dict[str, bytes]], squashed: Path
) -> None:
    known = {image for images in classes.values() for image in images.values()}
    found = [image for pairs in content(squashed).values() for _, image in pairs]
    # 400 x 300, 223 x 300 and 224 x 40; one of 223 x 223 is smaller than 224.
    assert [dimensions(image) for image in found if image not in known] == [(224, 224)] * 3
    manifest = read_manifest(str(squashed))
    assert manifest is not None
    (odd,) = manifest.about["odd"].values()
    assert odd["count"] == 1
    assert odd["files"][0].endswith(UNREADABLE)


def test_256_scales_the_short_side(
    classes: dict[str, dict[str, bytes]], fall11: Path, tmp_path: Path
) -> None:
    assert prepare(fall11, tmp_path / "out", "--resize", "256") == 0
    known = {image for images in classes.values() for image in images.values()}
    images = [image for pairs in content(tmp_path / "out").values() for _, image in pairs]
    assert [dimensions(image) for image in images if image not in known] == [(341, 256)]
    manifest = read_manifest(str(tmp_path / "out"))
    assert manifest is not None
    assert manifest.about["recode"] == {"ShortSide": {"pixels": 256, "quality": 95}}


def test_counts_stand_beside_the_published_ones(
    fall11: Path, tmp_path: Path, capsys: Capture
) -> None:
    words = ("data", "prepare", "imagenet-21k-p", fall11, tmp_path / "out", "--workers", 1)
    said = shown(capsys, *words)
    rows = [line.split() for line in said.splitlines()]
    assert ["here", "911", "100", "2"] in rows
    assert ["published,", "fall11", "11,797,632", "561,052", "11,221"] in rows
    assert ["published,", "winter21", "11,060,223", "522,500", "10,450"] in rows
    assert "not the published counts" in said


def test_every_form_of_the_source_gives_the_same(
    classes: dict[str, dict[str, bytes]], squashed: Path, tmp_path: Path
) -> None:
    inner = {wnid: tar_of(images) for wnid, images in classes.items()}
    winter = tmp_path / "winter21_whole.tar"
    winter.write_bytes(tar_of({f"winter21_whole/{wnid}.tar": inner[wnid] for wnid in inner}))
    folder = tmp_path / "tars"
    folder.mkdir()
    for wnid in inner:
        (folder / f"{wnid}.tar").write_bytes(inner[wnid])
    for number, source in enumerate((winter, tmp_path, folder)):  # also the folder of the tar
        out = tmp_path / f"out{number}"
        assert prepare(source, out) == 0
        assert content(out) == content(squashed)


def test_the_processed_tar_is_packed_as_it_is(
    classes: dict[str, dict[str, bytes]], tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "imagenet21k_resized.tar"
    top = "imagenet21k_resized/imagenet21k"
    parts: dict[str, bytes] = {}
    for wnid in KEPT:
        names = sorted(classes[wnid])
        for split, some in (("val", names[:50]), ("train", names[50:])):
            parts |= {f"{top}_{split}/{wnid}/{name}": classes[wnid][name] for name in some}
    small = {f"{top}_small_classes/n01503061/{n}": i for n, i in classes["n01503061"].items()}
    path.write_bytes(tar_of(small | parts))
    capsys.readouterr()
    assert prepare(path, tmp_path / "out") == 0
    assert f"trainyard train --data {path}" in capsys.readouterr().out
    assert content(tmp_path / "out") == by_rule(classes)
    said = complaint(
        capsys, "data", "prepare", "imagenet-21k-p", path, tmp_path / "again", "--resize", "256"
    )
    assert "drop --resize" in said


def test_no_class_with_enough_images(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "some.tar"
    path.write_bytes(tar_of({"n01503061.tar": tar_of({"a.JPEG": b"x"})}))
    assert prepare(path, tmp_path / "out") == 2
    assert "no class in it has more than 500 images" in capsys.readouterr().err


def test_nothing_there(tmp_path: Path, capsys: Capture) -> None:
    packed = tmp_path / "winter21_whole.tar.gz"
    packed.write_bytes(b"")
    sources = {packed: "gunzip it first", tmp_path / "fall11_whole.tar": "image-net.org"}
    for source, words in (sources | {tmp_path / "none": "image-net.org"}).items():
        said = complaint(capsys, "data", "prepare", "imagenet-21k-p", source, tmp_path / "out")
        assert words in said


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"a/n01.tar": b"", "b/n01.tar": b""}, "'n01' comes twice"),
        ({"...tar": b""}, "is no name of a class"),
    ],
)
def test_classes_without_a_name_of_their_own(
    inner: dict[str, bytes], message: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "strange.tar"
    path.write_bytes(tar_of({name: tar_of({"x.JPEG": b"x"}) for name in inner}))
    assert prepare(path, tmp_path / "out") == 2
    assert message in capsys.readouterr().err


def test_without_opencv_the_package_is_named(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    tar = tmp_path / "fall11_whole.tar"
    tar.write_bytes(tar_of({"n01": b""}))
    monkeypatch.setitem(sys.modules, "cv2", None)
    words = ("data", "prepare", "imagenet-21k-p", tar, tmp_path / "out")
    assert "pip install opencv-python-headless" in complaint(capsys, *words)
    assert not list(tmp_path.glob("out/*"))
