"""The head of a run: what it prints, logs and reports before its first step."""

import json
import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.report.histories import write_run
from trainyard.config import load_recipe
from trainyard.course import build_course
from trainyard.data.open_datasets import Datasets
from trainyard.monitor.console import ConsoleSink
from trainyard.monitor.terminal import EscapingConsole
from trainyard.report.page import page
from trainyard.report.runs import read_runs
from trainyard.run.build import build_run_course
from trainyard.run.pretrained import InitialWeights
from trainyard.run.summary import run_summary
from trainyard.run.trainer import Trainer
from trainyard.world import World

CPU, SCRATCH = torch.device("cpu"), InitialWeights()
PLACES = {"data.train": "photos", "data.val_share": "0.1", "run.length": "20 epochs"}


class Samples(list[int]):
    classes = ("ant", "bee", "cow", "dog", "eel")
    has_names = False


def events(
    *, train: int = 900, val: int = 100, begun: InitialWeights = SCRATCH, step: int = 0, **keys: str
) -> list[dict[str, Any]]:
    config = load_recipe("photos", PLACES | {k.replace("__", "."): v for k, v in keys.items()})
    data = SimpleNamespace(train=Samples(range(train)), val=Samples(range(val)))
    model = nn.Linear(1000, 2000)
    model.bias.requires_grad_(False)
    return [
        *run_summary(
            config,
            cast(Datasets, data),
            build_run_course(config, train),
            model=model,
            initial=begun,
            world=World(rank=0, size=3, num_nodes=2),
            device=CPU,
            step=step,
        )
    ]


def rows(**more: Any) -> dict[str, str]:
    found: dict[str, str] = events(**more)[0]["rows"]
    return found


def remarks(**more: Any) -> list[str]:
    first, *rest = events(**more)
    assert first["event"] == "head"
    assert {(e["event"], e["level"]) for e in rest} <= {("remark", "warning")}
    return [e["message"] for e in rest]


def test_what_a_run_trains_on_what_and_how_long() -> None:
    found = rows()
    assert re.fullmatch(r"CPU, \d+ cores?; 3 ranks on 2 nodes; fp32", found.pop("device"))
    assert found == {
        "model": "resnet18, 2.002 M parameters, 2,000 of them frozen, from scratch",
        "images": "160 x 160 (evaluated at 192 x 192), RGB; mean 0.485 0.456 0.406, "
        "std 0.229 0.224 0.225, bicubic, crop 0.95",
        "classes": "5: ant, bee, cow, \N{HORIZONTAL ELLIPSIS} eel",
        "train": "900 images: photos",
        "validate": "100 images: data.val_share = 0.1 of photos",
        "batch": "64 images, 21.33 on each rank",
        "length": "20 epochs (282 steps, the first 71 of warm-up)",
    }
    assert remarks() == []


def test_stages_several_locations_and_a_run_that_goes_on() -> None:
    places = {"data__train": '["a", "b", "c"]', "data__val": "d/val"}
    stages = {"schedule__batch_size": "10 epochs: 128", "schedule__image_size": "50%: [192, 128]"}
    found = rows(step=1234, data__channels="1", augment__color_jitter="[]", **places, **stages)
    assert found["train"] == "900 images: a and 2 others"
    assert found["validate"] == "100 images: d/val"
    assert found["batch"] == "64, later 128 images, 21.33 on each rank"
    assert found["images"].startswith(
        "160 x 160, 192 x 128 (evaluated at 192 x 192), grey; mean 0.449, std 0.226,"
    )
    assert found["goes on"] == "after step 1,234 of 212"


def test_another_size_of_evaluation_is_told() -> None:
    for size, shown in (("[192, 128]", " (evaluated at 192 x 128)"), ("160", "")):
        assert rows(data__eval_size=size)["images"].startswith(f"160 x 160{shown}, RGB; mean ")


def test_a_fold_takes_the_place_of_a_share() -> None:
    found = rows(data__val_fold="2/5")["validate"]
    assert found == "100 images: data.val_fold = 2/5 of photos"


def test_weights_and_their_pixels() -> None:
    pixels = {"mean": (0.485, 0.456, 0.406), "std": [0.229, 0.224, 0.225]}
    begun = InitialWeights("timm's a.b", log=["began with all"], pixels=pixels)
    assert rows(begun=begun)["model"].endswith("frozen, from timm's a.b")
    assert rows(begun=begun)["images"].endswith("crop 0.95, as the weights had them")
    assert remarks(begun=begun) == []
    other = InitialWeights(
        "timm's a.b", log=["began with all"], pixels=pixels | {"mean": (0.5,) * 3}
    )
    assert rows(begun=other)["images"].endswith("crop 0.95")
    (remark,) = remarks(begun=other)
    assert "data.mean = [0.5, 0.5, 0.5]" in remark


@pytest.mark.parametrize(
    ("keys", "figures"),
    [
        (
            {"batch__size": "3600", "run__length": "40 epochs", "schedule__warmup": "0 steps"},
            [{"3,600", "4", "900"}],
        ),
        ({"run__length": "5 epochs"}, [{"71"}]),
        ({"run__length": "1 step", "schedule__warmup": "0 steps"}, [{"1"}]),
        ({"val": 25}, [{"25", "50%", "20"}]),
        ({"data__val_share": "0.2", "data__val": "photos/test"}, [{"0.1"}, {"0.2"}]),
    ],
    ids=["batch", "warm-up", "steps", "validation", "test images"],
)
def test_what_is_amiss(keys: dict[str, Any], figures: list[set[str]]) -> None:
    """Each trained to the end without a word."""
    found = [set(re.findall(r"[\d.,]*\d%?", remark)) for remark in remarks(**keys)]
    assert len(found) == len(figures)
    assert all(wanted <= numbers for wanted, numbers in zip(figures, found, strict=True))


def test_what_is_left_out_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was on the terminal alone, not in the log."""
    line = "photos: left out: empty (a.png)"
    monkeypatch.setattr("trainyard.run.summary.what_is_left_out", lambda _: [line])
    assert remarks() == [line]


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_longer_than_the_terminal(columns: int) -> None:
    place = "/a/long/path/to/photographs/of/animals" * 3 + "\x1b[2J"
    target = EscapingConsole(file=StringIO(), width=columns)
    sink = ConsoleSink(build_course("9 steps", epoch_samples=9, batch=3, image_size=8), 5, target)
    when = {"step": 0, "epoch": 0.0, "samples": 0, "time": 0.0}
    sink.write(events(data__train=place)[0] | when)
    text = cast(StringIO, target.file).getvalue()
    assert max(map(len, text.splitlines())) <= columns
    assert re.search(r"^train +900 images:", text, re.MULTILINE)
    assert "\x1b" not in text


def test_the_first_line_of_the_log(finished: Path) -> None:
    first, second, *_ = map(json.loads, (finished / "metrics.jsonl").read_text().splitlines())
    assert (first["event"], first["step"]) == ("head", 0)
    assert re.fullmatch(r"1,433 images: .*/train", first["rows"]["train"])
    assert second["event"] == "remark"


def test_the_report_has_the_latest_head_and_the_remarks(tmp_path: Path) -> None:
    when = {"epoch": 0.0, "samples": 0, "time": 0.0}
    heads = [events(val=9, step=step) for step in (0, 7)]
    reports = [e | when | {"step": 7 * n} for n, found in enumerate(heads) for e in found]
    text = page(read_runs([write_run(tmp_path / "run", reports)]))
    overview, events_of = text.split('id="overview"')[1], text.split('id="events"')[1]
    assert "after step 7 of 282" in overview.split('id="events"')[0]
    assert overview.split('id="events"')[0].count("9 validation images") == 1
    assert "resnet18, 282 steps" not in events_of


def test_other_ranks_print_none() -> None:
    """With --all-ranks each rank has a console."""
    on_other = SimpleNamespace(world=World(rank=1, size=2), report=pytest.fail)
    Trainer._report_head(on_other)  # type: ignore[arg-type]


def test_quiet_is_quiet() -> None:
    target = Console(file=StringIO(), quiet=True)
    sink = ConsoleSink(build_course("9 steps", epoch_samples=9, batch=3, image_size=8), 5, target)
    sink.write(events()[0] | {"step": 0, "epoch": 0.0})
    assert cast(StringIO, target.file).getvalue() == ""
