"""Lists of labels, in every format that holds them, through merging, division and packing."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.command_line import Capture, run
from tests.data.tars import open_splits, write_files, write_tar
from tests.errors import raises
from trainyard.data.augment.extra import MultiHot
from trainyard.data.formats.left_out import LeftOut
from trainyard.data.formats.tar import SequentialReader
from trainyard.data.formats.webdataset import streamed
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.label_lists import LabelLists, joined
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.index.val_share import Side, open_part
from trainyard.data.reading.reader import Reader
from trainyard.data.stream.open_shard import open_shard
from trainyard.datasets.pack.pack import pack
from trainyard.datasets.pack.shards import PackOptions, only_classes, shuffled

LISTS = [["ape", "dog"], [], ["dog"], ["ape", "bee", "dog"], [], ["bee"], ["dog"]]
NUMBERS = [[0, 2], [], [2], [0, 1, 2], [], [1], [2]]
IMAGES = {f"{n}.jpg": b"image %d" % n for n in range(len(LISTS))}


def write_csv(folder: Path, lists: list[list[str]] = LISTS, name: str = "list.csv") -> str:
    """A list with the labels in another order, one of them twice, and with spaces."""
    write_files(folder, {f"{n}.jpg": b"image %d" % n for n in range(len(lists))})
    rows = [f"{n}.jpg,{' | '.join([*some[::-1], *some[:1]])}" for n, some in enumerate(lists)]
    (folder / name).write_text("path,labels\n" + "\n".join(rows) + "\n")
    return str(folder / name)


def names_of(index: Index) -> list[list[str]]:
    return [index.class_names(sample) for sample in range(len(index))]


def contents_of(index: Index) -> list[bytes]:
    reader = Reader(index)
    return [reader.read(sample) for sample in range(len(index))]


def named_contents(index: Index) -> dict[bytes, list[str]]:
    return dict(zip(contents_of(index), names_of(index), strict=True))


def test_csv(tmp_path: Path) -> None:
    location = write_csv(tmp_path)
    index = open_index(location)
    assert names_of(index) == LISTS
    assert names_of(open_index(location)) == LISTS  # saved by now
    assert index.samples_per_class().tolist() == [2, 2, 4]


@pytest.mark.parametrize("format", ["webdataset", "parquet"])
def test_a_pack_keeps_lists(format: str, tmp_path: Path, capsys: Capture) -> None:
    index = open_index(write_csv(tmp_path / "data"))
    options = PackOptions(format, shard_samples=3)
    pack({"train": shuffled(index, 0)}, index.classes, tmp_path / "out", options, about={})
    (again,) = open_splits(tmp_path / "out").values()
    assert named_contents(again) == named_contents(index)
    assert again.classes == ("ape", "bee", "dog")
    assert run("data", "verify", tmp_path / "out", "--json") == 0
    assert run("data", "show", tmp_path / "out", "--json") == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (shown["labels"], shown["per_class"]) == (8, {"ape": 2, "bee": 2, "dog": 4})


@pytest.mark.parametrize("format", ["hdf5", "folder", "packed"])
def test_other_formats_hold_one_label(format: str, tmp_path: Path) -> None:
    index = open_index(write_csv(tmp_path / "data"))
    with raises("pack.format-without-lists", format=format, split="train"):
        pack({"train": shuffled(index, 0)}, None, tmp_path / "out", PackOptions(format), about={})
    with raises("pack.classes-with-lists"):
        only_classes(shuffled(index, 0), np.array([0]))


CLASS = {"names": ["ape", "bee", "dog"], "_type": "ClassLabel"}


@pytest.mark.parametrize(
    ("feature", "kind", "codec"),
    [
        ([CLASS], pa.list_(pa.int64()), "none"),  # `datasets` 1 to 4
        ({"feature": CLASS, "_type": "Sequence"}, pa.large_list(pa.int32()), "snappy"),
        ({"feature": CLASS, "_type": "List"}, pa.list_(pa.int64()), "snappy"),
    ],
)
def test_parquet_of_the_hub(feature: Any, kind: pa.DataType, codec: str, tmp_path: Path) -> None:
    features = {"image": {"_type": "Image"}, "labels": feature, "boxes": {"_type": "Value"}}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    images = [{"bytes": content, "path": None} for content in IMAGES.values()]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        "image": pa.array(images, struct),
        "boxes": pa.array([[1]] * len(images), pa.list_(pa.int64())),
        "labels": pa.array(NUMBERS, kind),
    }
    path = tmp_path / "train.parquet"
    table = pa.table(columns).replace_schema_metadata(about)
    pq.write_table(table, path, row_group_size=3, compression=codec)
    index = build_index(str(path))
    assert names_of(index) == LISTS
    assert contents_of(index) == [*IMAGES.values()]
    columns["labels"] = pa.array([None, *NUMBERS[1:]], kind)
    pq.write_table(pa.table(columns).replace_schema_metadata(about), path)
    with raises("parquet.no-label", path=path, row=0, column="labels"):
        build_index(str(path))


def test_merged_data_unites_the_classes_in_lists(tmp_path: Path) -> None:
    more = [["cat"], ["cat", "ape"], []]
    places = [write_csv(tmp_path / "a"), write_csv(tmp_path / "b", more)]
    index = open_merged(places, None)
    assert names_of(index) == [*LISTS, ["cat"], ["ape", "cat"], []]
    write_files(tmp_path / "one", ["ape/1.jpg", "dog/2.jpg"])
    with raises("data.mixed-locations", location=f"{tmp_path}/b/list.csv"):
        open_merged([places[1], str(tmp_path / "one")], None)


def test_a_share_for_validation_goes_by_the_paths_alone(tmp_path: Path) -> None:
    lists = [[["ape", "dog"], ["bee"], []][n % 3] for n in range(60)]
    whole = open_index(write_csv(tmp_path, lists))
    sides = {
        split: named_contents(open_part(whole, Side(split, 0.3, 0))) for split in ("train", "val")
    }
    assert sides["train"] | sides["val"] == named_contents(whole)
    assert not sides["train"].keys() & sides["val"].keys()
    assert 8 <= len(sides["val"]) <= 28
    fewer = open_index(write_csv(tmp_path / "fewer", lists[:40]))
    val = named_contents(open_part(fewer, Side("val", 0.3, 0)))
    assert val.keys() == sides["val"].keys() & named_contents(fewer).keys()


@pytest.mark.parametrize(
    ("first", "second", "code", "fields"),
    [
        (b'{"label": [1]}', b'{"label": 1}', "webdataset.mixed-labels", {"sample": "b"}),
        (b'{"label": []}', b'{"label": []}', "data.no-labels", {}),
        (b'{"label": [0]}', b'{"label": [-1]}', "webdataset.not-a-class-number", {"sample": "b"}),
    ],
)
def test_wrong_lists_in_webdataset(
    first: bytes, second: bytes, code: str, fields: dict[str, object], tmp_path: Path
) -> None:
    files = {"a.json": first, "a.jpg": b"a", "b.json": second, "b.jpg": b"b"}
    write_tar(tmp_path / "0.tar", files.items())
    with raises(code, **fields):
        build_index(str(tmp_path / "0.tar"))


def test_shards_with_lists_and_without(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("a.json", b'{"label": [1, 0]}'), ("a.jpg", b"a")])
    write_tar(tmp_path / "1.tar", [("b.cls", b"1"), ("b.jpg", b"b")])
    with raises("data.mixed-labels", path="1.tar", other="lists of labels"):
        build_index(str(tmp_path / "{0..1}.tar"))
    with (
        closing(SequentialReader("0.tar", open_shard(str(tmp_path / "0.tar")))) as tar,
        raises("stream.label-lists", sample="a"),
    ):
        list(streamed(tar, LeftOut()))


def test_targets_on_the_device_are_dense_ones() -> None:
    counts, values = [len(some) for some in NUMBERS], [n for some in NUMBERS for n in some]
    lists = joined(np.array(counts, np.int32), np.array(values, np.int32))
    numbers = np.array([6, 0, 1, 3, 3, 4, 0, 5])
    expected = np.zeros((len(numbers), 3), np.float32)
    for row, number in enumerate(numbers):
        expected[row, NUMBERS[number]] = 1
    found = MultiHot(lists, 3, torch.device("cpu"))(torch.from_numpy(numbers))
    assert np.array_equal(found, expected)
    assert np.array_equal(lists.multi_hot(numbers, 3), expected > 0)


def test_targets_wait_for_no_device() -> None:
    """On tensors of a GPU that have a shape but no values, where reading one raises."""
    lists = LabelLists(np.array([2, 2, 3]), np.array([0, 2, 1], np.int32))
    with FakeTensorMode(allow_non_fake_inputs=True):
        numbers = torch.zeros(5, dtype=torch.long).to("cuda")
        targets = MultiHot(lists, 4, torch.device("cuda"))(numbers)
        assert (targets.device.type, targets.shape) == ("cuda", (5, 4))
        with pytest.raises(DataDependentOutputException):
            float(targets[0, 0])
