"""`data.val_share`: validation images taken from data that come without a split."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from tests.command_line import SHORT, Capture, run, shown
from tests.data.tars import stored, write_files
from tests.errors import check, raises, refused
from tests.images import jpeg
from trainyard.config import load_recipe
from trainyard.data.config import DataConfig
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.merge import open_merged
from trainyard.data.index.table import Index
from trainyard.data.index.val_share import Side, both_sides, open_part
from trainyard.data.open_datasets import data_remarks, open_datasets, open_split, source_of
from trainyard.world import World


def sides(location: str, share: float | str = 0.25, seed: int = 0) -> dict[str, set[str]]:
    """The files on each side, relative to the location."""
    found = {}
    for split in ("train", "val"):
        part = open_part(open_index(location), Side(split, share, seed))
        rows = range(len(part))
        found[split] = {str(Path(part.locate(row)[0]).relative_to(location)) for row in rows}
    return found


def patients(location: str, group: str, part: float | str = 0.3) -> dict[str, list[str]]:
    """The sorted files on each side, by groups."""
    sides = both_sides(part, 0, group)
    parts = {side.split: open_merged([location], None, side=side) for side in sides}
    return {
        split: sorted(Path(one.locate(row)[0]).name for row in range(len(one)))
        for split, one in parts.items()
    }


def test_a_group_is_on_one_side(tmp_path: Path) -> None:
    """By an expression of the path, whose classes keep their shares; groups of two classes too."""
    names = [
        f"{'ill' if patient % 3 else 'well'}/p{patient:02}-{image}.png"
        for patient in range(40)
        for image in range(1 + patient % 5)
    ]
    names += [f"{name}/p99-x.png" for name in ("ill", "well")]
    location = write_files(tmp_path / "x", names)
    found = patients(location, "(p\\d+)-")
    assert sorted(found["train"] + found["val"]) == sorted(Path(name).name for name in names)
    both = [{name[:3] for name in side} for side in found.values()]
    assert not both[0] & both[1]
    of_ill = [name for name in found["val"] if int(name[1:3]) % 3]
    assert 20 <= len(of_ill) <= 28  # 0.3 of 80, to a patient of five
    assert 8 <= len(found["val"]) - len(of_ill) <= 16
    again = patients(write_files(tmp_path / "y", [*names, "ill/p77-0.png"]), "p\\d+")
    moved = {*found["val"]} ^ {*again["val"]}
    assert len({name[:3] for name in moved}) <= 3


def test_folds_of_groups_are_disjoint_and_together_all(tmp_path: Path) -> None:
    """With two patients in each class, the same folds would be empty in all of them."""
    names = [f"c{n}/p{n}.{k}-{i}.png" for n in range(20) for k in range(2) for i in range(3)]
    location = write_files(tmp_path, names)
    folds = [patients(location, "p[\\d.]+", f"{n}/5")["val"] for n in range(1, 6)]
    assert sorted(name for fold in folds for name in fold) == sorted(Path(n).name for n in names)
    assert [len(fold) for fold in folds] == [24] * 5
    assert all(len({name.split("-")[0] for name in fold}) == 8 for fold in folds)


def test_groups_of_a_column_and_of_several_labels(tmp_path: Path) -> None:
    """HAM10000: several images of a lesion, which their names do not tell."""
    names = [f"{number}.png" for number in range(60)]
    write_files(tmp_path, names)
    rows = [f"{name},{'ab'[n // 30]},L{n // 3}" for n, name in enumerate(names)]
    (tmp_path / "l.csv").write_text("\n".join(["path,label,lesion_id", *rows, "60.png,a,"]))
    write_files(tmp_path, ["60.png"])
    found = patients(f"{tmp_path}/l.csv", "lesion_id")
    lesions = [{int(Path(name).stem) // 3 for name in side} for side in found.values()]
    assert len(lesions[1]) == 6 and not lesions[0] & lesions[1]
    lists = [row.replace(",a,", ",a|b,") for row in rows]
    (tmp_path / "s.csv").write_text("\n".join(["path,labels,lesion_id", *lists]))
    found = patients(f"{tmp_path}/s.csv", "lesion_id")
    lesions = [{int(Path(name).stem) // 3 for name in side} for side in found.values()]
    assert lesions[0] and lesions[1] and not lesions[0] & lesions[1]


@pytest.mark.parametrize("group", ["no such", "png", "^.*$"])
def test_groups_that_divide_nothing_are_an_error(group: str, tmp_path: Path) -> None:
    location = write_files(tmp_path, [f"{name}/{n}.png" for name in "ab" for n in range(4)])
    with raises("data.group-divides-nothing", group=group):
        patients(location, group)


def test_few_images_change_sides_as_others_are_added(tmp_path: Path) -> None:
    """A split by position would train on a tenth of the images that validated the run before."""
    old = [f"{name}/{number}.jpg" for name in range(20) for number in range(100)]
    before = sides(write_files(tmp_path / "x", old), 0.1)
    assert before["train"] | before["val"] == set(old)
    assert not before["train"] & before["val"]
    new = [f"{name}/new {number}.jpg" for name in range(20) for number in range(10)]
    after = sides(write_files(tmp_path / "x", [*new, "another class/1.jpg"]), 0.1)
    moved = before["val"] & after["train"] | before["train"] & after["val"]
    assert len(moved) <= 24  # 13 of 2000 on average, with a deviation below 4
    elsewhere = write_files(tmp_path / "y", [*old, *new, "another class/1.jpg"])
    assert sides(elsewhere, 0.1) == after
    assert sides(elsewhere, 0.1, seed=1) != after
    assert after["val"] < sides(elsewhere, share=0.5)["val"]


def test_each_class_has_its_share_and_an_image_on_each_side(tmp_path: Path) -> None:
    """By hashes alone 1 of 40 and 11 of 60 images would validate, and none of many tens."""
    sizes = {f"of {size}, {number}": size for size in (1, 2, 10, 40, 60) for number in range(20)}
    names = [f"{name}/{number}.png" for name, size in sizes.items() for number in range(size)]
    location = write_files(tmp_path, names)
    for share, counts in (
        (0.1, (0, 1, 1, 4, 6)),
        (0.26, (0, 1, 3, 10, 16)),
        (0.9, (0, 1, 9, 36, 54)),
    ):
        found = sides(location, share)["val"]
        val = Counter(Path(name).parent.name for name in found)
        wanted = dict(zip((1, 2, 10, 40, 60), counts, strict=True))
        assert {name: val[name] for name in sizes} == {n: wanted[s] for n, s in sizes.items()}


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_folds_are_disjoint_and_together_all_images(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at the same rounded places in each class, folds of five would have 2, 1, 2, 1, 1 of 7."""
    sizes = {f"{n:02}": 7 if n < 20 else n - 19 for n in range(30)}
    names = [f"{name}/{number}.png" for name, size in sizes.items() for number in range(size)]
    location = write_files(tmp_path / "x", names)
    folds = [sides(location, f"{fold + 1}/{count}") for fold in range(count)]
    held_out = Counter(name for fold in folds for name in fold["val"])
    assert held_out == dict.fromkeys(names, 1)
    for fold in folds:
        assert fold["train"] == set(names) - fold["val"]
        in_class = Counter(name.partition("/")[0] for name in fold["val"])
        for name, size in sizes.items():
            assert in_class[name] in (size // count, -(-size // count))
        of_seven = sum(in_class[name] for name in list(sizes)[:20])
        assert abs(of_seven - 140 / count) < 2
    assert sides(location, f"1/{count}", seed=1) != folds[0]
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "of another node"))
    assert sides(write_files(tmp_path / "y", names), f"1/{count}") == folds[0]


def test_folds_of_lists_are_disjoint_and_together_all_images(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(90)]
    location = write_files(tmp_path, names)
    rows = (f"{name},a|b" if number % 2 else f"{name},b" for number, name in enumerate(names))
    (tmp_path / "list.csv").write_text("\n".join(["path,labels", *rows]))
    location = str(tmp_path / "list.csv")
    parts = [open_part(open_index(location), Side("val", f"{n}/3", 0)) for n in (1, 2, 3)]
    assert sorted(part.locate(row)[0] for part in parts for row in range(len(part))) == sorted(
        str(tmp_path / name) for name in names
    )
    assert all(15 < len(part) < 45 for part in parts)


@pytest.mark.parametrize(
    "fold", ["0/5", "6/5", "1/1", "2", "a/b", "-1/5", "1/5/5", "٢/5", "1/999999"]
)
def test_what_is_no_fold(fold: str, classes: Path) -> None:
    error = refused("train", "debug", "--data", classes, f"--data.val_fold={fold}")
    check(error, "recipe.invalid-value", key="data.val_fold")
    error = refused("data", "show", classes, f"--val-fold={fold}")
    check(error, "recipe.invalid-value", key="data.val_fold")


def test_more_folds_than_images(tmp_path: Path) -> None:
    place = write_files(tmp_path / "x", ["a/1.png", "b/1.png", "b/2.png"])
    with raises("data.too-few-to-share", key="data.val_fold", value="1/9"):
        sides(place, "1/9")


def test_show_counts_the_images_of_a_fold(classes: Path, capsys: Capture) -> None:
    words = ("data", "show", classes, "--val-fold", "2/5", "--val-seed", "3")
    about = json.loads(shown(capsys, *words, "--json"))
    whole = open_index(str(classes))
    for split in ("train", "val"):
        part = open_part(whole, Side(split, "2/5", 3))
        assert about[split]["samples"] == len(part)
        assert [*about[split]["per_class"].values()] == part.samples_per_class().tolist()
    assert about["train"]["samples"] + about["val"]["samples"] == len(whole)


def test_parts_of_any_format_read_and_merge_as_wholes_do(digits: Path, tmp_path: Path) -> None:
    """Labels, offsets or names of another sample would train on wrong classes."""
    packed = tmp_path / "packed"
    assert run("data", "pack", digits / "val", packed, "--format", "webdataset", "--json") == 0
    copies = shutil.copytree(digits / "val" / "3", tmp_path / "copies" / "3").parent.as_posix()
    for location in (str(packed / "*.tar"), str(digits / "val")):
        whole = stored(open_index(location))
        train, val = (
            open_merged([location], None, side=Side(split, 0.3, 5)) for split in ("train", "val")
        )
        assert sorted(stored(train) + stored(val)) == sorted(whole)
        assert train.classes == val.classes == open_index(location).classes
        assert min(np.bincount(val.label)) >= 1 and 80 < len(val) < 140
        both = open_merged([location, copies], None, side=Side("val", 0.3, 5))
        other = open_merged([copies], None, side=Side("val", 0.3, 5))
        assert stored(both) == stored(val) + stored(other)


def test_parts_of_one_data_set_name_it(tmp_path: Path) -> None:
    """Folds of the data of before and after a change had one mean."""
    places = [write_files(tmp_path / name, [f"a/{n}.png" for n in range(9)]) for name in "xy"]
    for locations in (places[:1], places):
        wholes = {
            open_merged(locations, None, side=Side(split, fold, 0)).whole
            for fold in ("1/3", "3/3")
            for split in ("train", "val")
        }
        assert len(wholes) == 1 and wholes != {""}
        assert open_merged(locations, None).whole == ""
    assert open_part(open_index(places[0]), Side("val", 0.5, 0)).whole not in wholes


def test_a_part_follows_its_data(tmp_path: Path) -> None:
    """A saved part of an older state would hide new images."""
    place = write_files(tmp_path / "x", [f"a/{number}.png" for number in range(9)])
    assert len(sides(place)["train"] | sides(place)["val"]) == 9
    write_files(tmp_path / "x", ["b/1.png", "b/2.png"])
    build_index(place)
    assert len(sides(place)["train"] | sides(place)["val"]) == 11


@pytest.fixture(scope="module")
def classes(digits: Path) -> Path:
    """A folder of classes without a split."""
    return digits / "val"


def test_a_run_is_evaluated_and_resumed_on_its_own_part(
    classes: Path, tmp_path: Path, capsys: Capture
) -> None:
    """An evaluation of all images would flatter: most of them were trained on."""
    keys = ("--data.val_share", "0.05")
    begin = ("train", "debug", "--data", classes, "--run", tmp_path / "run", *SHORT, "--json")
    assert run(*begin, *keys) == 0
    capsys.readouterr()
    recipe = load_recipe(str(tmp_path / "run" / "recipe.toml"))
    assert (recipe.data.train, recipe.data.val) == (str(classes), None)
    val = open_part(open_index(str(classes)), Side("val", 0.05, 0))
    result = json.loads(shown(capsys, "evaluate", tmp_path / "run", "--json"))
    assert result["samples"] == len(val)
    assert run(*begin, *keys) == 0  # complete
    environment = tmp_path / "run" / "environment.json"
    tree = json.loads(environment.read_text())
    tree["fingerprints"]["val"] = "of another division"
    environment.write_text(json.dumps(tree))
    assert "the run may have been trained on some" in shown(capsys, "evaluate", tmp_path / "run")
    check(refused(*begin, *keys), "run.data-differs", path=f"{tmp_path}/run", split="val")
    check(refused(*begin, "--data.val_share", "0.2"), "run.recipe-differs", path=f"{tmp_path}/run")


def test_verify_checks_the_parts_for_images_on_both_sides(tmp_path: Path, capsys: Capture) -> None:
    """Copies of a photograph on both sides falsify the accuracy."""
    for number in range(12):
        write_files(tmp_path / "x" / "a", {f"{number}.jpg": jpeg(16)})
    words = ("data", "verify", tmp_path / "x", "--deep", "--processes", "1", "--val-share", "0.5")
    assert run(*words) == 2
    said = capsys.readouterr().out
    assert "train, val: leakage" in said


def test_corrected_labels_move_no_image_between_the_sides(tmp_path: Path) -> None:
    """By absolute names, also of a folder that lies elsewhere now; one offset of a file."""
    names = [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(8)]
    location = write_files(tmp_path / "here" / "photos", names)
    config = DataConfig(train=str(location), val_share=0.25)
    before = {split: _labels(config, split) for split in ("train", "val")}
    cats = {split: [file for file in before[split] if file.startswith("cat")] for split in before}
    other = [cats["train"][0], *cats["val"], *cats["train"][1:]]
    list_csv = tmp_path / "list.csv"
    rows = [
        f"{location}/{other[0]},0,dog",
        f"/elsewhere/photos/{other[1]},,dog",
        f"{location}/{other[2]},0,",
        f"{location}/{other[3]},0,cat",
        f"{location}/{other[4]},9,dog",
    ]
    list_csv.write_text("\n".join(["file,offset,class", *rows]) + "\n")
    config = DataConfig(**(config.model_dump() | {"corrections": str(list_csv)}))
    data = open_datasets(config, World(), lambda *_: None)
    expected = {
        split: {
            file: "dog" if file in other[:2] else name
            for file, name in files.items()
            if file != other[2]
        }
        for split, files in before.items()
    }
    assert {split: _labels(config, split) for split in ("train", "val")} == expected
    assert isinstance(data.train, Index)
    corrected = data.train.corrected, data.val.corrected
    assert [sum(of) for of in zip(*corrected, strict=True)] == [4, 2, 1]
    assert any("1 of its rows" in text for text in data_remarks(config, data))
    for row, code in (
        (f"{location}/{other[0]},0,dgo", "data.corrections-unknown-class"),
        ("/elsewhere/cat/1.png,0,dog", "data.corrections-of-other-images"),
        (f"{location}/{other[0]},x,dog", "data.corrections-unreadable"),
    ):
        list_csv.write_text(f"file,offset,class\n{row}\n")
        with raises(code, path=str(list_csv)):
            open_datasets(config, World(), lambda *_: None)


def _labels(config: DataConfig, split: Literal["train", "val"]) -> dict[str, str]:
    """The class of each file of a split."""
    index = open_split(source_of(config, split), World(), lambda *_: None)
    return {
        index.file_names[int(index.file[n])]: index.class_names(n)[0] for n in range(len(index))
    }
