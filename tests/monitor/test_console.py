"""What a person sees of a run, on a terminal and in a log file."""

import re
import time
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from trainyard.monitor.console import ConsoleSink
from trainyard.monitor.progress import counter

WHEN: dict[str, Any] = {"step": 20, "epoch": 0.5, "samples": 640, "time": 65.4}
TRAIN = WHEN | {
    "kind": "train",
    "loss": 2.34567,
    "top1": 0.25,
    "lr": 0.00123,
    "images_per_s": 12345.6,
    "bad": 0,
}
VAL = WHEN | {"kind": "val", "top1": 0.98764, "top5": 0.99994, "loss": 0.1234, "bad": 0}
EVENT = WHEN | {"kind": "event", "event": "resumed", "message": "going on from [/a] at step 20"}


def console(*, terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=120)


def seen(console: Console) -> str:
    """All that was written, without colours and cursor movements."""
    assert isinstance(console.file, StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def written(*reports: dict[str, Any], terminal: bool) -> str:
    target = console(terminal=terminal)
    sink = ConsoleSink(100, target)
    for report in reports:
        sink.write(report)
    sink.close()
    return seen(target)


def last_drawn(text: str) -> str:
    """The bar as it was drawn last."""
    return [line for line in re.split(r"[\r\n]+", text) if line.startswith("epoch")][-1]


# --- on a terminal ---


def test_steps_of_before_a_resumption_are_not_speed() -> None:
    now = 0.0  # seconds
    sink = ConsoleSink(100, Console(file=StringIO(), force_terminal=True, width=120))
    sink._bar.get_time = lambda: now
    sink.write(EVENT | {"step": 1})  # the bar has been there for a while
    now = 1.0
    sink.write(EVENT)
    for step in (21, 22, 23):
        now += 1
        sink.write(TRAIN | {"step": step})
    sink.close()
    assert sink._bar.tasks[0].speed == pytest.approx(1.0, rel=0.5)  # steps per second


def test_the_bar_has_all_one_wants_to_know() -> None:
    bar = last_drawn(written(TRAIN, terminal=True))
    assert bar.startswith("epoch 0.5 ")
    assert "━" in bar
    assert "20%" in bar
    assert "12,346 images/s  loss 2.3457  lr 1.23e-03" in bar
    assert re.search(r"(-:--:--|\d:\d\d:\d\d)$", bar.strip())  # the time left
    assert "bad" not in bar


def test_bad_samples_are_counted_on_the_bar() -> None:
    assert "lr 1.23e-03  3 bad" in last_drawn(written(TRAIN | {"bad": 3}, terminal=True))


def test_the_bar_is_full_at_the_end() -> None:
    assert "100%" in last_drawn(written(TRAIN | {"step": 100}, terminal=True))


@pytest.mark.parametrize("is_over", [False, True])
def test_an_evaluation_is_seen_to_go_on_and_gives_the_numbers_back(is_over: bool) -> None:
    target = console(terminal=True)
    sink = ConsoleSink(100, target)
    sink.write(TRAIN)
    sink.show_evaluation(25, 100)
    if is_over:
        sink.write(VAL)
    sink.close()
    bar = last_drawn(seen(target))
    assert ("evaluating 25%" in bar) != is_over
    assert ("12,346 images/s" in bar) == is_over


def test_a_row_for_each_evaluation_under_one_head() -> None:
    text = written(VAL, TRAIN, VAL | {"step": 40, "epoch": 1.0, "top1": 0.5}, terminal=True)
    assert text.count("val top-1") == 1
    rows = [row for row in re.split(r"[\r\n]+", text) if re.match(r" +(epoch|0\.5|1\.0) ", row)]
    head, first, second = rows
    assert head.split() == ["epoch", "step", "val", "top-1", "top-5", "loss", "time"]
    assert first.split() == ["0.5", "20", "98.76%", "99.99%", "0.1234", "0:01:05"]
    assert second.split()[:3] == ["1.0", "40", "50.00%"]
    assert len(head.rstrip()) == len(first.rstrip()) == len(second.rstrip())  # columns line up


def test_the_distance_of_replicas_has_a_column_of_its_own() -> None:
    head, row = written(VAL | {"consensus_distance": 0.012345}, terminal=False).splitlines()
    assert head.split()[-3:] == ["loss", "distance", "time"]
    assert row.split()[-3:] == ["0.1234", "0.0123", "0:01:05"]
    assert len(head.rstrip()) == len(row.rstrip())


@pytest.mark.parametrize("terminal", [True, False])
def test_a_moving_average_has_a_column_of_its_own(terminal: bool) -> None:
    average = {"ema_top1": 0.5432, "ema_top5": 0.9, "ema_loss": 0.5}
    lines = re.split(r"[\r\n]+", written(VAL | average, VAL | average, terminal=terminal))
    head, first, second = (line.rstrip() for line in lines if re.match(r" +(epoch|0\.5) ", line))
    assert head.split() == [
        "epoch",
        "step",
        "val",
        "top-1",
        "EMA",
        "top-1",
        "top-5",
        "loss",
        "time",
    ]
    assert first.split() == ["0.5", "20", "98.76%", "54.32%", "99.99%", "0.1234", "0:01:05"]
    assert first == second
    assert len(head) == len(first) <= 80
    assert head.index("EMA top-1") + len("EMA top-1") == first.index("54.32%") + len("54.32%")


def test_a_narrow_terminal_breaks_no_row() -> None:
    target = Console(file=StringIO(), width=20)
    ConsoleSink(100, target).write(VAL | {"ema_top1": 0.5})
    assert seen(target).count("\n") == 2


def test_bad_images_of_an_evaluation_are_counted() -> None:
    assert "0:01:05   2 could not be read" in written(VAL | {"bad": 2}, terminal=True)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_message_is_shown_word_for_word(terminal: bool) -> None:
    """Square brackets are rich's markup elsewhere."""
    assert "going on from [/a] at step 20" in written(EVENT, terminal=terminal)


def test_a_warning_stands_out() -> None:
    target = console(terminal=True)
    sink = ConsoleSink(100, target)
    sink.write(EVENT | {"level": "warning"})
    sink.close()
    assert isinstance(target.file, StringIO)
    assert "\x1b[33mgoing on" in target.file.getvalue()  # yellow


# --- in a log file ---


def test_a_log_has_plain_lines_and_no_bar() -> None:
    target = console(terminal=False)
    sink = ConsoleSink(100, target)
    sink.write(TRAIN)
    sink.write(VAL)
    sink.close()
    assert isinstance(target.file, StringIO)
    text = target.file.getvalue()
    assert text.splitlines()[0] == (
        "step 20/100  epoch 0.50  12,346 images/s  loss 2.3457  lr 1.23e-03"
    )
    assert text.count("\n") == 3  # the line, the head, the row
    assert "\x1b" not in text
    assert "━" not in text


def test_a_log_has_a_line_now_and_then_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    target = console(terminal=False)
    sink = ConsoleSink(100, target)
    for step in range(1, 101):
        sink.write(TRAIN | {"step": step})
        now[0] += 0.5
    sink.close()
    steps = [int(line.split("/")[0].split()[1]) for line in seen(target).splitlines()]
    assert steps == [1, 21, 41, 61, 81, 100]  # every ten seconds


def test_bad_samples_are_counted_in_a_log() -> None:
    assert written(TRAIN | {"bad": 3}, terminal=False).endswith("lr 1.23e-03  3 bad\n")


def test_a_long_line_is_one_line() -> None:
    target = Console(file=StringIO(), width=20)
    ConsoleSink(100, target).write(TRAIN)
    ConsoleSink(100, target).write(EVENT | {"message": "x" * 100})
    assert seen(target).count("\n") == 2


def test_quiet_is_quiet() -> None:
    target = Console(file=StringIO(), force_terminal=True, quiet=True)
    sink = ConsoleSink(100, target)
    for report in (TRAIN, VAL, EVENT):
        sink.write(report)
    sink.show_evaluation(1, 2)
    sink.close()
    assert seen(target) == ""


# --- counting ---


def test_a_count_that_takes_long_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    target = console(terminal=True)
    with counter(target, "indexing [/a]", total=1_000_000) as count:
        now[0] += 1.9
        count(1)
        assert "indexing" not in seen(target)
        now[0] += 2.1
        count(100_000)
    assert "indexing [/a]: 100,000 (25,000 a second) of 1,000,000, 0:00:36 left" in seen(target)


def test_a_count_that_is_over_soon_is_not_shown() -> None:
    target = console(terminal=True)
    with counter(target, "indexing") as count:
        count(1_000)
    assert seen(target).strip() == ""
