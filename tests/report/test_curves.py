from pathlib import Path

import numpy as np
import pytest

from tests.report.histories import train_report, write_run
from trainyard.report.curves import (
    Points,
    axes_of,
    curve_of,
    extremes,
    interval_means,
    smoothed,
)
from trainyard.report.runs import Group, groups_of, read_runs

pytestmark = pytest.mark.slow

RANDOM = np.random.default_rng(0)


def noise(count: int) -> Points:
    return Points(np.arange(count, dtype=float), RANDOM.standard_normal(count))


def test_few_points_keep_the_extremes_of_every_interval() -> None:
    points = noise(30_000)
    few = extremes(points, 1000)
    assert len(few.steps) <= 1000
    assert (np.diff(few.steps) > 0).all()
    assert few.steps[0] == 0
    assert few.steps[-1] == 29_999
    for low, high in ((0, 10_000), (10_000, 20_000), (20_000, 30_000)):
        inside = points.values[low:high]
        kept = few.values[(few.steps >= low) & (few.steps < high)]
        assert kept.min() == inside.min()
        assert kept.max() == inside.max()


def test_extremes_are_points_of_the_curve_and_few_points_stay() -> None:
    points = noise(5000)
    few = extremes(points, 300)
    assert (points.values[few.steps.astype(int)] == few.values).all()
    assert extremes(points, 5000) is points


def test_smoothing_is_a_mean_over_a_symmetric_window() -> None:
    """As that of charts.js, which test_browser.py compares with the same loop."""
    steps = np.sort(RANDOM.choice(5000, 300, replace=False)).astype(float)
    values = RANDOM.standard_normal(300)
    found = smoothed(Points(steps, values), 0.05).values
    for n, step in enumerate(steps):
        half = min(0.025 * np.ptp(steps), step - steps[0], steps[-1] - step)
        assert found[n] == pytest.approx(values[np.abs(steps - step) <= half + 1e-9].mean())


def test_interval_means_keep_the_mean() -> None:
    points = noise(10_000)
    means = interval_means(points, 500)
    assert len(means.steps) == 500
    assert means.values.mean() == pytest.approx(points.values.mean())


@pytest.fixture
def seeds(tmp_path: Path) -> Group:
    """Three runs to step 39, 38 and 37, from step 1, 2 and 3, that differ in the seed alone."""
    folders = [
        write_run(
            tmp_path / str(seed),
            [train_report(n, loss=float(seed + n % 3)) for n in range(1 + seed, 40 - seed)],
            seed=seed,
        )
        for seed in range(3)
    ]
    (group,) = groups_of(read_runs(folders))
    return group


@pytest.mark.quick
def test_several_seeds_are_a_mean_and_two_standard_deviations(seeds: Group) -> None:
    curve = curve_of(seeds, "train.loss", 1000)
    assert curve is not None
    assert curve.band is not None
    steps = np.arange(3, 38)  # where all of them are
    assert (curve.drawn.steps == steps).all()
    values = np.stack([seed + steps % 3 for seed in range(3)])
    assert curve.drawn.values == pytest.approx(values.mean(0))
    assert curve.band[0] == pytest.approx(values.mean(0) - 2 * values.std(0, ddof=1))
    assert curve.band[1] == pytest.approx(values.mean(0) + 2 * values.std(0, ddof=1))


def test_a_key_that_no_report_has_is_no_curve(seeds: Group) -> None:
    assert curve_of(seeds, "train.mfu", 1000) is None
    assert curve_of(seeds, "val.loss", 1000) is None


def test_axes_have_the_seconds_and_epochs_of_steps(seeds: Group) -> None:
    axes = axes_of(seeds)
    assert (axes.steps == np.arange(1, 40)).all()
    assert axes.seconds[9] == pytest.approx(5.0)
    assert axes.epochs[9] == pytest.approx(1.0)
