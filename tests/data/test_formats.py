import io
import random
import re
import string
import tarfile
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import webdataset
from torchvision.datasets import ImageFolder

from trainyard.data import formats
from trainyard.data.formats.tar import Member, members
from trainyard.data.location import find_place
from trainyard.data.source import open_source
from trainyard.errors import DataError

TAR_FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]

Row = tuple[bytes, int]  # the stored bytes and the label


def read_rows(location: str | Path) -> list[Row]:
    """Every sample of a location, its bytes read from where the scan says they are."""
    scan = formats.scan(find_place(str(location)))
    rows = []
    for file in scan.rows:
        content = Path(scan.place.path(file.path)).read_bytes()
        for offset, size, label in zip(file.offsets, file.sizes, file.labels, strict=True):
            rows.append((content[offset : offset + size], label))
    return rows


def write_tar(
    path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = tarfile.USTAR_FORMAT
) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"the content of {name}".encode())


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
        *("dog/10.jpg", "dog/9.jpg", "dog/a.JPG", "dog/B.JPEG", "dog/notes.txt", "dog/jpg"),
        *("dog/deep/er/1.png", "dog/deep/2.png", "dog/deep.png", "dog/deep-2/1.png"),
        *("cat/x.webp", "cat/x.bmp", "cat/x.ppm", "cat/x.pgm", "cat/x.tif", "cat/x.tiff"),
        *("Zebra/1.jpg", "n02/1.jpg", "n1/1.jpg"),
        *("épagneul/été.jpg", "épagneul/日本.jpg", "épagneul/😀.png", "épagneul/z.jpg"),
        *("readme.md", "loose.jpg"),
    )

    assert_equal_to_image_folder(tmp_path)


def test_a_folder_follows_links_like_image_folder(tmp_path: Path) -> None:
    write_files(tmp_path / "elsewhere", "1.jpg", "deep/2.jpg")
    write_files(tmp_path / "data", "cat/1.jpg")
    (tmp_path / "data/dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/cat/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/cat/3.jpg").symlink_to(tmp_path / "elsewhere/1.jpg")

    assert_equal_to_image_folder(tmp_path / "data")


def test_a_folder_of_images_is_no_image(tmp_path: Path) -> None:
    write_files(tmp_path, "cat/1.jpg", "cat/album.jpg/2.jpg")

    assert_equal_to_image_folder(tmp_path)


def test_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    write_files(tmp_path, "cat/1.jpg", ".ipynb_checkpoints/2.jpg", ".git/3.jpg")

    assert formats.scan(find_place(str(tmp_path))).classes == ["cat"]
    assert read_rows(tmp_path) == [(b"the content of cat/1.jpg", 0)]


def test_a_broken_link_is_no_sample(tmp_path: Path) -> None:
    write_files(tmp_path, "cat/1.jpg")
    (tmp_path / "cat/2.jpg").symlink_to(tmp_path / "absent.jpg")

    assert read_rows(tmp_path) == [(b"the content of cat/1.jpg", 0)]


def test_an_empty_class_keeps_its_number(tmp_path: Path) -> None:
    write_files(tmp_path, "a/1.jpg", "c/3.jpg")
    (tmp_path / "b").mkdir()

    assert formats.scan(find_place(str(tmp_path))).classes == ["a", "b", "c"]
    assert [label for _, label in read_rows(tmp_path)] == [0, 2]


# --- what is recognised ---


def test_recognise(tmp_path: Path) -> None:
    write_files(tmp_path, "folder/cat/1.jpg")
    (tmp_path / "shards").mkdir()
    for number in range(4):
        write_tar(tmp_path / f"shards/{number}.tar", [])

    assert formats.recognise(find_place(f"{tmp_path}/folder")) == "folder"
    assert formats.recognise(find_place(f"{tmp_path}/shards")) == "webdataset"
    assert formats.recognise(find_place(f"{tmp_path}/shards/0.tar")) == "webdataset"
    assert formats.recognise(find_place(f"{tmp_path}/shards/*.tar")) == "webdataset"
    assert formats.recognise(find_place(f"{tmp_path}/shards/{{0..3}}.tar")) == "webdataset"


def test_what_is_not_recognised_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_files(tmp_path, "flat/1.jpg", "notes.txt")

    for name, word in [("flat", "no images"), ("notes.txt", "format"), ("absent", "no such file")]:
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}/{name}: ") + f".*({word})"):
            formats.recognise(find_place(f"{tmp_path}/{name}"))


# --- WebDataset shards ---


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

    assert (scan.format, scan.classes) == ("webdataset", None)
    assert read_rows(tmp_path) == samples


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_longer_than_a_header_tell_samples_apart(tmp_path: Path, tar_format: int) -> None:
    members = []
    for number in range(3):  # equal in the first 300 bytes, all that ustar can hold and more
        name = f"{'é' * 100}/{'n' * 100}{number}"
        members += [(f"{name}.png", b"image %d" % number), (f"{name}.cls", b"%d" % number)]
    write_tar(tmp_path / "0.tar", members, tar_format)

    assert read_rows(tmp_path) == [(b"image 0", 0), (b"image 1", 1), (b"image 2", 2)]


def test_shards_of_the_webdataset_package(tmp_path: Path) -> None:
    samples = [(bytes([number]) * (500 + number), number * 7) for number in range(10)]
    pattern = f"{tmp_path}/train-%06d.tar"
    with webdataset.ShardWriter(pattern, maxcount=4, verbose=0) as writer:
        for number, (image, label) in enumerate(samples):
            extra = {"json": {"number": number}, "txt": "a caption"}
            writer.write({"__key__": f"sample{number:04d}", "jpg": image, "cls": label, **extra})

    assert read_rows(tmp_path) == samples
    assert read_rows(f"{tmp_path}/train-*.tar") == samples
    assert read_rows(f"{tmp_path}/train-{{000000..000002}}.tar") == samples
    assert read_rows(f"{tmp_path}/train-{{000001..000002}}.tar") == samples[4:]
    assert read_rows(f"{tmp_path}/train-000001.tar") == samples[4:8]


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "png", "webp"])
def test_image_suffixes_in_any_case(tmp_path: Path, suffix: str) -> None:
    shard = write_tar(tmp_path / "0.tar", [(f"0.{suffix}", b"image"), ("0.CLS", b"1")])

    assert read_rows(shard) == [(b"image", 1)]


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
    "content",
    [b"", b"cat", b"-1", b"1.5", b"\x01\0\0\0", b"9" * 40, b"2147483648", b"\xff" * 8],
)
def test_what_is_no_label_is_an_error(tmp_path: Path, content: bytes) -> None:
    shard = write_tar(tmp_path / "0.tar", [("0.jpg", b"image"), ("0.cls", content)])

    with pytest.raises(DataError, match=re.escape(f"{shard}: sample '0'")):
        read_rows(shard)


def test_other_members_are_ignored(tmp_path: Path) -> None:
    shard = write_tar(
        tmp_path / "0.tar",
        [
            ("README", b"no suffix at all"),
            ("classes.txt", b"a sample of neither image nor label"),
            ("__meta__", b"reserved"),
            ("0.jpg", b"zero"),
            ("0.cls", b"0"),
            ("0.json", b"{}"),
            ("0.seg.png", b"an image that is not the image"),
            ("__info__", b"reserved, between two samples"),
            ("1.txt", b"caption"),
            ("1.cls", b"1"),
            ("1.jpg", b"one"),
            ("._2.jpg", b"what macOS puts beside a file"),
            ("2.jpg", b"two"),
            ("._2.cls", b"likewise"),
            ("2.cls", b"2"),
        ],
    )

    assert read_rows(shard) == [(b"zero", 0), (b"one", 1), (b"two", 2)]


def test_equal_names_in_different_folders_are_different_samples(tmp_path: Path) -> None:
    shard = write_tar(
        tmp_path / "0.tar",
        [("a.b/0.jpg", b"a"), ("a.b/0.cls", b"1"), ("a.c/0.jpg", b"b"), ("a.c/0.cls", b"2")],
    )

    assert read_rows(shard) == [(b"a", 1), (b"b", 2)]


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

    with pytest.raises(DataError, match=re.escape(f"{shard}: sample '0'")) as error:
        read_rows(shard)

    assert names[0] in str(error.value)


# --- tars against the standard library's ---


def regular_files(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path) as tar:
        return [(m.name, m.offset_data, m.size) for m in tar if m.isreg()]


def walked(path: Path) -> list[Member]:
    with closing(open_source(str(path))) as tar:
        return list(members(tar))


def random_info(rng: random.Random, tar_format: int) -> tarfile.TarInfo:
    in_ustar = tar_format == tarfile.USTAR_FORMAT  # whose header is all the room a name has
    lengths = [rng.choice([1, 8, 45 if in_ustar else 99]) for _ in range(rng.randint(1, 4))]
    letters = f"{string.ascii_letters}._- =%\n" + ("" if in_ustar else "é日😀")
    parts = ["".join(rng.choices(letters, k=length)) + "x" for length in lengths]
    info = tarfile.TarInfo("/".join(parts) + rng.choice(["", "\n"]))
    kinds = [tarfile.REGTYPE] * 6 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
    # The pre-POSIX kind in ustar alone: tarfile takes it for a folder where a long name is cut
    # just after a slash.
    kinds += [tarfile.FIFOTYPE, tarfile.CONTTYPE, *([tarfile.AREGTYPE] if in_ustar else [])]
    info.type = rng.choice(kinds)
    if info.isreg():
        info.size = rng.choice([0, 1, 511, 512, 513, rng.randint(0, 5000)])
    if info.issym() or info.islnk():
        info.linkname = "x" * rng.choice([5, 100 if in_ustar else 300])
    if tar_format == tarfile.PAX_FORMAT and rng.random() < 0.3:
        info.pax_headers = {"comment": "path=wrong\n12 size=7\n" * rng.randint(1, 60)}
    return info


@pytest.mark.parametrize("tar_format", TAR_FORMATS)
def test_random_archives_walk_like_tarfile(tmp_path: Path, tar_format: int) -> None:
    path = tmp_path / "random.tar"
    for seed in range(60):
        rng = random.Random(seed)
        pax = {"comment": "of all members"} if tar_format == tarfile.PAX_FORMAT else None
        with tarfile.open(path, "w", format=tar_format, pax_headers=pax) as tar:
            for _ in range(rng.randint(1, 30)):
                info = random_info(rng, tar_format)
                tar.addfile(info, io.BytesIO(rng.randbytes(info.size)))

        assert walked(path) == regular_files(path), seed


def test_an_empty_archive_has_no_members(tmp_path: Path) -> None:
    assert walked(write_tar(tmp_path / "0.tar", [])) == []


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_8_gib_and_more(tmp_path: Path, tar_format: Literal[1, 2]) -> None:
    path, huge, small = tmp_path / "huge.tar", tarfile.TarInfo("huge"), tarfile.TarInfo("small")
    huge.size, small.size = (8 << 30) + 5, 7
    with open(path, "wb") as file:  # sparse: takes no room
        file.write(huge.tobuf(tar_format))
        file.seek(8 << 30, 1)
        file.seek(512, 1)
        file.write(small.tobuf(tar_format))
        file.write(bytes(512 * 3))

    assert walked(path) == regular_files(path)
    assert [(name, size) for name, _, size in walked(path)] == [("huge", huge.size), ("small", 7)]


def test_the_size_of_a_link_is_not_stored_content(tmp_path: Path) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname, link.size = tarfile.LNKTYPE, "0.jpg", 5000
    path = write_tar(tmp_path / "0.tar", [("1.jpg", b"image")])
    path.write_bytes(link.tobuf(tarfile.USTAR_FORMAT) + path.read_bytes())

    assert walked(path) == regular_files(path) == [("1.jpg", 1024, 5)]


def test_old_tars_mark_folders_by_a_slash(tmp_path: Path) -> None:
    folder = tarfile.TarInfo("folder/")
    folder.type = tarfile.AREGTYPE
    path = write_tar(tmp_path / "0.tar", [("folder/1.jpg", b"image")])
    path.write_bytes(folder.tobuf(tarfile.USTAR_FORMAT) + path.read_bytes())

    assert walked(path) == regular_files(path) == [("folder/1.jpg", 1024, 5)]


def sealed(header: bytes) -> bytes:
    """A header with the checksum that it should have."""
    blank = header[:148] + b" " * 8 + header[156:]
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]


def test_the_times_in_a_gnu_header_are_no_part_of_the_name(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", [("1.jpg", b"image")], tarfile.GNU_FORMAT)
    content = path.read_bytes()
    path.write_bytes(sealed(content[:345] + b"14012345670\0" + content[357:512]) + content[512:])

    assert walked(path) == [("1.jpg", 512, 5)]


# --- broken shards ---


def good_shard(path: Path) -> Path:
    images = [(f"{n}.{suffix}", b"1" * 700) for n in range(3) for suffix in ("jpg", "txt")]
    labels = [(f"{n}.cls", b"1") for n in range(3)]
    return write_tar(path, sorted(images + labels))


def assert_broken(shard: Path, word: str) -> None:
    with pytest.raises(DataError, match=re.escape(str(shard)) + f".*({word})"):
        read_rows(shard)


@pytest.mark.parametrize("length", [0, 1, 511, 513, 1023, 1024, 1500, 2300, 2559, 2560])
def test_an_archive_cut_in_a_header_or_in_padding_is_an_error(tmp_path: Path, length: int) -> None:
    shard = good_shard(tmp_path / "0.tar")
    shard.write_bytes(shard.read_bytes()[:length])

    assert_broken(shard, f"truncated: it ends at byte {length}")


@pytest.mark.parametrize("length", [1536, 1537, 2047, 2048, 2235])
def test_an_archive_cut_in_a_member_is_an_error(tmp_path: Path, length: int) -> None:
    shard = good_shard(tmp_path / "0.tar")
    shard.write_bytes(shard.read_bytes()[:length])

    assert_broken(shard, "byte 1024: .*truncated inside a member of 700 bytes")


@pytest.mark.parametrize(
    "checksum", [b"0000000\0", b"99999999", b"xxxxxxxx", bytes(8), b"-0001\0 "]
)
def test_a_wrong_checksum_is_an_error(tmp_path: Path, checksum: bytes) -> None:
    shard = good_shard(tmp_path / "0.tar")
    content = shard.read_bytes()
    shard.write_bytes(content[:148] + checksum + content[156:])

    assert_broken(shard, "checksum")


def test_a_flipped_bit_in_a_later_header_is_an_error(tmp_path: Path) -> None:
    shard = good_shard(tmp_path / "0.tar")
    content = bytearray(shard.read_bytes())
    assert content[1024:1029] == b"0.jpg"
    content[1024 + 3] ^= 1
    shard.write_bytes(content)

    assert_broken(shard, "byte 1024: .*checksum")


def test_what_is_no_tar_is_an_error(tmp_path: Path) -> None:
    shard = tmp_path / "0.tar"
    shard.write_bytes(b"\xff\xd8\xff\xe0 a JPEG " * 1000)

    assert_broken(shard, "not a tar header")


@pytest.mark.parametrize(
    "size",
    [
        b"77777777777\0",  # 8 GiB less one byte
        b"\x80" + b"\x7f" * 11,  # some 10**26 bytes
        b"-0000000512\0",
        b"+0000000512\0",
        b"0_0000_0001\0",
        b"00000000009\0",
        b"\xff" * 12,  # -1 in binary
        b"size, please",
    ],
)
def test_an_absurd_size_is_an_error(tmp_path: Path, size: bytes) -> None:
    shard = good_shard(tmp_path / "0.tar")
    content = shard.read_bytes()
    header = sealed(content[:124] + size + content[136:512])
    shard.write_bytes(header + content[512:])

    assert_broken(shard, "size|number|truncated")


@pytest.mark.parametrize("size", ["-512", "", "7e2", "9" * 30, "8589934592"])
def test_an_absurd_size_in_a_pax_header_is_an_error(tmp_path: Path, size: str) -> None:
    shard = good_shard(tmp_path / "0.tar")
    info = tarfile.TarInfo("0.jpg")
    info.pax_headers = {"size": size}
    shard.write_bytes(info.tobuf(tarfile.PAX_FORMAT) + shard.read_bytes())

    assert_broken(shard, "number|truncated")


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_huge_name_is_an_error(tmp_path: Path, tar_format: int) -> None:
    shard = write_tar(tmp_path / "0.tar", [("n" * (2 << 20) + ".jpg", b"image")], tar_format)

    assert_broken(shard, "not believable")


@pytest.mark.parametrize(
    "record", [b"path=no length\n", b"0 path=x\n", b"99 path=x\n", b"12 no equals\n", b"\xff 1=2\n"]
)
def test_a_broken_pax_header_is_an_error(tmp_path: Path, record: bytes) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    shard = good_shard(tmp_path / "0.tar")
    header = info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0")
    shard.write_bytes(header + shard.read_bytes())

    assert_broken(shard, "broken")


def test_noise_is_never_more_than_an_error(tmp_path: Path) -> None:
    content = good_shard(tmp_path / "good.tar").read_bytes()
    shard, rng = tmp_path / "0.tar", np.random.default_rng(0)
    for _ in range(300):
        noisy = bytearray(content)
        for place in rng.integers(0, 512, 3):  # the first header, then a checksum to get past
            noisy[place] = rng.choice([0, 32, 45, 55, 57, 95, 103, 120, 128, 255])
        shard.write_bytes(sealed(bytes(noisy[:512])) + noisy[512:])
        try:
            read_rows(shard)
        except DataError as error:
            assert str(shard) in str(error)
