import numpy as np
import pytest

from tests.report.histories import train_report, write_run
from trainyard.report.curves import (
    Points,
    axes_of,
    curve_of,
    lowest_and_highest,
    smoothed,
    stretches,
)
from trainyard.report.groups import Group, groups_of
from trainyard.report.runs import Run, read_runs
from trainyard.report.ticks import duration, log_ticks, short, ticks, value_text

RANDOM = np.random.default_rng(0)


def noise(count: int) -> Points:
    return Points(np.arange(count, dtype=float), RANDOM.standard_normal(count))


def test_few_points_keep_the_extremes_of_every_stretch() -> None:
    points = noise(30_000)
    few = lowest_and_highest(points, 1000)
    assert len(few.steps) <= 1000
    assert (np.diff(few.steps) > 0).all()
    assert few.steps[0] == 0
    assert few.steps[-1] == 29_999
    for low, high in ((0, 10_000), (10_000, 20_000), (20_000, 30_000)):
        inside = points.values[low:high]
        kept = few.values[(few.steps >= low) & (few.steps < high)]
        assert kept.min() == inside.min()
        assert kept.max() == inside.max()


def test_what_is_drawn_are_reports_and_few_stay_as_they_are() -> None:
    points = noise(5000)
    few = lowest_and_highest(points, 300)
    assert (points.values[few.steps.astype(int)] == few.values).all()
    assert lowest_and_highest(points, 5000) is points


def test_stretches_have_the_mean_of_all() -> None:
    points = noise(10_000)
    means = stretches(points, 500)
    assert len(means.steps) == 500
    assert means.values.mean() == pytest.approx(points.values.mean())


def test_smoothing_is_a_mean_over_a_window_that_is_alike_on_both_sides() -> None:
    steps = np.sort(RANDOM.choice(1000, 80, replace=False)).astype(float)
    values = RANDOM.standard_normal(80)
    found = smoothed(Points(steps, values), 0.2)
    for n, step in enumerate(steps):
        half = min(0.1 * (steps[-1] - steps[0]), step - steps[0], steps[-1] - step)
        near = values[np.abs(steps - step) <= half + 1e-9]
        assert found[n] == pytest.approx(near.mean())
    straight = 3 * steps + 1  # is not moved, not at the ends either, by even steps
    even = np.arange(100, dtype=float)
    assert smoothed(Points(even, even), 0.3) == pytest.approx(even)
    assert (smoothed(Points(steps, straight), 0) == straight).all()


def seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Group, list[Run]]:
    parent = tmp_path_factory.mktemp("seeds")
    folders = [
        write_run(
            parent / str(seed),
            [train_report(n, loss=float(seed + n % 3)) for n in range(1, 40 - seed)],
            seed=seed,
        )
        for seed in range(3)
    ]
    runs = read_runs(folders)
    (group,) = groups_of(runs)
    return group, runs


def test_several_seeds_are_a_mean_and_two_standard_deviations(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    group, _ = seeds(tmp_path_factory)
    curve = curve_of(group, lambda run: run.history.train, "loss", 1000)
    assert curve is not None
    assert curve.band is not None
    steps = np.arange(1, 38)  # as far as all of them are
    assert (curve.drawn.steps == steps).all()
    values = np.stack([seed + steps % 3 for seed in range(3)])
    assert curve.drawn.values == pytest.approx(values.mean(0))
    assert curve.band[0] == pytest.approx(values.mean(0) - 2 * values.std(0, ddof=1))
    assert curve.band[1] == pytest.approx(values.mean(0) + 2 * values.std(0, ddof=1))


def test_a_key_that_no_report_has_is_no_curve(tmp_path_factory: pytest.TempPathFactory) -> None:
    group, _ = seeds(tmp_path_factory)
    assert curve_of(group, lambda run: run.history.train, "mfu", 1000) is None
    assert curve_of(group, lambda run: run.history.val, "loss", 1000) is None


def test_axes_say_how_far_a_run_was(tmp_path_factory: pytest.TempPathFactory) -> None:
    group, _ = seeds(tmp_path_factory)
    axes = axes_of(group)
    assert (axes.steps == np.arange(1, 40)).all()
    assert axes.seconds[9] == pytest.approx(5.0)
    assert axes.epochs[9] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 538, [0, 100, 200, 300, 400, 500]),
        (0.1, 0.98, [0.2, 0.4, 0.6, 0.8]),
        (0, 7, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, 2, [2]),
    ],
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(wanted)


def test_logarithmic_ticks() -> None:
    assert log_ticks(0.09, 6) == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5])
    assert log_ticks(1e-6, 10) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10])


def test_figures_are_short() -> None:
    assert [short(v) for v in (0, 1500, 2e4, 1.5e6, 2e-4, 0.25)] == [
        *("0", "1,500", "20k", "1.5M", "2e-4", "0.25"),
    ]
    assert [duration(s) for s in (41, 1428, 52_488, 280_000)] == [
        *("41 s", "23.8 min", "14.6 h", "3 d 6 h"),
    ]
    assert value_text("percent", 0.98345) == "98.34%"
    assert value_text("loss", 0.5) == "0.5000"
