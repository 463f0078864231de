"""The picture of a recipe's schedules: which panels it has, what they show, and its file."""

import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from trainyard.commands.recipe_plot import plot_schedule
from trainyard.config import load_recipe
from trainyard.errors import InputError

CHANGING = {
    "run.length": "10 epochs",
    "model.drop_path": "0.2",
    "schedule.drop_path_start": "0.1",
    "schedule.weight_decay_end": "0.5",
    "schedule.image_size": "['4 epochs: 48']",
    "schedule.batch_size": "['6 epochs: 128', '8 epochs: 256']",
}


def drawn(monkeypatch: pytest.MonkeyPatch, file: Path, **changes: str) -> Figure:
    """The figure that is saved of the digits recipe."""
    figures = []
    save = Figure.savefig

    def savefig(self: Figure, path: Path) -> None:
        figures.append(self)
        save(self, path)

    monkeypatch.setattr(Figure, "savefig", savefig)
    plot_schedule(load_recipe("digits", changes), file, name="some name", epoch_samples=1280)
    return figures[0]


def test_everything_that_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = drawn(monkeypatch, tmp_path / "all.png", **CHANGING)
    panels = {panel.get_ylabel().split("\n")[0]: panel for panel in figure.axes}
    assert list(panels) == [
        *("learning rate", "weight decay", "drop path", "image size", "global batch")
    ]
    lines = {
        name: tuple(map(np.asarray, panel.lines[0].get_data())) for name, panel in panels.items()
    }

    def at(name: str, epoch: float) -> float:
        epochs, values = lines[name]
        return float(values[np.searchsorted(epochs, epoch, side="right") - 1])

    # 20 steps to an epoch, then 10 and 5: 2 epochs of warm-up and then 110 steps of a cosine.
    assert [at("learning rate", epoch) for epoch in (0, 1, 2)] == [0, 2e-3, 4e-3]
    assert at("learning rate", 9.999) == pytest.approx(0, abs=1e-5)
    assert [at("drop path", e) for e in (0, 0.99, 9.5)] == pytest.approx([0.1, 0.1, 0.2])
    assert [at("image size", e) for e in (3.97, 4.001, 10)] == [32, 48, 48]
    assert [at("global batch", e) for e in (5.97, 6.001, 7.97, 8.001)] == [64, 128, 128, 256]
    assert (at("weight decay", 0), at("weight decay", 9.999)) == pytest.approx((0.05, 0.5), 1e-3)
    assert all(epochs[-1] == 10 for epochs, _ in lines.values())


def test_what_does_not_change_is_not_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = drawn(monkeypatch, tmp_path / "plain.png", **{"schedule.name": "constant"})
    (panel,) = figure.axes
    assert panel.get_ylabel() == "learning rate"
    assert panel.get_xlabel() == "epoch, taken to be 1,280 samples"
    assert panel.get_title("left") == "some name"
    assert panel.get_title("right") == "24 epochs = 480 steps, adamw, constant from 0.004"


@pytest.mark.parametrize("length", ["1 step", "2 steps", "7 steps"])
def test_a_run_of_few_steps(length: str, tmp_path: Path) -> None:
    config = load_recipe("digits", {"run.length": length})
    plot_schedule(config, tmp_path / "few.png", name="few")
    with Image.open(tmp_path / "few.png") as image:
        assert image.size[0] == 1080


def test_nothing_is_left_behind_in_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # of other tests
    before = matplotlib.rcParams.copy()  # not by item: that would look for a screen
    plot_schedule(load_recipe("digits"), tmp_path / "a.svg", name="digits")
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert matplotlib.rcParams.copy() == before
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.gif4", r"a\.gif4 cannot be drawn \(Format 'gif4' is not supported.*\.png"),
        ("none/a.png", r"none/a\.png cannot be drawn \(No such file or directory\)"),
    ],
)
def test_a_file_that_cannot_be_written(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        plot_schedule(load_recipe("digits"), tmp_path / name, name="digits")
    assert "\n" not in str(caught.value)


def test_an_epoch_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="an epoch of 0 samples"):
        plot_schedule(load_recipe("digits"), tmp_path / "a.png", name="digits", epoch_samples=0)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'trainyard-images\[plot\]'"):
        plot_schedule(load_recipe("digits"), tmp_path / "a.png", name="digits")
