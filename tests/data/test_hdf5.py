import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.data.tars import Patch, stored
from tests.errors import raises
from tests.images import jpeg
from trainyard.data import formats
from trainyard.data.formats import hdf5, hdf5_layout
from trainyard.data.formats.scan import EncodedSample
from trainyard.data.index.build import build_index
from trainyard.data.index.splits import find_splits
from trainyard.data.storage.location import find_place

# From ImageNet's devkit: the class that each of these ILSVRC2012_IDs stands for.
ILSVRC2012_IDS = {1: "n02119789", 2: "n02100735", 3: "n02110185", 1000: "n03255030"}

BYTES = h5py.vlen_dtype(np.uint8)


def as_array(image: bytes) -> Any:
    return np.frombuffer(image, np.uint8)


def write_one_by_one(file: h5py.File, images: list[bytes], **options: Any) -> None:
    dataset = file.create_dataset("encoded_images", (len(images),), BYTES, **options)
    for row, image in enumerate(images):
        dataset[row] = as_array(image)


def write_plain(path: Path, images: list[bytes], **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        write_one_by_one(file, images, **options)
        file["targets"] = np.arange(len(images)) % 2
    return path


def split_array(splits: dict[str, dict[str, tuple[Any, ...]]], *, nested: bool) -> Any:
    """The table as fuel's H5PYDataset makes it; numpy has read its dtype in two ways."""
    one = (1,) if nested else ()
    kind = np.dtype(
        [
            ("split", "S5"),
            ("source", "S14"),
            ("start", np.int64, one),
            ("stop", np.int64, one),
            ("indices", h5py.special_dtype(ref=h5py.Reference)),
            ("available", bool, one),
            ("comment", "S1"),
        ]
    )
    sources = sorted({source for split in splits.values() for source in split})
    table = np.empty(len(splits) * len(sources), kind)
    for line, (split, source) in zip(table, product(splits, sources), strict=True):
        found = splits[split].get(source)
        start, stop, *indices = found or (0, 0)
        reference = indices[0] if indices else h5py.Reference()
        values = (split.encode(), source.encode(), start, stop, reference, found is not None, b".")
        for name, value in zip(kind.names or (), values, strict=True):
            line[name] = value
    return table


# Around what a heap collection holds (4096 bytes), a buffer of HDF5's (64 KiB), and padding to 8.
SIZES = (0, 1, 7, 8, 9, 100, 4048, 4064, 4080, 4096, 5000, 65_535, 65_536, 70_000, 300_001)


def some_images() -> list[bytes]:
    random = np.random.default_rng(5)
    sizes = [*SIZES, *random.integers(0, 60, 300), *random.integers(0, 9000, 60)]
    return [jpeg(8), jpeg(120), *(random.bytes(int(size)) for size in random.permutation(sizes))]


# --- every way to lay out a file: the bytes at the offsets are those that h5py reads ---


def resized(file: h5py.File, images: list[bytes]) -> None:
    dataset = file.create_dataset("encoded_images", (0,), BYTES, maxshape=(None,))
    for image in images:
        dataset.resize((len(dataset) + 1,))
        dataset[-1] = as_array(image)
    dataset.resize((len(dataset) + 5000,))
    dataset.resize((len(images) - 3,))


def beside_others(file: h5py.File, images: list[bytes]) -> None:
    """The heap holds other datasets' elements too."""
    write_one_by_one(file, images[:1])
    del file["encoded_images"]
    dataset = file.create_dataset("encoded_images", (len(images),), BYTES)
    words = file.create_dataset("words", (len(images),), h5py.string_dtype())
    for row, image in enumerate(images):
        words[row] = f"{row}"
        dataset[row] = as_array(image)


def barely_written(file: h5py.File, images: list[bytes]) -> None:
    dataset = file.create_dataset("encoded_images", (1000,), BYTES, chunks=(10,))
    dataset[555] = as_array(images[0])


Layout = tuple[Callable[..., None], dict[str, Any]]
LATEST = {"libver": "latest"}
LAYOUTS: dict[str, Layout] = {
    "contiguous": (write_one_by_one, {}),
    "chunked": (partial(write_one_by_one, chunks=(7,)), {}),
    "user block": (write_one_by_one, {"userblock_size": 4096}),
    "user block, chunked": (partial(write_one_by_one, chunks=(100,)), {"userblock_size": 512}),
    "prepended": (write_one_by_one, {}),
    "latest": (write_one_by_one, LATEST),
    "latest, chunked": (
        partial(write_one_by_one, chunks=(64,), maxshape=(None,)),
        LATEST | {"userblock_size": 1024},
    ),
    "paged": (write_one_by_one, {"fs_strategy": "page", "fs_page_size": 8192}),
    **{build.__name__: (build, {}) for build in (resized, beside_others, barely_written)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_are_those_that_h5py_reads(
    tmp_path: Path, layout: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(hdf5, "_SCAN_ROWS", 100)
    path, (build, options) = tmp_path / "images.h5", LAYOUTS[layout]
    with h5py.File(path, "w", **options) as file:
        build(file, some_images())
    if layout == "user block":
        with open(path, "r+b") as raw:
            raw.write(b"a user's block")
    if layout == "prepended":
        path.write_bytes(b"#" * 1024 + path.read_bytes())
    with h5py.File(path, "r+") as file:
        count = len(file["encoded_images"])
        file["targets"] = np.arange(count, dtype=np.int32) % 7
    with h5py.File(path) as file:
        expected = [(str(n % 7), file["encoded_images"][n].tobytes()) for n in range(count)]
    assert count > 300
    assert stored(path) == expected


# --- fuel's layout ---


def write_fuel(
    path: Path, rows: dict[str, list[tuple[bytes, int, str]]], *, nested: bool = False
) -> Path:
    """Rows of image, ILSVRC2012_ID - 1 and file name, as fuel's converter stores them."""
    everything = [row for split in rows.values() for row in split]
    labelled = len(everything) - len(rows.get("test", ()))
    splits: dict[str, dict[str, tuple[Any, ...]]] = {}
    start = 0
    for split, part in rows.items():
        span = (start, start + len(part))
        sources = ("encoded_images", "filenames", "targets")
        splits[split] = {s: span for s in sources if s != "targets" or split != "test"}
        start = span[1]
    with h5py.File(path, "w") as file:
        file.attrs["split"] = split_array(splits, nested=nested)
        file.create_dataset("encoded_images", (len(everything),), BYTES)
        file.create_dataset("targets", (labelled, 1), np.int16)
        file.create_dataset("filenames", (len(everything), 1), "S32")
        file["targets"][:, 0] = [label for _, label, _ in everything[:labelled]]
        file["filenames"][:, 0] = [name.encode("ascii") for _, _, name in everything]
        for row, (image, _, _) in enumerate(everything):
            file["encoded_images"][row] = as_array(image)
    return path


def mini_rows(wnids: list[str], *, names: bool) -> dict[str, list[tuple[bytes, int, str]]]:
    """Two training images a class and one to validate with, in permuted order."""
    order = np.random.default_rng(1).permutation(2 * len(wnids)) % len(wnids)
    train = [
        (f"train {n} {wnids[c]}".encode(), int(c), f"{wnids[c]}_{n}.JPEG" if names else f"{n}.jpg")
        for n, c in enumerate(order)
    ]
    val = [
        (f"val {wnid}".encode(), c, f"ILSVRC2012_val_{c:08d}.JPEG") for c, wnid in enumerate(wnids)
    ]
    test = [(jpeg(9), 0, f"ILSVRC2012_test_{n:08d}.JPEG") for n in range(3)]
    return {"train": train, "valid": val, "test": test}


def test_ids_of_the_class_list_are_those_of_the_devkit() -> None:
    wnids = ilsvrc2012()
    assert len(set(wnids)) == 1000
    assert {number: wnids[number - 1] for number in ILSVRC2012_IDS} == ILSVRC2012_IDS


def ilsvrc2012() -> list[str]:
    return (Path(hdf5_layout.__file__).parent / "ilsvrc2012.txt").read_text().split()


@pytest.mark.parametrize(("nested", "names"), [(True, False), (False, True)])
def test_fuels_labels_become_positions_among_the_sorted_wnids(
    tmp_path: Path, names: bool, nested: bool
) -> None:
    wnids = ilsvrc2012()
    rows = mini_rows(wnids, names=names)
    path = write_fuel(tmp_path / "ilsvrc2012.hdf5", rows, nested=nested)
    assert find_splits(str(path)) == {"train": f"{path}#train", "val": f"{path}#val"}
    for split, ours in (("train", "train"), ("valid", "val")):
        index = build_index(f"{path}#{ours}")
        assert index.classes == tuple(sorted(wnids)) and index.format == "hdf5"
        assert index.label.tolist() == [index.classes.index(wnids[c]) for _, c, _ in rows[split]]
        assert stored(f"{path}#{ours}") == [(wnids[c], image) for image, c, _ in rows[split]]
        # Each image says in its content which class it is of.
        assert all(image.endswith(name.encode()) for name, image in stored(f"{path}#{ours}"))


def test_a_subset_in_fuels_layout_is_named_by_its_file_names(tmp_path: Path) -> None:
    wnids = ["n02119789", "n02100735", "n02110185", "n02096294"]
    path = write_fuel(tmp_path / "few.hdf5", mini_rows(wnids, names=True))
    found = stored(f"{path}#val")
    assert found == [(wnid, f"val {wnid}".encode()) for wnid in wnids]
    assert build_index(f"{path}#val").classes == tuple(sorted(wnids))


def test_a_subset_in_fuels_layout_without_names_is_refused(tmp_path: Path) -> None:
    path = write_fuel(tmp_path / "few.hdf5", mini_rows(ilsvrc2012()[:4], names=False))
    assert_refused(f"{path}#train", "hdf5.unnamed-classes", num_classes=4)
    with h5py.File(path, "r+") as file:
        file["class_names"] = [wnid.encode() for wnid in ilsvrc2012()[:4]]
    assert build_index(f"{path}#train").classes == tuple(sorted(ilsvrc2012()[:4]))


def test_ilsvrc2010_is_not_taken_for_ilsvrc2012(tmp_path: Path) -> None:
    """It has 1000 classes too, other ones; but its test images have labels."""
    rows = mini_rows(ilsvrc2012(), names=False)
    rows = {"train": rows["train"], "valid": rows["valid"]}
    path = write_fuel(tmp_path / "ilsvrc2010.hdf5", rows)
    assert_refused(f"{path}#train", "hdf5.unnamed-classes", num_classes=1000)


@pytest.mark.parametrize("wrong", ["one label of two names", "one name of two labels"])
def test_file_names_that_contradict_the_labels_name_nothing(tmp_path: Path, wrong: str) -> None:
    rows = mini_rows(ilsvrc2012()[:3], names=True)
    image, label, name = rows["train"][0]
    other = rows["train"][1][2]
    assert other[:9] != name[:9]
    rows["train"][0] = (image, label, other) if "names" in wrong else (image, 3, name)
    path = write_fuel(tmp_path / "few.hdf5", rows)
    assert_refused(f"{path}#train", "hdf5.unnamed-classes")


def test_rows_of_a_file_without_its_table_of_splits(tmp_path: Path, monkeypatch: Patch) -> None:
    """As the second reader of this file knows them: by their number alone."""
    rows = mini_rows(ilsvrc2012(), names=False)
    path = write_fuel(tmp_path / "ilsvrc2012.hdf5", rows)
    with h5py.File(path, "r+") as file:
        del file.attrs["split"]
    assert_refused(path, "hdf5.images-without-targets", num_images=3003, num_labels=3000)
    for name, count in (("_TRAIN", 2000), ("_VAL", 1000), ("_TEST", 3)):
        monkeypatch.setattr(hdf5_layout, name, count)
    monkeypatch.setattr(hdf5_layout, "_FUEL_ROWS", (3003, 3000))
    for split, ours in (("train", "train"), ("valid", "val")):
        found = stored(f"{path}#{ours}")
        assert found == [(ilsvrc2012()[c], image) for image, c, _ in rows[split]]
    assert_refused(f"{path}#test", "data.no-labels")


def test_images_without_labels_cannot_be_asked_for(tmp_path: Path) -> None:
    path = write_fuel(tmp_path / "few.hdf5", mini_rows(ilsvrc2012()[:4], names=True))
    assert_refused(f"{path}#test", "data.no-labels", location=f"{path}#test")
    for location in (path, f"{path}#tset"):
        names = f"{path}#train or {path}#val"
        assert_refused(location, "data.several-splits", location=path, names=names)


def test_a_split_may_list_its_rows(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a.h5", [str(n).encode() for n in range(100)])
    with h5py.File(path, "r+") as file:
        del file["targets"]
        file["targets"] = np.arange(100) % 50
        file["class_names"] = [f"{n:02d}".encode() for n in range(50)]
        chosen = {"train": [5, 99, 0, 42], "valid": [7]}
        table = {}
        for split, rows in chosen.items():
            file[f"rows of {split}"] = rows
            line = (0, 0, file[f"rows of {split}"].ref)
            table[split] = {"encoded_images": line, "targets": line}
        file.attrs["split"] = split_array(table, nested=False)
    for split, rows in chosen.items():
        location = f"{path}#{'val' if split == 'valid' else split}"
        assert stored(location) == [(f"{n % 50:02d}", str(n).encode()) for n in rows]


# --- our own layout ---


def test_h5py_reads_what_is_written(tmp_path: Path) -> None:
    path, images, classes = tmp_path / "images.h5", some_images(), ("ape", "été")
    found = (EncodedSample(image, ".jpg", n % 2, str(n)) for n, image in enumerate(images))
    hdf5.write(path, found, classes)
    with h5py.File(path) as file:
        assert tuple(file["class_names"].asstr()) == classes
        assert file["targets"][...].tolist() == [n % 2 for n in range(len(images))]
        assert file["targets"].dtype == np.int32
        assert [image.tobytes() for image in file["encoded_images"]] == images
    assert stored(path) == [(classes[n % 2], image) for n, image in enumerate(images)]


def test_no_more_than_a_batch_of_images_is_held(tmp_path: Path) -> None:
    alive, highest = 0, 0

    class Counted(bytes):
        def __new__(cls, content: bytes) -> "Counted":
            nonlocal alive, highest
            alive += 1
            highest = max(highest, alive)
            return super().__new__(cls, content)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def many() -> Iterator[EncodedSample]:
        for n in range(1000):
            yield EncodedSample(Counted(bytes(n)), ".jpg", 0, str(n))

    hdf5.write(tmp_path / "a.h5", many(), None)
    assert highest <= 2 * 64 + 1


# --- files that cannot be read ---


def assert_refused(place: str | Path, code: str, /, **fields: object) -> None:
    with raises(code, **fields):
        build_index(str(place))


IMAGES = [b"one", b"two", b"three"]


def filtered_references(path: Path) -> None:
    path.unlink()
    write_plain(path, IMAGES, compression="gzip")


def virtual_images(path: Path) -> None:
    other = path.rename(path.with_name("other.h5"))
    layout = h5py.VirtualLayout(shape=(3,), dtype=BYTES)
    layout[:] = h5py.VirtualSource(other, "encoded_images", shape=(3,), dtype=BYTES)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("encoded_images", layout)
        file["targets"] = np.zeros(3)


def external_names(path: Path) -> None:
    """Any file of this machine would be read."""
    (path.parent / "secret").write_bytes(b"a" * 10)
    with h5py.File(path, "r+") as file:
        place = [(str(path.parent / "secret"), 0, 10)]
        file.create_dataset("class_names", (2,), "S5", external=place)


def virtual_targets(path: Path) -> None:
    """Of a file that is missing: they would be 0."""
    layout = h5py.VirtualLayout(shape=(3,), dtype=np.int64)
    layout[:] = h5py.VirtualSource("missing.h5", "targets", shape=(3,))
    with h5py.File(path, "r+") as file:
        del file["targets"]
        file.create_virtual_dataset("targets", layout)


def linked_targets(path: Path) -> None:
    with h5py.File(path.parent / "other.h5", "w") as other:
        other["targets"] = [0, 1, 0]
    with h5py.File(path, "r+") as file:
        del file["targets"]
        file["targets"] = h5py.ExternalLink(str(path.parent / "other.h5"), "targets")


def names_of_nowhere(path: Path) -> None:
    """The numbers of the classes would be their names."""
    with h5py.File(path, "r+") as file:
        file["class_names"] = h5py.ExternalLink("missing.h5", "names")


def rows_elsewhere(path: Path) -> None:
    (path.parent / "rows").write_bytes(np.arange(2).tobytes())
    with h5py.File(path, "r+") as file:
        file.create_dataset("chosen", (2,), "<i8", external=[(str(path.parent / "rows"), 0, 16)])
        line = {"encoded_images": (0, 0, file["chosen"].ref), "targets": (0, 2)}
        file.attrs["split"] = split_array({"train": line}, nested=False)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (filtered_references, "hdf5.needs-repack"),
        (virtual_images, "hdf5.needs-repack"),
        (external_names, "hdf5.needs-repack"),
        (virtual_targets, "hdf5.needs-repack"),
        (linked_targets, "hdf5.no-dataset"),
        (names_of_nowhere, "data.malformed-file"),
        (rows_elsewhere, "hdf5.needs-repack"),
    ],
)
def test_all_that_is_read_lies_in_the_file(
    tmp_path: Path, change: Callable[[Path], None], code: str
) -> None:
    """The images alone were checked; names and labels came from any file, or were zeros."""
    path = write_plain(tmp_path / "a.h5", IMAGES)
    change(path)
    assert_refused(path, code, path=path)


def test_a_link_within_the_file(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a.h5", IMAGES)
    with h5py.File(path, "r+") as file:
        file.move("targets", "numbers")
        file["targets"] = h5py.SoftLink("/numbers")
    assert len(stored(path)) == 3


def split_file(tmp_path: Path, splits: dict[str, dict[str, tuple[Any, ...]]]) -> Path:
    path = write_plain(tmp_path / "a.h5", [str(n).encode() for n in range(10)])
    with h5py.File(path, "r+") as file:
        file["class_names"] = ["a", "b"]
        file.attrs["split"] = split_array(splits, nested=False)
    return path


def test_images_without_a_label_or_a_split_are_counted(tmp_path: Path) -> None:
    """They were dropped in silence."""
    both = {
        name: {"encoded_images": rows, "targets": rows}
        for name, rows in (("train", (0, 4)), ("valid", (4, 5)), ("test", (5, 7)))
    }
    path = split_file(tmp_path, both | {"extra": {"encoded_images": (6, 9)}})
    kinds = {
        "images without a label": (2, f"{path}#extra"),
        "images in no split": (1, f"{path}, row 9"),
    }
    unused = {"rows of split test": (2, f"{path}#test")}
    assert build_index(f"{path}#train").left_out.kinds == kinds | unused
    assert build_index(f"{path}#test").left_out.kinds == kinds


@pytest.mark.parametrize(
    ("name", "rows", "code", "fields"),
    [
        ("trian", (2, 4), "hdf5.unknown-split", {"split": "trian"}),
        ("valid", (1, 3), "hdf5.row-in-two-splits", {"row": 1}),
        ("TRAIN", (2, 4), "hdf5.splits-alike", {"names": "train, TRAIN"}),
    ],
)
def test_wrong_splits(
    tmp_path: Path, name: str, rows: tuple[int, int], code: str, fields: dict[str, object]
) -> None:
    table = {"train": (0, 2), name: rows}
    both = {split: {"encoded_images": span, "targets": span} for split, span in table.items()}
    assert_refused(f"{split_file(tmp_path, both)}#train", code, **fields)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 8, 8, 3), np.uint8),
        ((3,), h5py.string_dtype()),
        ((3,), h5py.vlen_dtype(np.int32)),
        ((3, 1), BYTES),
    ],
)
def test_other_datasets(tmp_path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_group("encoded_images")
        file["targets"] = [0, 1, 2]
    assert_refused(path, "hdf5.no-dataset", path=path, dataset="encoded_images")
    with h5py.File(path, "r+") as file:
        del file["encoded_images"]
        file.create_dataset("encoded_images", shape, dtype)
    assert_refused(path, "hdf5.images-not-bytes", path=path, shape=shape)


@pytest.mark.parametrize(
    ("targets", "code", "fields"),
    [
        ([0, 1], "hdf5.images-without-targets", {"num_images": 3, "num_labels": 2}),
        ([0, -1, 1], "hdf5.not-a-class-number", {"row": 1, "value": -1}),
        ([0, 1, 2], "hdf5.not-a-class-number", {"row": 2, "value": 2}),
        ([0, 2**40, 0], "hdf5.not-a-class-number", {"row": 1, "value": 2**40}),
        ([0.0, 1.0, 0.5], "hdf5.targets-not-integers", {"type": "float64"}),
        ([0, 1, 0], "data.class-name-twice", {}),
    ],
)
def test_targets_and_names_that_do_not_fit(
    tmp_path: Path, targets: list[Any], code: str, fields: dict[str, object]
) -> None:
    path = write_plain(tmp_path / "a.h5", IMAGES)
    with h5py.File(path, "r+") as file:
        del file["targets"]
        file["targets"] = targets
        file["class_names"] = ["a", "a" if "twice" in code else "b"]
    assert_refused(path, code, path=path, **fields)


def test_other_attributes_called_split(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a.h5", IMAGES)
    with h5py.File(path, "r+") as file:
        file.attrs["split"] = "train"
    assert_refused(path, "hdf5.unknown-split-table", path=path)
    with h5py.File(path, "r+") as file:
        file.attrs["split"] = split_array({"train": {"targets": (0, 3)}}, nested=False)
    assert_refused(path, "hdf5.empty-splits", path=path)


@pytest.mark.parametrize("span", [(0, 4), (0, 2**62), (-1, 2), (2, 1), [2, 3]], ids=str)
def test_a_split_of_rows_that_are_not_there(tmp_path: Path, span: Any) -> None:
    """As a span, and as a list."""
    path = write_plain(tmp_path / "a.h5", IMAGES)
    with h5py.File(path, "r+") as file:
        if isinstance(span, list):
            file["rows"] = span
            span = (0, 0, file["rows"].ref)
        line = {"encoded_images": span, "targets": span}
        file.attrs["split"] = split_array({"train": line}, nested=False)
        file["class_names"] = ["a", "b"]
    assert_refused(f"{path}#train", "hdf5.split-beyond-rows", path=path, split="train")


@pytest.mark.parametrize(
    ("at", "damage"),
    [
        (0, b"XXXX"),  # another signature
        (8, b"\xff" * 8),  # a gigantic collection, and an empty one
        (8, bytes(8)),
        (16, bytes(2)),  # a missing object
        (24, b"\xff" * 8),  # a gigantic object, and one of another size
        (24, b"\2"),
        (None, (2**62).to_bytes(8, "little")),  # a reference past the end of the file
    ],
)
def test_a_damaged_heap_is_named(tmp_path: Path, at: int | None, damage: bytes) -> None:
    path = write_plain(tmp_path / "a.h5", IMAGES)
    with h5py.File(path) as file:
        second = file["encoded_images"].id.get_offset() + 16 + 4
    content = bytearray(path.read_bytes())
    start = second if at is None else content.index(b"GCOL") + at
    content[start : start + len(damage)] = damage
    path.write_bytes(content)
    assert_refused(path, "hdf5.damaged-row", path=path, row=int(at is None))


def test_h5py_is_asked_for_in_one_line(tmp_path: Path, monkeypatch: Patch) -> None:
    path = write_plain(tmp_path / "a.h5", IMAGES)
    monkeypatch.setitem(sys.modules, "h5py", None)
    for use in (lambda: formats.scan(find_place(str(path))), lambda: hdf5.write(path, [], None)):
        with raises("data.needs-package", package="h5py"):
            use()
