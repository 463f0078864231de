"""Walking tars, against the standard library's reader and against damage and malice."""

import bz2
import gzip
import io
import lzma
import random
import string
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest

from tests.data.tars import TAR_FORMATS, read_rows, sealed, write_tar
from tests.errors import raises
from trainyard.data.formats.tar import BufferedTarReader, Member, members
from trainyard.data.storage.open import open_source


def listed(path: Path) -> list[tuple[str, int, int]]:
    """All members but folders; only regular files have a content."""
    with tarfile.open(path) as tar:
        found = [m for m in tar if not m.isdir()]
        # The data of a link that gives a size begins behind its header all the same.
        return [(m.name, m.offset_data, m.size if m.isreg() else 0) for m in found]


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
        assert walked(path) == listed(path), seed


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
    assert walked(path) == listed(path)
    assert [(name, size) for name, _, size in walked(path)] == [("huge", huge.size), ("small", 7)]


@pytest.mark.parametrize(
    ("kind", "name", "link", "size"),
    [
        (tarfile.LNKTYPE, "link", "0.jpg", 5000),  # the size of a link is not stored content
        (tarfile.AREGTYPE, "folder/", "", 0),  # old tars mark folders by a slash
    ],
)
def test_what_comes_before_an_image_takes_a_header(
    tmp_path: Path, kind: bytes, name: str, link: str, size: int
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    path = write_tar(tmp_path / "0.tar", [("folder/1.jpg", b"image")])
    path.write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + path.read_bytes())
    assert walked(path) == listed(path)
    assert walked(path)[-1] == ("folder/1.jpg", 1024, 5)


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


def test_a_second_archive_behind_the_end_mark_is_an_error(tmp_path: Path) -> None:
    """`cat a.tar b.tar`: half of the data went without a word."""
    shard = good_shard(tmp_path / "0.tar")
    shard.write_bytes(shard.read_bytes() * 2)
    with raises("tar.second-archive", path=shard):
        read_rows(shard)
    shard.write_bytes(good_shard(shard).read_bytes() + bytes(1 << 20))
    assert len(read_rows(shard)) == 3


Damage = Callable[[bytes], bytes]  # of the content of a good shard


def put(at: int, damage: bytes, *, seal: bool = False) -> Damage:
    """Other bytes at a place; a sealed header has the right checksum all the same."""

    def change(content: bytes) -> bytes:
        content = content[:at] + damage + content[at + len(damage) :]
        return sealed(content[:512]) + content[512:] if seal else content

    return change


def pax(record: bytes, kind: bytes = tarfile.XHDTYPE) -> Damage:
    info = tarfile.TarInfo("pax")
    info.type, info.size = kind, len(record)
    return lambda good: info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0") + good


def member(tar_format: Literal[0, 1, 2], name: str, **headers: str) -> Damage:
    info = tarfile.TarInfo(name)
    info.pax_headers = headers
    return lambda good: info.tobuf(tar_format) + good


SIZES = (
    *(b"-0000000512\0", b"+0000000512\0", b"0_0000_0001\0", b"00000000009\0"),
    *(b"\xff" * 12, b"size, please"),  # -1 in binary
)
HUGE = (b"77777777777\0", b"\x80" + b"\x7f" * 11)  # 8 GiB less one byte; some 10**26 bytes
CHECKSUMS = (b"0000000\0", b"99999999", b"xxxxxxxx", bytes(8), b"-0001\0 ")
RECORDS = (b"path=no length\n", b"0 path=x\n", b"99 path=x\n", b"12 no equals\n", b"\xff 1=2\n")
FOR_ALL = (b"14 path=1.jpg\n", b"10 size=7\n")  # one name or size for all members
LONG = "n" * (2 << 20) + ".jpg"


@pytest.mark.parametrize(
    ("damage", "code", "offset"),
    [
        *((put(148, checksum), "tar.damaged", 0) for checksum in CHECKSUMS),
        (put(1024 + 3, b"?"), "tar.damaged", 1024),
        (put(0, b"\xff\xd8\xff\xe0 a JPEG " * 1000), "tar.damaged", 0),
        *((put(124, size, seal=True), "tar.damaged", 0) for size in SIZES),
        *((put(124, size, seal=True), "tar.truncated-member", 0) for size in HUGE),
        *((member(2, "0.jpg", size=n), "tar.damaged", 1024) for n in ("-512", "", "7e2", "9" * 30)),
        (member(2, "0.jpg", size="8589934592"), "tar.truncated-member", 1024),
        (member(2, "0.jpg", path="1.jpg\0/../2.jpg"), "tar.damaged", 0),
        *((member(tar_format, LONG), "tar.damaged", 0) for tar_format in (1, 2)),
        *((pax(record), "tar.damaged", 0) for record in RECORDS),
        *((pax(record, tarfile.XGLTYPE), "tar.damaged", 0) for record in FOR_ALL),
    ],
)
def test_a_broken_header_is_an_error(
    damage: Damage, code: str, offset: int, tmp_path: Path
) -> None:
    shard = good_shard(tmp_path / "0.tar")
    shard.write_bytes(damage(shard.read_bytes()))
    with raises(code, path=shard, offset=offset):
        read_rows(shard)


# --- GNU tar, and reading ahead ---


@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_archives_of_gnu_tar(tmp_path: Path, tar_format: str) -> None:
    for number, length in enumerate((1, 50, 80 if tar_format in ("v7", "ustar") else 220)):
        folder = tmp_path / "data" / str(number)
        folder.mkdir(parents=True)
        (folder / ("n" * length + ".jpg")).write_bytes(b"x" * number * 511)
    (tmp_path / "data/empty").mkdir()
    (tmp_path / "data/link").symlink_to("elsewhere")
    path = tmp_path / "0.tar"
    subprocess.run(
        ["tar", f"--format={tar_format}", "-cf", path, "-C", tmp_path, "data"], check=True
    )
    assert sorted(walked(path)) == sorted(listed(path))
    assert len(walked(path)) == 4  # and a link


def test_reading_ahead_gives_the_bytes_that_are_there(tmp_path: Path) -> None:
    rng = random.Random(0)
    content = rng.randbytes(3 << 20)
    (tmp_path / "file").write_bytes(content)
    with closing(BufferedTarReader(open_source(str(tmp_path / "file")))) as source:
        offset = 0
        for _ in range(2000):
            size = rng.choice([0, 1, 512, 5000, 300_000])
            jump = rng.choice([0, 512, 5000, 100_000, 270_000, 600_000, -1000, -400_000])
            offset = (offset + jump) % len(content)
            size = min(size, len(content) - offset)
            assert source.read(offset, size) == content[offset : offset + size]
            offset += size


# --- archives that mean harm ---


def with_first(path: Path, info: tarfile.TarInfo, tar_format: Literal[0, 1, 2] = 0) -> Path:
    """A good shard after a member without content."""
    good_shard(path)
    path.write_bytes(info.tobuf(tar_format) + path.read_bytes())
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, tarfile.REGTYPE) for name in ("../1.jpg", "/etc/1.jpg", "a/../../1.jpg", "a/..")),
        *(("..", tarfile.DIRTYPE), ("../1.jpg", tarfile.SYMTYPE)),
        (f"{'n' * 200}/../1", tarfile.REGTYPE),
    ],
)
@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_name_that_points_out_of_the_archive_is_an_error(
    tmp_path: Path, name: str, tar_format: Literal[1, 2], kind: bytes
) -> None:
    info = tarfile.TarInfo(name)
    info.type = kind
    shard = with_first(tmp_path / "0.tar", info, tar_format)
    with raises("tar.member-outside", path=shard):
        read_rows(shard)


@pytest.mark.parametrize("name", ["..1.jpg", "a..b/1.jpg", ".../1.jpg", "a./.b", "./1.jpg"])
def test_other_dots_are_names(tmp_path: Path, name: str) -> None:
    path = write_tar(tmp_path / "0.tar", [(name, b"image")])
    assert walked(path) == listed(path) == [(name, 512, 5)]


KINDS = [
    (tarfile.LNKTYPE, "hard link"),
    (tarfile.SYMTYPE, "symbolic link"),
    (tarfile.CHRTYPE, "device"),
    (tarfile.BLKTYPE, "device"),
    (tarfile.FIFOTYPE, "pipe"),
]


@pytest.mark.parametrize(("kind", "word"), KINDS)
def test_what_is_no_file_is_left_out_but_not_in_the_place_of_an_image(
    tmp_path: Path, kind: bytes, word: str
) -> None:
    info = tarfile.TarInfo("README")
    info.type, info.linkname = kind, "/etc/passwd"
    skipped = with_first(tmp_path / "0.tar", info)
    info.name = "a/1.JPEG"
    refused = with_first(tmp_path / "1.tar", info)
    assert [label for _, label in read_rows(skipped)] == [1, 1, 1]
    with raises("tar.no-file", path=refused, offset=0, name="a/1.JPEG", kind=f"a {word}"):
        read_rows(refused)


@pytest.mark.night
def test_a_great_many_headers_for_one_member_cost_no_more_than_they_weigh(tmp_path: Path) -> None:
    info = tarfile.TarInfo("pax")
    info.type, records = tarfile.XHDTYPE, b"6 a=b\n" * 170_000 + b"14 path=1.jpg\n"
    info.size = len(records)
    padded = records + bytes(-len(records) % 512)
    path = write_tar(tmp_path / "0.tar", [("other", b"image")])
    path.write_bytes((info.tobuf(tarfile.USTAR_FORMAT) + padded) * 3 + path.read_bytes())
    assert [(name, size) for name, _, size in walked(path)] == [("1.jpg", 5)]


@pytest.mark.parametrize("option", ["gnu", "posix", "0.0", "0.1", "1.0"])
def test_a_file_with_holes_is_an_error(tmp_path: Path, option: str) -> None:
    with open(tmp_path / "1.jpg", "wb") as file:
        for position in range(0, 1 << 20, 1 << 15):  # more holes than a header lists
            file.seek(position)
            file.write(b"x")
    path = tmp_path / "0.tar"
    chosen = f"--sparse-version={option}" if option[0] in "01" else f"--format={option}"
    options = ["--sparse", "--format=posix", chosen]
    subprocess.run(["tar", *options, "-cf", path, "-C", tmp_path, "1.jpg"], check=True)
    with raises("tar.sparse-file", path=path, offset=0):
        walked(path)


@pytest.mark.parametrize("module", [gzip, bz2, lzma])
def test_a_compressed_archive_by_the_name_of_a_tar_is_an_error(
    tmp_path: Path, module: ModuleType
) -> None:
    shard = write_tar(tmp_path / "0.tar", [(f"{n}.txt", random.randbytes(900)) for n in range(5)])
    shard.write_bytes(module.compress(shard.read_bytes()))
    with raises("tar.compressed", path=shard):
        read_rows(shard)


def test_an_archive_inside_another_ends_where_its_member_ends(tmp_path: Path) -> None:
    inner = write_tar(tmp_path / "inner", [("1.jpg", b"x" * 700)]).read_bytes()[: 512 + 700]
    path = write_tar(tmp_path / "0.tar", [("a.tar", inner), ("secret.jpg", b"y" * 700)])
    with closing(open_source(str(path))) as tar:
        (_, offset, size), _ = members(tar)
        with raises("tar.truncated", path=path):
            list(members(tar, offset, offset + size))
        with raises("tar.truncated-member", path=path, offset=512, size=700):
            list(members(tar, offset, offset + size - 1))
