import json
import random
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import webdataset

from tests.data.tars import TAR_FORMATS, Patch, read_rows, write_tar
from tests.errors import raises
from trainyard.data import formats
from trainyard.data.formats import webdataset as reader
from trainyard.data.formats.left_out import DOTTED, LeftOut
from trainyard.data.formats.scan import EncodedSample, FileRows, FileScan, all_rows
from trainyard.data.formats.webdataset import write
from trainyard.data.index.build import build_index
from trainyard.data.storage.location import ResolvedLocation, find_place
from trainyard.errors import DataError
from trainyard.files import sha256


@pytest.mark.parametrize("tar_format", TAR_FORMATS)
@pytest.mark.parametrize("folder", ["", "a/", f"{'long/' * 25}", f"{'x' * 99}/{'y' * 50}/"])
def test_a_shard_gives_its_samples_in_stored_order(
    tmp_path: Path, tar_format: int, folder: str
) -> None:
    samples = [(f"image {number}".encode() * 97, number % 3 + 9) for number in (4, 2, 9, 0)]
    members = []
    for number, (image, label) in enumerate(samples):
        pair = [(f"{folder}{number}.jpg", image), (f"{folder}{number}.cls", b"%d" % label)]
        members += pair if number % 2 else pair[::-1]
    write_tar(tmp_path / "0.tar", members, tar_format)
    scan = formats.scan(find_place(str(tmp_path)))
    assert (scan.format, scan.classes) == ("webdataset", [])
    assert read_rows(tmp_path) == samples


def test_shards_of_the_webdataset_package(tmp_path: Path) -> None:
    samples = [(bytes([number]) * (500 + number), number * 7) for number in range(10)]
    with webdataset.TarWriter(f"{tmp_path}/in-json.tar") as tar:
        for number, (image, label) in enumerate(samples):
            tar.write({"__key__": f"{number}", "png": image, "json": {"label": label, "id": "x"}})
    assert read_rows(tmp_path / "in-json.tar") == samples
    (tmp_path / "in-json.tar").unlink()
    pattern = f"{tmp_path}/train-%06d.tar"
    with webdataset.ShardWriter(pattern, maxcount=4, verbose=0) as writer:
        for number, (image, label) in enumerate(samples):
            sample = {"jpg": image, "cls": label, "json": {"number": number}, "txt": "a caption"}
            writer.write({"__key__": f"sample{number:04d}", **sample})
    assert read_rows(tmp_path) == samples
    assert read_rows(f"{tmp_path}/train-{{000001..000002}}.tar") == samples[4:]


@pytest.mark.parametrize(
    ("content", "label"),
    [
        (b"0", 0),
        (b"999", 999),
        (b" 21840\n", 21840),
        (b"00000007", 7),  # eight bytes, but digits
        *((number.to_bytes(8, "little"), number) for number in (0, 1, 48, 999, 2611, 21840)),
    ],
)
def test_labels(tmp_path: Path, content: bytes, label: int) -> None:
    shard = write_tar(tmp_path / "0.tar", [("0.jpg", b"image"), ("0.cls", content)])
    assert read_rows(shard) == [(b"image", label)]


@pytest.mark.parametrize(
    "content", [b"", b"cat", b"-1", b"1.5", b"\x01\0\0\0", b"9" * 40, b"2147483648", b"\xff" * 8]
)
def test_what_is_no_label_is_an_error(tmp_path: Path, content: bytes) -> None:
    shard = write_tar(tmp_path / "0.tar", [("0.jpg", b"image"), ("0.cls", content)])
    with raises("webdataset.not-a-class-number", path=shard, sample="0"):
        read_rows(shard)


@pytest.mark.parametrize(
    "names",
    [
        ["0.jpg"],
        ["0.cls"],
        ["0.jpg", "0.txt"],
        ["0.jpg", "1.jpg", "0.cls", "1.cls"],  # not consecutive
        ["0.jpg", "0.png", "0.cls"],
        ["0.jpg", "0.cls", "0.cls"],
    ],
)
def test_a_sample_that_is_not_one_image_and_one_label_is_an_error(
    tmp_path: Path, names: list[str]
) -> None:
    whole = [("good.jpg", b"image"), ("good.cls", b"0")]
    shard = write_tar(tmp_path / "0.tar", whole + [(name, b"1") for name in names])
    with raises("webdataset.incomplete-sample", path=shard, sample="0") as error:
        read_rows(shard)
    assert names[0] in str(error.value)


# --- names with dots: a key ends at the first one ---


def with_dots(path: Path) -> Path:
    """Four samples; two have a dot in their names."""
    members = []
    for number, key in enumerate(("a/IMG_0", "a/IMG.1", "a/IMG_2", "n01.3")):
        members += [(f"{key}.JPG", b"image %d" % number), (f"{key}.cls", b"%d" % number)]
    return write_tar(path, members)


def test_a_sample_with_a_dot_in_its_name_is_left_out_and_listed(tmp_path: Path) -> None:
    place = find_place(str(with_dots(tmp_path / "0.tar")))
    scan = formats.scan(place)
    assert [list(rows.labels) for rows in scan.rows] == [[0, 2]]
    assert scan.left_out.kinds == {DOTTED: (2, "a/IMG.1")}
    (found,) = reader.read_remote(place, place.names, segment=1024)
    assert found.left_out == scan.left_out


def test_a_sample_that_is_stored_twice_is_an_error(tmp_path: Path) -> None:
    """`tar -r` with a newer image: the old one was trained on beside it."""
    sample = [("0.jpg", b"old"), ("0.cls", b"1")]
    shard = write_tar(tmp_path / "0.tar", [*sample, ("1.jpg", b"1"), ("1.cls", b"1"), *sample])
    with raises("webdataset.sample-stored-twice", path=shard, sample="0"):
        build_index(str(shard))


@pytest.mark.parametrize("folder", ["", "./"])
def test_a_shard_of_such_names_alone_is_named(tmp_path: Path, folder: str) -> None:
    """It is no tar of one class, whose labels would be ignored."""
    names = (f"{folder}n01440764.{number}.{kind}" for number in (7, 9) for kind in ("jpg", "cls"))
    shard = write_tar(tmp_path / "shard.tar", [(name, b"1") for name in names])
    with raises("data.all-left-out", location=shard):
        build_index(str(shard))


# --- labels in .json ---


@pytest.mark.parametrize(
    "extra",
    [
        {"filename": "n01440764/n01440764_10026.JPEG", "width": 500, "label": 7, "height": 375},
        {"label": 7},
        {"class": "label", "label": 7, "other": {"label": 8}},
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_label_in_json(tmp_path: Path, extra: dict[str, object], is_first: bool) -> None:
    label, image = ("0.json", json.dumps(extra).encode()), ("0.jpg", b"image")
    shard = write_tar(tmp_path / "0.tar", [label, image] if is_first else [image, label])
    assert read_rows(shard) == [(b"image", 7)]


def test_a_cls_goes_before_a_label_in_json(tmp_path: Path) -> None:
    members = [("0.jpg", b"image"), ("0.json", b'{"label": 2}'), ("0.cls", b"1")]
    assert read_rows(write_tar(tmp_path / "0.tar", members)) == [(b"image", 1)]


@pytest.mark.parametrize(
    "content",
    [
        b'{"label": ""}',
        b'{"label": true}',
        b'{"label": 1.0}',
        b'{"label": ["3"]}',
        b'{"label": -1}',
        b'{"label": 99999999999999999999}',
        b'{"cls": -3}',
        b'{"class_name": 3}',
        b"3",
        b'["label"]',
        b'{"label": 3',
        b'"label"',
        b'{"label":' + b"[" * 100_000,
        b'{"label": ' + b"9" * 5000 + b"}",
        b'\xff\xfe{"label": 3}',
        b'{"label": 3, "filler": "' + b" " * (1 << 20) + b'"}',
    ],
)
def test_json_without_a_label_is_an_error(tmp_path: Path, content: bytes) -> None:
    shard = write_tar(tmp_path / "0.tar", [("0.jpg", b"image"), ("0.json", content)])
    with pytest.raises(DataError) as caught:
        read_rows(shard)
    assert caught.value.fields.keys() >= {"path", "sample"}
    assert (caught.value.fields["path"], caught.value.fields["sample"]) == (str(shard), "0")


def in_json(path: Path, *trees: dict[str, object]) -> str:
    """A shard with an image for each JSON."""
    members = []
    for number, tree in enumerate(trees):
        members += [(f"{number}.jpg", b"image"), (f"{number}.json", json.dumps(tree).encode())]
    return str(write_tar(path, members))


@pytest.mark.parametrize("key", ["label", "cls", "class_name"])
def test_a_text_in_json_is_the_name_of_the_class(tmp_path: Path, key: str) -> None:
    in_json(tmp_path / "0.tar", {key: "dog"}, {key: " ant ", "width": 5}, {key: "dog"})
    in_json(tmp_path / "1.tar", {key: "cow"}, {key: "ant"})
    index = build_index(str(tmp_path))
    assert (index.classes, index.has_names) == (("ant", "cow", "dog"), True)
    assert index.label.tolist() == [2, 0, 2, 1, 0]


def test_a_number_in_json_goes_before_a_name(tmp_path: Path) -> None:
    shard = in_json(tmp_path / "0.tar", {"cls": 3, "other": "x"}, {"label": 1, "cls": "ant"})
    assert read_rows(shard) == [(b"image", 3), (b"image", 1)]


@pytest.mark.parametrize(
    ("trees", "classes", "labels", "numbers"),
    [
        ([(7, "ant"), (2, "dog"), (7, "ant")], ("ant", "dog"), [0, 1, 0], (7, 2)),
        ([(0, "ant"), (1, "ant")], ("0", "1"), [0, 1], ()),
        ([(0, "ant"), (0, "dog"), (1, "cow")], ("0", "1"), [0, 0, 1], ()),
        ([(0, "ant"), (1, "")], ("0", "1"), [0, 1], ()),
    ],
)
def test_names_beside_numbers_in_json(
    tmp_path: Path,
    trees: list[tuple[int, str]],
    classes: tuple[str, ...],
    labels: list[int],
    numbers: tuple[int, ...],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """timm's shards: predict said 7. Two classes of one name would become one."""
    for number, (label, name) in enumerate(trees):
        in_json(tmp_path / f"{number}.tar", {"label": label, "class_name": name})
    index = build_index(str(tmp_path))
    assert (index.classes, index.label.tolist(), index.numbers) == (classes, labels, numbers)
    assert "class_name" in capfd.readouterr().err


@pytest.mark.parametrize("kinds", [({"label": 1}, {"label": "ant"}), ({"cls": "a"}, {"cls": [1]})])
def test_labels_of_two_kinds(tmp_path: Path, kinds: tuple[dict[str, object], ...]) -> None:
    shard = in_json(tmp_path / "one/0.tar", *kinds)
    with raises("webdataset.mixed-labels", path=shard, sample="1"):
        build_index(shard)


def test_shards_of_numbers_and_of_names(tmp_path: Path) -> None:
    in_json(tmp_path / "0.tar", {"label": 1})
    shard = in_json(tmp_path / "1.tar", {"label": "ant"})
    with raises("webdataset.mixed-shards", path=shard):
        build_index(str(tmp_path))


# --- against webdataset's reader ---


def read_by_webdataset(shard: Path) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves the file to the collector
        return list(webdataset.WebDataset(str(shard), shardshuffle=False, empty_check=False))


def messy_shard(path: Path) -> Path:
    """What is allowed in a shard, as far as the other readers agree on it."""
    return write_tar(
        path,
        [
            ("__meta__/0.jpg", b"not a sample"),
            ("__meta__/0.cls", b"7"),
            ("a.b/0.txt", b"caption"),
            *(("a.b/0.jpg", b"zero"), ("a.b/0.cls", b"0")),
            *(("a.b/1.CLS", b"1"), ("a.b/1.seg.png", b"a mask"), ("a.b/1.JPG", b"one")),
            *(("2.cls", b"2"), ("2.jpg", b"")),
            *(("./3.cls", b"3"), ("./3.jpg", b"three" * 999)),
            *(("4.coarse.cls", b"9"), ("4.jpg", b"four"), ("4.cls", b"4")),
            *(("a.c/0.jpg", b"of another folder"), ("a.c/0.cls", b"5")),
        ],
    )


def test_samples_are_those_of_the_webdataset_package(tmp_path: Path) -> None:
    shard = messy_shard(tmp_path / "0.tar")
    samples = read_by_webdataset(shard)
    assert read_rows(shard) == [(sample["jpg"], int(sample["cls"])) for sample in samples]
    assert len(read_rows(shard)) == 6


# --- what is recognised ---


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["0.jpg", "0.cls"], "webdataset"),
        (["0.jpg", "0.json"], "webdataset"),  # whose label, or the lack of it, is seen later
        (["README", "__info__", "a/0.jpg", "a/0.txt", "a/0.cls"], "webdataset"),
        (["0.cls"], "webdataset"),
        (["a/0.jpg", "a/1.jpg", "a/about.json"], "tar"),
        (["a.tar", "b.tar"], "tar"),
        (["0.jpg", "0.txt"], "tar"),
    ],
)
def test_shards_are_told_from_other_tars(tmp_path: Path, names: list[str], found: str) -> None:
    write_tar(tmp_path / "0.tar", [])
    write_tar(tmp_path / "1.tar", [(name, b"{}") for name in names])
    assert formats.recognise(find_place(str(tmp_path))) == found


# --- writing ---


def encoded(count: int) -> list[EncodedSample]:
    sizes = [0, 1, 511, 512, 513, 5000]
    return [
        EncodedSample(
            image=bytes([number]) * sizes[number % len(sizes)],
            suffix=[".jpg", ".png", ".webp"][number % 3],
            label=number * 1100,
            key=f"n01440764_{number}",
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [0, 20])
def test_a_written_shard_is_read_by_the_webdataset_package(tmp_path: Path, count: int) -> None:
    shard = tmp_path / "0.tar"
    write(shard, encoded(count), None)
    found = [
        (sample[suffix], f".{suffix}", int(sample["cls"]), sample["__key__"])
        for sample in read_by_webdataset(shard)
        for suffix in sorted({*sample} & {"jpg", "png", "webp"})
    ]
    assert found == [tuple(sample[:4]) for sample in encoded(count)]
    assert read_rows(shard) == [(sample.image, sample.label) for sample in encoded(count)]


def test_the_bytes_of_a_shard_never_change(tmp_path: Path) -> None:
    """Of any machine, day and version: a change here changes the checksums of packed data sets."""
    write(tmp_path / "0.tar", encoded(9), None)
    assert sha256(tmp_path / "0.tar") == (
        "39405e2e6d7889beb7cf335a7b61d9da47d1e480dc98c3b64de8a492f3a46794"
    )


def test_keys_of_any_letters_up_to_what_a_header_holds(tmp_path: Path) -> None:
    samples = [
        EncodedSample(b"image", ".jpg", 1, "é日😀 %d"),
        EncodedSample(b"other", ".jpg", 2, "k" * 96),
    ]
    write(tmp_path / "0.tar", samples, None)
    assert read_rows(tmp_path / "0.tar") == [(b"image", 1), (b"other", 2)]
    with tarfile.open(tmp_path / "0.tar") as tar:
        assert tar.getnames()[1::2] == ["é日😀 %d.jpg", "k" * 96 + ".jpg"]
    with raises("webdataset.name-too-long"):
        write(tmp_path / "1.tar", [EncodedSample(b"image", ".jpg", 1, "k" * 97)], None)


# --- shards on a server, of which many parts are walked at once ---


def rows_by_parts(place: ResolvedLocation, length: int) -> list[FileRows]:
    found = reader.read_remote(place, place.files(".tar"), segment=length)
    return list(all_rows((FileScan(one.rows, one.left_out) for one in found), LeftOut()))


@pytest.mark.parametrize("tar_format", TAR_FORMATS)
@pytest.mark.parametrize("length", [512, 1024, 5120, 51_200])
@pytest.mark.parametrize("prefix", ["", f"{'é' * 100}/{'n' * 100}"], ids=["short", "long"])
def test_a_shard_walked_by_parts_gives_the_same_rows(
    tmp_path: Path, monkeypatch: Patch, tar_format: int, length: int, prefix: str
) -> None:
    """Names of several headers, images that are tars themselves, and images longer than a part."""
    if tar_format == tarfile.USTAR_FORMAT:
        prefix = prefix[:40]  # ustar has no long names
    rng = random.Random(0)
    inner = write_tar(tmp_path / "inner", [(f"{n}.cls", b"7") for n in range(9)]).read_bytes()
    for shard in range(3):
        members = []
        for number in range(40):
            content = inner if number % 7 == 3 else rng.randbytes(rng.choice((10, 700, 9000)))
            members += [
                (f"{prefix}{number}.jpg", content),
                (f"{prefix}{number}.cls", b"%d" % shard),
            ]
        write_tar(tmp_path / f"{shard}.tar", members, tar_format)
    (tmp_path / "inner").unlink()
    place = find_place(str(tmp_path))
    whole = list(formats.scan(place).rows)
    assert sum(len(rows.labels) for rows in whole) == 120
    assert rows_by_parts(place, length) == whole


@pytest.mark.parametrize("harm", ["cut short", "damaged", "empty"])
def test_a_damaged_shard_walked_by_parts_is_named(
    tmp_path: Path, monkeypatch: Patch, harm: str
) -> None:
    members = [(f"{n}.{kind}", b"1" * 600) for n in range(20) for kind in ("jpg", "cls")]
    path = write_tar(tmp_path / "0.tar", members)
    content = bytearray(path.read_bytes())
    if harm == "cut short":
        content = content[: 15 * 1536]
    elif harm == "damaged":
        content[12 * 1536] ^= 1
    else:
        content.clear()
    path.write_bytes(content)
    place = find_place(str(path))
    errors = []
    for rows in (lambda: reader.scan(place).rows, lambda: rows_by_parts(place, 2048)):
        with pytest.raises(DataError) as caught:
            list(rows())
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
