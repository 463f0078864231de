import os
import threading
import zipfile
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from torchvision.datasets import ImageFolder

from tests.data.tars import Patch, write_files, write_tar
from tests.docs.pages import DOCS, blocks
from tests.errors import raises
from tests.images import encode
from trainyard.data import formats
from trainyard.data.decode.crops import Crops
from trainyard.data.decode.decode import BadImageError, decode_batch, whole_image
from trainyard.data.formats import folder
from trainyard.data.formats.left_out import BROKEN_LINK, HIDDEN, LOOP, MASKS, PLUGINS
from trainyard.data.formats.scan import IMAGE_FORMATS, IMAGE_SUFFIXES, reading_pool
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.unlabelled import open_images
from trainyard.data.reading.reader import Reader
from trainyard.data.storage.location import find_place
from trainyard.data.storage.manifest import Manifest, write_manifest

# --- folders ---


def assert_equal_to_image_folder(folder: Path) -> None:
    expected = ImageFolder(str(folder))
    scan = formats.scan(find_place(str(folder)))
    rows = list(scan.rows)
    assert scan.format == "folder"
    assert scan.classes == expected.classes
    assert [(str(folder / row.path), *row.labels) for row in rows] == expected.samples
    assert all(row.offsets == [0] for row in rows)
    assert [row.sizes for row in rows] == [[(folder / row.path).stat().st_size] for row in rows]


def test_a_folder_reads_like_image_folder(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        [
            *("dog/10.jpg", "dog/9.jpg", "dog/a.JPG", "dog/B.JPEG", "dog/notes.txt", "dog/jpg"),
            *(
                "dog/deep/er/1.png",
                "dog/deep/2.png",
                "dog/deep.png",
                "dog/deep-2/1.png",
                "dog/album.jpg/2.jpg",
            ),
            *("cat/x.webp", "cat/x.bmp", "cat/x.ppm", "cat/x.pgm", "cat/x.tif", "cat/x.tiff"),
            *("Zebra/1.jpg", "n02/1.jpg", "n1/1.jpg"),
            *("épagneul/été.jpg", "épagneul/日本.jpg", "épagneul/😀.png", "épagneul/z.jpg"),
            *("readme.md", "loose.jpg"),
        ],
    )
    assert_equal_to_image_folder(tmp_path)


def test_classes_of_a_folder_by_their_paths(tmp_path: Path) -> None:
    """SUN397, iNaturalist: a folder holds an image and a class as well, and last names repeat."""
    names = ["a/abbey/1.jpg", "a/indoor/2.jpg", "b/indoor/3.jpg", "b/4.jpg", "b/indoor/x.txt"]
    place = write_files(tmp_path / "set", [*names, "c/notes.txt"])
    paths = open_index(f"{place}#classes=path")
    assert paths.classes == ("a/abbey", "a/indoor", "b", "b/indoor")
    found = {paths.locate(n)[0]: paths.class_names(n) for n in range(len(paths))}
    assert found == {f"{place}/{name}": [os.path.dirname(name)] for name in names[:4]}
    assert paths.left_out.total == 3  # c, and the texts
    assert open_index(place).classes == ("a", "b")  # each has an index of its own
    write_files(tmp_path / "set", ["c/new/5.jpg"])
    assert "c/new" in open_index(f"{place}#classes=path").classes
    names_alone = open_index(f"{place}#classes=name")
    assert names_alone.classes == ("abbey", "b", "indoor", "new")
    assert names_alone.samples_per_class().tolist() == [1, 1, 2, 1]
    with raises("folder.unknown-classes", location=place, value="leaf"):
        open_index(f"{place}#classes=leaf")


def test_masks_beside_their_images_are_left_out(tmp_path: Path) -> None:
    """BUSI and COVID-19 Radiography: half of the images to train on were masks."""
    beside = ["a/x (1)_mask.png", "a/x (1)_Mask_1.png", "a/y-seg.tif"]
    own = ["a/x (1).png", "a/y.jpg", "a/z_mask.png", "a/mask/1.png", "a/mask_1.png"]
    folders = ["b/Images/1.png", "b/Images/masks/2.png", "b/masks/1.png", "b/masks/c/1.png"]
    place = write_files(tmp_path, [*beside, *own, *folders])
    index = open_index(place)
    paths = {os.path.relpath(index.locate(n)[0], place) for n in range(len(index))}
    assert paths == {*own, "b/Images/1.png", "b/Images/masks/2.png"}
    assert index.left_out.kinds == {MASKS: (4, "b/masks")}


def test_data_inside_of_itself_is_no_class(tmp_path: Path) -> None:
    """Malaria cell images: a copy of all of them was a third class."""
    names = ["cells/a/1.png", "cells/b/2.png"]
    copies = ["cells/cells/a/1.png", "cells/cells/b/2.png"]
    place = write_files(tmp_path, [*names, *copies, "cells/cells/notes.txt"])
    with raises("data.class-holds-classes", path=f"{place}/cells/cells", names="a and b"):
        open_index(f"{place}/cells")
    assert open_index(f"{place}/cells/cells").classes == ("a", "b")


def test_a_folder_follows_links_like_image_folder(tmp_path: Path) -> None:
    write_files(tmp_path / "elsewhere", ["1.jpg", "deep/2.jpg", "more/3.jpg"])
    write_files(tmp_path / "data", ["cat/1.jpg"])
    (tmp_path / "data/dog").symlink_to(tmp_path / "elsewhere/deep")
    (tmp_path / "data/cat/more").symlink_to(tmp_path / "elsewhere/more")
    (tmp_path / "data/cat/3.jpg").symlink_to(tmp_path / "elsewhere/1.jpg")
    assert_equal_to_image_folder(tmp_path / "data")


def test_a_class_of_the_other_split_keeps_its_number(tmp_path: Path) -> None:
    write_files(tmp_path, ["train/a/1.jpg", "train/b/deep/2.jpg", "val/a/3.jpg", "val/c/4.jpg"])
    for name in ("train/c", "train/d", "val/b", "val/d"):
        (tmp_path / name).mkdir()
    for split in ("train", "val"):
        assert formats.scan(find_place(f"{tmp_path}/{split}")).classes == ["a", "b", "c"]
    open_index(f"{tmp_path}/train")
    write_files(tmp_path, ["val/d/5.jpg"])  # the index of train notices
    for split in ("train", "val"):
        assert open_index(f"{tmp_path}/{split}").classes == ("a", "b", "c", "d")


def test_a_class_that_the_manifest_lists_keeps_its_number(tmp_path: Path) -> None:
    write_files(tmp_path, ["train/a/1.jpg"])
    (tmp_path / "train/b").mkdir()
    write_manifest(tmp_path, Manifest("folder", ("a", "b"), {}))
    assert formats.scan(find_place(f"{tmp_path}/train")).classes == ["a", "b"]


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    hidden = ("cat/.ipynb_checkpoints/1.jpg", "cat/._1.jpg", "__MACOSX/cat/._1.jpg")
    junk = (*hidden, ".git/3.jpg", "@eaDir/1.jpg")
    data = write_files(tmp_path / "data", ["cat/1.jpg", "cat/deep/__MACOSX/2.jpg", *junk])
    index = build_index(data)
    assert (index.classes, len(index)) == (("cat",), 1)
    assert index.left_out.kinds == {HIDDEN: (6, ".git")}
    (images,) = open_images([data], tmp_path, lambda *_: None)
    assert len(images.index) == 1
    assert images.index.left_out.kinds == {HIDDEN: (6, f"{data}/.git")}


@pytest.mark.parametrize(
    ("link", "target", "other"),
    [
        ("dogs", "dog", "dog"),
        ("dog/deep/cats", "../../cat", "cat"),
        ("dog/new", "deep", "dog/deep"),
    ],
)
def test_a_folder_of_images_has_one_name(
    link: str, target: str, other: str, tmp_path: Path
) -> None:
    """Its images were trained on twice, as two classes where the link is in another one."""
    write_files(tmp_path, ["cat/1.jpg", "dog/2.jpg", "dog/deep/3.jpg", "dog/lists/4.txt"])
    (tmp_path / "cat/lists").symlink_to("../dog/lists")  # no image counts twice by it
    assert len(build_index(str(tmp_path))) == 3
    (tmp_path / link).symlink_to(target)
    both = sorted([f"{tmp_path}/{link}", f"{tmp_path}/{other}"])
    with raises("data.folder-twice") as caught:
        build_index(str(tmp_path))
    assert sorted(str(caught.value.fields[name]) for name in ("path", "other")) == both


def test_a_broken_link_is_left_out_until_it_is_mended(tmp_path: Path) -> None:
    write_files(tmp_path, ["data/cat/1.jpg", "data/dog/1.jpg", "elsewhere/2.jpg"])
    for name in ("cat/2.jpg", "cat/3.jpg", "cat/4.jpg", "dog/deep.png", "cat/notes.txt"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "absent" / name)
    (tmp_path / "data/cat/loop.jpg").symlink_to("loop.jpg")
    location = f"{tmp_path}/data"
    assert len(open_index(location)) == 2
    assert open_index(location).left_out.kinds == {BROKEN_LINK: (6, "cat/2.jpg")}
    write_files(tmp_path, ["absent/cat/2.jpg"])  # no folder of the data changes
    assert len(open_index(location)) == 3
    (tmp_path / "data/bird").symlink_to(tmp_path / "nest")  # a class, as on a disk not mounted
    assert open_index(location).left_out.kinds == {BROKEN_LINK: (6, "bird")}
    write_files(tmp_path, ["nest/1.jpg"])
    assert open_index(location).classes == ("bird", "cat", "dog")


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, ["cat/1.jpg", "cat/deep/1.jpg"])
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", refuse)
    with raises("file.unreadable", path=f"{tmp_path}/cat/deep", reason="Permission denied"):
        build_index(str(tmp_path))


def test_every_ending_of_the_table_is_read_where_it_lies(tmp_path: Path) -> None:
    """Pillow decodes GIF and AVIF, and folders, tars and predictions passed them over."""
    picture, files = Image.new("RGB", (20, 10), (200, 30, 30)), {}
    for kind, endings in IMAGE_FORMATS.items():
        if kind == "DICOM":  # which Pillow does not write: test_dicom.py
            continue
        content = encode(picture.convert("1") if kind == "PPM" else picture, kind)
        assert whole_image(content).size == picture.size
        for suffix in endings:
            files[f"cat/{kind}{suffix}"] = files[f"cat/{kind}{suffix.upper()}"] = content
    index = build_index(write_files(tmp_path / "folder", files))
    assert len(index) == len(files)
    tar = write_tar(tmp_path / "a.tar", sorted(files.items()))
    assert len(build_index(str(tar))) == len(files)
    (images,) = open_images([str(tmp_path / "folder")], tmp_path, lambda *_: None)
    assert len(images.index) == len(files)
    bad = decode_batch(
        [*files.values()], _whole, np.empty((len(files), 8, 8, 3), np.uint8), "bilinear"
    )
    assert bad == {}


def _whole(sizes: NDArray[np.int64]) -> Crops:
    boxes = np.concatenate([np.zeros_like(sizes), sizes], axis=1).astype(float)
    return Crops(boxes, np.zeros(len(sizes), bool))


def test_an_animation_is_its_first_picture() -> None:
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    content = encode(red, "GIF", save_all=True, append_images=[blue])
    assert whole_image(content).getpixel((4, 4)) == (255, 0, 0)


@pytest.mark.skipif("HEIF" in IMAGE_FORMATS, reason="pillow-heif is installed")
def test_photographs_of_iphones_are_named_with_what_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heif = b"\0\0\0\x18ftypheic" + bytes(40)
    location = write_files(tmp_path, {"cat/1.HEIC": heif, "cat/2.jpg": b"2"})
    kind = "files ending in .heic, which `pip install pillow-heif` makes readable"
    assert open_index(location).left_out.kinds == {kind: (1, "cat/1.HEIC")}
    with pytest.raises(BadImageError, match="a HEIF image, which `pip install pillow-heif`"):
        whole_image(heif)
    suffixes = PLUGINS["HEIF"][1]
    monkeypatch.setitem(IMAGE_FORMATS, "HEIF", suffixes)  # installed since
    monkeypatch.setattr(folder, "IMAGE_SUFFIXES", IMAGE_SUFFIXES | {*suffixes})
    assert len(open_index(location)) == 2


def test_links_of_any_kind_in_the_location_are_counted(tmp_path: Path) -> None:
    """A link to itself ended the command with a traceback."""
    write_files(tmp_path, ["cat/1.jpg"])
    (tmp_path / "dog").symlink_to("dog")
    (tmp_path / "cat/round").symlink_to("round")
    (tmp_path / "all").symlink_to(".")
    index = build_index(str(tmp_path))
    assert index.left_out.kinds == {BROKEN_LINK: (2, "dog"), LOOP: (1, "all")}


# --- what is recognised ---


def test_what_is_not_recognised_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_files(tmp_path, ["flat/1.jpg", "notes.md"])
    for code, name in (("data.no-class-folders", "flat"), ("data.unknown-format", "notes.md")):
        with raises(code, location=tmp_path / name):
            formats.recognise(find_place(f"{tmp_path}/{name}"))
    with raises("data.not-found", path=tmp_path / "absent"):
        find_place(f"{tmp_path}/absent")


# --- a format of another package ---


def test_a_package_offers_a_format(tmp_path: Path, monkeypatch: Patch) -> None:
    """The program of docs/own-code.md, found by its entry point."""
    (page,) = (b.text for b in blocks(DOCS / "own-code.md") if "zipfile" in b.text)
    (tmp_path / "zips_of_a_test.py").write_text(page)
    about = tmp_path / "zips_of_a_test-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: zips-of-a-test\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[trainyard.formats]\nzip = zips_of_a_test:ZIP\n")
    monkeypatch.syspath_prepend(tmp_path)
    contents = {f"set/{name}/{n}.jpg": bytes([n]) * 900 for name in ("cat", "dog") for n in (1, 2)}
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr("set/readme.txt", "")
    formats.all_formats.cache_clear()
    try:
        index = open_index(str(tmp_path / "photos.zip"))
        with zipfile.ZipFile(tmp_path / "small.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("cat/1.jpg", bytes(900))
        with raises("zip.compressed"):
            open_index(str(tmp_path / "small.zip"))
    finally:
        formats.all_formats.cache_clear()
    assert (index.classes, index.label.tolist()) == (("cat", "dog"), [0, 0, 1, 1])
    assert [*map(Reader(index).read, range(4))] == [*contents.values()]
    assert index.left_out.kinds


def test_the_end_of_a_reader_waits_for_no_thread() -> None:
    """The garbage collector may end it while another thread starts: a join would never return."""
    goes_on = threading.Event()

    def reader() -> Generator[int, None, None]:
        with reading_pool(1) as pool:
            pool.submit(goes_on.wait)
            yield 1

    rows = reader()
    next(rows)
    rows.close()
    goes_on.set()
