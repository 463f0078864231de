"""Seek tables beside an index: made, found again, refused, and of no effect on pixels."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.command_line import Capture, shown
from tests.data.loading import all_batches, jpeg, spec
from tests.data.tars import Patch, write_files, write_shard
from tests.errors import check, raises, refused
from tests.web import FaultyServer
from trainyard.data._native import core, own_decoder
from trainyard.data.batch import HostBatch
from trainyard.data.decode.crops import CentralCrop
from trainyard.data.decode.decode import decode_batch
from trainyard.data.decode.seek_tables import build_seek, open_seek, seek_path, seek_remark
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.index.val_share import both_sides, open_part
from trainyard.data.open_datasets import slow_paths, warn
from trainyard.data.reading.reader import Reader
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.data.storage.encoded import contents_of
from trainyard.files import sole_write

pytestmark = pytest.mark.skipif(core is None, reason="needs the extension in C")


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """150 JPEGs, of which one is no JPEG and one is gone."""
    images = {f"0/{number:03d}.jpg": jpeg(number) for number in range(150)}
    index = open_index(write_files(tmp_path / "data", images | {"0/007.jpg": b"a text"}))
    (tmp_path / "data" / "0" / "011.jpg").unlink()
    return index


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    with FaultyServer(tmp_path / "source") as server:
        yield server


def silent(_: int) -> None:
    pass


def test_a_table_that_another_process_writes_is_left_to_it(index: Index) -> None:
    with sole_write(seek_path(index)) as file:
        file.write(b"theirs")
        with raises("file.unwritable", path=seek_path(index)):
            build_seek(index, silent)
    assert seek_path(index).read_bytes() == b"theirs"


def test_each_image_has_its_own_entries(index: Index) -> None:
    counts: list[int] = []
    table = build_seek(index, counts.append)
    assert counts[-1] == 150
    assert counts == sorted(counts)
    assert table.path == seek_path(index)
    assert table.num_bytes == table.path.stat().st_size
    decoder, reader = own_decoder(), Reader(index)
    assert decoder is not None
    ids = np.array([149, 0, 7, 11, 64])
    entries, unreadable = contents_of(table.of(ids))
    assert not unreadable
    for sample, found in zip(ids, entries, strict=True):
        whole = b"" if sample in (7, 11) else decoder.seek_table(reader.read(int(sample)))
        assert found == whole
        assert bool(found) == (sample not in (7, 11))


def assert_same(batches: list[HostBatch], plain: list[HostBatch]) -> None:
    for expected, batch in zip(plain, batches, strict=True):
        np.testing.assert_array_equal(batch.images_BHWC, expected.images_BHWC)
        assert batch.bad == expected.bad


def test_a_seek_table_does_not_change_a_pixel(index: Index) -> None:
    """Nor do the entries of other images, of which the libraries are not asked."""
    config = spec(plan=ShuffledPlan(150, 25, seed=1), start=0, stop=12, image_size=48)
    plain = all_batches(index, config)
    table = build_seek(index, silent)
    assert_same(all_batches(index, config), plain)
    with open(table.path, "r+b") as file:
        file.seek(table.num_bytes - int(table.first[-1]) * core.SEEK_ENTRY)
        start, entries = file.tell(), np.frombuffer(file.read(), np.uint8)
        file.seek(start)
        file.write(entries.reshape(-1, core.SEEK_ENTRY)[::-1].tobytes())
    assert open_seek(index) is not None
    assert_same(all_batches(index, config), plain)


def test_a_seek_table_that_is_cut_short_meanwhile(index: Index) -> None:
    """Its entries are read, not mapped: images are decoded without them."""
    table = build_seek(index, silent)
    contents = [Reader(index).read(sample) for sample in range(3)]
    expected, out = np.empty((2, 3, 20, 20, 3), np.uint8)
    crop, seek, decoder = CentralCrop(20, 0.5), table.of(np.arange(3)), own_decoder()
    assert decode_batch(contents, crop, expected, "bilinear", decoder=decoder, seek=seek) == {}
    os.truncate(table.path, 0)
    assert decode_batch(contents, crop, out, "bilinear", decoder=decoder, seek=seek) == {}
    np.testing.assert_array_equal(out, expected)


def test_of_shards(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", [(jpeg(100 * number + n), 0) for n in range(5)])
    index = open_index(str(tmp_path / "*.tar"))
    config = spec(plan=ShuffledPlan(15, 5, seed=1), start=0, stop=6)
    plain = all_batches(index, config)
    assert (np.diff(build_seek(index, silent).first) > 0).all()
    assert_same(all_batches(index, config), plain)
    renumbered = open_merged([str(tmp_path / "*.tar")], ("0", "1"))
    assert open_seek(renumbered) is not None
    assert_same(all_batches(renumbered, config), plain)
    parts = [str(tmp_path / name) for name in ("0.tar", "[12].tar")]
    assert open_seek(open_merged(parts, None)) is None  # none of its own


def test_of_both_sides_of_a_division(tmp_path: Path) -> None:
    """Each sample of a part has the entries of its row in the whole."""
    index = open_index(write_files(tmp_path / "data", {f"0/{n}.jpg": jpeg(n) for n in range(20)}))
    plain = [open_part(index, side) for side in both_sides(0.2, 3)]
    whole = build_seek(index, silent)
    (train, val), seen = plain, set[int]()
    for part in (train, val):
        table, rows = open_seek(part), part.row
        assert table is not None and rows is not None and table.path == whole.path
        assert seek_remark(part) is None
        for sample, row in enumerate(rows.tolist()):
            assert part.locate(sample) == index.locate(row)
            seen.add(row)
        mine, its = table.of(np.arange(len(part))), whole.of(rows)
        np.testing.assert_array_equal((mine.offsets, mine.lengths), (its.offsets, its.lengths))
    assert seen == {*range(20)}
    renumbered = open_merged([str(index.root)], ("0", "1"), side=both_sides(0.2, 3)[1])
    table = open_seek(renumbered)
    assert table is not None and table.path == whole.path
    np.testing.assert_array_equal(renumbered.row, val.row)


def test_images_behind_http(server: FaultyServer) -> None:
    write_shard(server.folder / "a.tar", [(jpeg(n), 0) for n in range(9)])
    index = open_index(f"{server.url}/a.tar")
    table = build_seek(index, silent)
    assert (np.diff(table.first) > 0).all()
    assert table.path.parent == index.path.parent


# --- refused ---


def test_of_other_data(index: Index, tmp_path: Path) -> None:
    assert (open_seek(index), seek_remark(index)) == (None, None)
    path = build_seek(index, silent).path
    (tmp_path / "data" / "0" / "150.jpg").write_bytes(jpeg(150))
    newer = build_index(str(tmp_path / "data"))
    assert open_seek(newer) is None
    console = Console(record=True, width=1000)
    warn(console, slow_paths(newer))
    said = console.export_text()
    assert said.startswith(f"{path}: this seek table is of another version or of other data")
    assert said.count("\n") == 1
    build_seek(newer, silent)
    assert open_seek(newer) is not None
    warn(console, slow_paths(newer))
    assert console.export_text() == ""


@pytest.mark.parametrize("size", [0, 5, 127, 128, 200, -12, -1, None])
def test_cut_short_or_of_an_older_version(index: Index, size: int | None) -> None:
    path = build_seek(index, silent).path
    if size is None:
        path.write_bytes(b"TYSEEK01" + path.read_bytes()[8:])
    else:
        os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    assert open_seek(index) is None
    said = str(seek_remark(index))
    assert "is of another version" in said and "or cut short" in said


def test_a_number_of_entries_that_wraps_around(index: Index) -> None:
    """Times the 12 bytes of an entry it was right, and decoding ended with a ValueError."""
    path = build_seek(index, silent).path
    content = bytearray(path.read_bytes())
    numbers = np.frombuffer(content, "<i8", len(index) + 1, 128)
    numbers[1:] += 1 << 62
    path.unlink()  # a new file: the old one may be mapped
    path.write_bytes(content)
    assert open_seek(index) is None


def test_one_that_is_not_finished_leaves_nothing(index: Index, monkeypatch: Patch) -> None:
    def fail(count: int) -> None:
        raise KeyboardInterrupt

    before = sorted(os.listdir(index.path.parent))
    with pytest.raises(KeyboardInterrupt):
        build_seek(index, fail)
    assert sorted(os.listdir(index.path.parent)) == before


def test_who_decodes_without_the_extension_is_told_so_once(
    index: Index, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("trainyard.data.open_datasets.is_built", lambda: False)
    console = Console(record=True, width=1000)
    warn(console, slow_paths(index, index))
    said = console.export_text()
    assert said.startswith("decoding at a quarter of the speed, without the extension: install a C")
    assert said.count("\n") == 1


def test_without_the_extension(index: Index, monkeypatch: Patch) -> None:
    build_seek(index, silent)
    monkeypatch.setattr("trainyard.data.decode.seek_tables.is_built", lambda: False)
    with raises("data.needs-c-extension", name="--seek"):
        build_seek(index, silent)
    assert open_seek(index) is None


# --- the command ---


def test_command(index: Index, tmp_path: Path, capsys: Capture) -> None:
    location = tmp_path / "data"
    os.truncate(location / "0" / "007.jpg", 0)
    found = json.loads(shown(capsys, "data", "index", location, "--seek", "--json"))["data"]
    path = Path(found["seek"])
    assert path.name == ".trainyard-index.seek"
    assert path.stat().st_size == found["seek_bytes"]
    said = shown(capsys, "data", "index", location, "--seek")
    assert f"seek table of {found['seek_bytes']:,} bytes (" in said
    assert str(path) in said
    assert "seek" not in shown(capsys, "data", "index", location)


def test_a_folder_that_cannot_be_written_to(
    index: Index, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(
        "trainyard.data.decode.seek_tables.seek_path", lambda _: Path("/proc/no/such.seek")
    )
    check(
        refused("data", "index", tmp_path / "data", "--seek"),
        "file.unwritable",
        path="/proc/no/such.seek",
    )
