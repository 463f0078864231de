"""What a person sees of a run, on a terminal and in a log file."""

import os
import platform
import re
import time
from contextlib import suppress
from io import BytesIO, StringIO, TextIOWrapper
from typing import Any

import pytest
from rich.console import Console

from trainyard.course import build_course
from trainyard.monitor.console import ConsoleSink, LiveLine, minor_values
from trainyard.monitor.progress import counter
from trainyard.monitor.terminal import EscapingConsole, console_of
from trainyard.printable import duration, epochs_in_all
from trainyard.world import World

COURSE = build_course("100 steps", epoch_samples=1280, batch=32, image_size=32)
WHEN: dict[str, Any] = {"step": 20, "epoch": 0.5, "samples": 640, "time": 65.4}
TRAIN = WHEN | {
    "kind": "train",
    "loss": 2.34567,
    "top1": 0.25,
    "lr": 0.00123,
    "images_per_s": 12345.6,
    "bad": 0,
    "eta": 3723.4,
    "eta_epoch": 65.0,
}
ON_GPUS = TRAIN | {
    "grad_norm": 1.2345,
    "skipped": 0,
    "images_per_s_device": 1543.2,
    "world_size": 8,
    "mfu": 0.4321,
    "data_wait": 0.021,
    "memory": 61.25e9,
    "gpu_use": 0.98,
    "gpu_power": 652.4,
}
VAL = WHEN | {"kind": "val", "top1": 0.98764, "top5": 0.99994, "loss": 0.1234, "bad": 0}
EVENT = WHEN | {"kind": "event", "event": "resumed", "message": "going on from [/a] at step 20"}


@pytest.fixture(autouse=True)
def _with_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def console(*, terminal: bool) -> Console:
    return Console(file=StringIO(), force_terminal=terminal, width=120)


def seen(console: Console) -> str:
    """All that was written, without colours and cursor movements."""
    assert isinstance(console.file, StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def written(*reports: dict[str, Any], terminal: bool) -> str:
    target = console(terminal=terminal)
    sink = ConsoleSink(COURSE, 1000, target)
    for report in reports:
        sink.write(report)
    sink.close()
    return seen(target)


# --- on a terminal ---


def shown(*reports: dict[str, Any], width: int, encoding: str = "utf-8") -> list[str]:
    """The live lines on a terminal of so many columns."""
    file = TextIOWrapper(BytesIO(), encoding, write_through=True)
    target = Console(file=file, force_terminal=True, width=width)
    live = LiveLine(target, 100, "2.5")
    for report in reports:
        live.show(report)
    with target.capture() as capture:
        target.print(live)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capture.get())
    empty, *lines = (line.rstrip() for line in text.splitlines())
    assert empty == ""
    return lines


@pytest.mark.parametrize("width", [120, 80, 40, 20, 5])
def test_no_line_wraps(width: int) -> None:
    lines = shown(ON_GPUS | {"bad": 1234, "skipped": 2.0}, width=width)
    assert len(lines) == 2
    assert max(map(len, lines)) <= width


def test_what_a_terminal_shows() -> None:
    first, second = shown(ON_GPUS, width=120)
    assert {"0.5/2.5", "20%", "1:02:03", "12,346", "2.3457"} <= set(first.split())
    figures = {"1.23e-03", "2%", "43.2%", "61.2", "1.23", "1,543", "98%", "652"}
    assert figures <= set(second.split())


def test_what_is_wrong_comes_first() -> None:
    _, second = shown(ON_GPUS | {"bad": 1234, "skipped": 2.0}, width=80)
    assert second.split()[:3] == ["1,234", "bad", "2"]


def test_what_is_not_known_is_not_shown() -> None:
    unknown = dict.fromkeys(("mfu", "gpu_use", "gpu_power", "eta", "eta_epoch"))
    first, second = shown(ON_GPUS | unknown | {"world_size": 1}, width=120)
    assert "-:--:--" in first
    assert not any(word in second for word in ("None", "MFU", "GPU", " W"))


def test_a_terminal_without_signs_has_a_bar_of_others() -> None:
    first, _ = shown(ON_GPUS | dict.fromkeys(("gpu_use", "mfu")), width=120, encoding="ascii")
    assert first.isascii()


def test_the_time_left_passes(now: list[float]) -> None:
    target = Console(width=200)
    live = LiveLine(target, 100, "2.5")
    live.show(TRAIN)
    for passed, left in ((0, "1:02:03"), (3, "1:02:00"), (10**6, "0:00:00")):
        now[0] += passed
        with target.capture() as capture:
            target.print(live)
        assert f"{left} left" in capture.get()


def test_long_waits_for_data_stand_out() -> None:
    for share, style in ((0.04, ""), (0.06, "yellow")):
        assert (f"data wait {share:.0%}", style) in minor_values(TRAIN | {"data_wait": share})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-:--:--"),
        (0.4, "0:00:00"),
        (3599.6, "1:00:00"),
        (47.5 * 3600, "47:30:00"),
        (50 * 3600, "2d 2:00"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_epochs_in_all() -> None:
    texts = [epochs_in_all(epochs) for epochs in (300.0, 8.039, 0.8931, 1500.04)]
    assert texts == ["300", "8", "0.89", "1500"]


def test_an_evaluation_is_seen_to_go_on_and_gives_the_numbers_back() -> None:
    target = Console(force_terminal=True, width=120)
    live = LiveLine(target, 100, "2.5")
    drawn = []
    for step in (TRAIN, 0.25, VAL):
        if isinstance(step, float):
            live.show_evaluated(step)
        else:
            live.show(step)
        with target.capture() as capture:
            target.print(live)
        drawn.append(capture.get())
    assert ["evaluating 25%" in text for text in drawn] == [False, True, False]
    assert ["12,346 images/s" in text for text in drawn] == [True, False, True]
    assert all("left" in text for text in drawn)


def test_before_the_first_report() -> None:
    target = console(terminal=True)
    ConsoleSink(COURSE, 1000, target).close()
    assert re.search(r"epoch 0.0/2.5 ━+   0% starting", seen(target))


def test_a_dumb_terminal_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had nothing: no live line, and no others."""
    monkeypatch.setenv("TERM", "dumb")
    assert written(TRAIN, terminal=True).startswith("step 20/100")


def test_a_row_for_each_evaluation_under_one_head() -> None:
    text = written(VAL, TRAIN, VAL | {"step": 40, "epoch": 1.0, "top1": 0.5}, terminal=True)
    assert text.count("val top-1") == 1
    rows = [row for row in re.split(r"[\r\n]+", text) if re.match(r" +(epoch|0\.5|1\.0) ", row)]
    head, first, second = rows
    assert head.split() == ["epoch", "step", "val", "top-1", "top-5", "loss", "time"]
    assert first.split() == ["0.5", "20", "98.76%", "99.99%", "0.1234", "0:01:05"]
    assert second.split()[:3] == ["1.0", "40", "50.00%"]
    assert len(head.rstrip()) == len(first.rstrip()) == len(second.rstrip())  # columns line up


@pytest.mark.parametrize("terminal", [True, False])
def test_a_moving_average_has_a_column_of_its_own(terminal: bool) -> None:
    average = {"ema_top1": 0.5432, "ema_top5": 0.9, "ema_loss": 0.5}
    lines = re.split(r"[\r\n]+", written(VAL | average, VAL | average, terminal=terminal))
    head, first, second = (line.rstrip() for line in lines if re.match(r" +(epoch|0\.5) ", line))
    assert head.split()[:5] == ["epoch", "step", "val", "top-1", "EMA"]
    assert head.split()[5:] == ["top-1", "top-5", "loss", "time"]
    assert first.split() == ["0.5", "20", "98.76%", "54.32%", "99.99%", "0.1234", "0:01:05"]
    assert first == second
    assert len(head) == len(first) <= 80
    assert head.index("EMA top-1") + len("EMA top-1") == first.index("54.32%") + len("54.32%")


def test_bad_images_of_an_evaluation_are_told_once() -> None:
    text = written(*(VAL | {"bad": bad} for bad in (0, 2, 2, 3)), terminal=True)
    assert re.findall(r"(\d) validation images could not", text) == ["2", "3"]


@pytest.mark.parametrize(
    ("width", "classes", "names"),
    [(80, 11, ""), (120, 10, "balanced macro F1"), (120, 11, "balanced macro F1 top-5")],
)
def test_a_narrow_terminal_and_few_classes_have_fewer_columns(
    width: int, classes: int, names: str
) -> None:
    target = Console(file=StringIO(), force_terminal=True, width=width)
    sink = ConsoleSink(COURSE, classes, target)
    average = {"ema_top1": 0.5, "ema_decay": 0.999, "consensus_distance": 0.1, "epoch": 2.53}
    sink.write(VAL | average | {"balanced_accuracy": 0.4, "macro_f1": 0.3})
    sink.close()
    lines = re.split(r"[\r\n]+", seen(target))
    head, row = (line.rstrip() for line in lines if re.match(r" +(epoch|2\.5) ", line))
    among = f"val top-1 EMA top-1 of decay {names} loss distance time"
    assert head.split() == ["epoch", "step", *among.split()]
    assert len(head) == len(row) <= width


def test_a_run_of_a_sweep_shows_what_the_first_has_not_shown() -> None:
    target = console(terminal=False)
    sink = ConsoleSink(COURSE, 10, target, {("device", "CPU"), "few images"})
    sink.write(EVENT | {"event": "head", "rows": {"device": "CPU", "length": "8 epochs"}})
    sink.write(EVENT | {"message": "few images"})
    sink.write(EVENT | {"message": "fewer images"})
    assert seen(target).split() == ["length", "8", "epochs", "fewer", "images"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_message_is_shown_word_for_word(terminal: bool) -> None:
    """Square brackets are rich's markup elsewhere."""
    assert "going on from [/a] at step 20" in written(EVENT, terminal=terminal)


def test_a_warning_stands_out_and_the_live_lines_keep_their_style() -> None:
    target = console(terminal=True)
    sink = ConsoleSink(COURSE, 1000, target)
    sink.write(EVENT | {"level": "warning"})
    sink.close()
    assert isinstance(target.file, StringIO)
    assert "\x1b[33mgoing on" in target.file.getvalue()  # yellow
    assert "\x1b[33mepoch" not in target.file.getvalue()


# --- in a log file ---


def test_a_log_has_plain_lines_with_everything_and_no_bar() -> None:
    target = console(terminal=False)
    sink = ConsoleSink(COURSE, 1000, target)
    for report in (ON_GPUS | {"bad": 3}, VAL):
        sink.write(report)
    sink.close()
    assert isinstance(target.file, StringIO)
    first, *others = target.file.getvalue().splitlines()
    figures = {"20/100", "0.50/2.5", "12,346", "2.3457", "3", "1.23e-03", "2%", "43.2%", "61.2"}
    assert figures | {"1.23", "1,543", "98%", "652", "1:02:03"} <= set(first.split())
    assert len(others) == 2  # the head and the row
    assert not {"\x1b", "━"} & set(target.file.getvalue())


def test_a_log_has_a_line_now_and_then_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    target = console(terminal=False)
    sink = ConsoleSink(COURSE, 1000, target)
    for step in range(1, 101):
        sink.write(TRAIN | {"step": step})
        now[0] += 0.5
    sink.close()
    steps = [int(line.split("/")[0].split()[1]) for line in seen(target).splitlines()]
    assert steps == [1, 21, 41, 61, 81, 100]  # every ten seconds


@pytest.mark.parametrize(
    ("report", "lines"),
    [(TRAIN, 1), (EVENT | {"message": "x" * 100}, 1), (VAL | {"ema_top1": 0.5}, 2)],
)
def test_a_narrow_terminal_breaks_no_line(report: dict[str, Any], lines: int) -> None:
    target = Console(file=StringIO(), width=20)
    ConsoleSink(COURSE, 1000, target).write(report)
    assert seen(target).count("\n") == lines


def test_quiet_is_quiet() -> None:
    target = Console(file=StringIO(), force_terminal=True, quiet=True)
    sink = ConsoleSink(COURSE, 1000, target)
    for report in (TRAIN, VAL, EVENT):
        sink.write(report)
    sink.show_evaluation(1, 2)
    sink.close()
    assert seen(target) == ""


# --- who speaks ---


@pytest.mark.parametrize(
    ("rank", "options", "terminal", "said"),
    [
        (0, {}, None, "hello\n"),
        (1, {}, None, ""),
        (0, {"is_quiet": True}, None, ""),
        (0, {"is_plain": True}, False, "hello\n"),
        (3, {"all_ranks": True}, False, f"[rank 3 {platform.node()}] hello\n"),
        (0, {"all_ranks": True}, False, f"[rank 0 {platform.node()}] hello\n"),
        (3, {"all_ranks": True, "is_quiet": True}, None, ""),
    ],
)
def test_who_speaks(
    rank: int,
    options: dict[str, bool],
    terminal: bool | None,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    target = console_of(World(rank=rank, size=4), **options)
    target.print("[bold]hello[/]")
    if terminal is not None:
        assert target.is_terminal is terminal
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert shown == said


def test_each_line_of_a_rank_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(COURSE, 1000, console_of(World(rank=2, size=4), all_ranks=True))
    sink.write(TRAIN)
    sink.write(VAL)
    sink.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(f"[rank 2 {platform.node()}] ") for line in lines)


def test_a_reader_that_goes_away_ends_nothing() -> None:
    """rich raises SystemExit, which ended a program that trains and is piped into `head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), open(writer, "w", buffering=1) as file:
        target = EscapingConsole(file=file)
        target.print("hello")
        target.print("hello")
        assert target.quiet


# --- long work ---


def test_progress_is_shown_after_two_seconds(now: list[float]) -> None:
    target = console(terminal=True)
    with counter(target, "indexing [/a]", total=1_000_000) as count:
        for passed in (0.1, 1.8):
            now[0] += passed
            count(1)
        assert seen(target) == ""
        for done in (0, 50_000, 100_000):
            now[0] += 1.0
            count(done)
    last = [line for line in re.split(r"[\r\n]", seen(target)) if "100,000" in line][-1]
    assert last.split("━")[0].strip() == "indexing [/a]"
    assert last.split("━")[-1].split() == [
        *("100,000", "of", "1,000,000", "0:00:04", "passed,", "0:00:44", "left")
    ]


def test_files_give_the_time_left(now: list[float]) -> None:
    target = console(terminal=True)
    with counter(target, "indexing") as count:
        for done in (0, 10, 20):
            now[0] += 10
            count(500 * done, (done, 40))
    assert re.search(r"10,000, 20 of 40 files 0:00:30 passed, 0:00:20 left", seen(target))


def test_a_narrow_terminal_cuts_off_the_name(now: list[float]) -> None:
    target = Console(file=StringIO(), force_terminal=True, width=80)
    with counter(target, "x" * 200, total=1_000_000) as count:
        for done in (0, 500_000):
            now[0] += 10
            count(done)
    assert max(map(len, re.split(r"[\r\n]", seen(target)))) <= 80
    assert "500,000 of 1,000,000" in seen(target)


@pytest.mark.parametrize("terminal", [True, False])
def test_without_a_terminal_or_for_short_work_there_is_none(
    terminal: bool, now: list[float]
) -> None:
    target = console(terminal=terminal)
    with counter(target, "indexing") as count:
        now[0] += 1.0 if terminal else 100.0
        count(1_000)
    assert seen(target) == ""


def test_the_epoch_does_not_exceed_its_end() -> None:
    """Steps are whole, so the last one may go a little beyond the last epoch."""
    file = StringIO()
    sink = ConsoleSink(COURSE, 1000, Console(file=file, width=200))
    sink.write({**TRAIN, "step": 100, "epoch": 2.53})
    assert "epoch 2.50/2.5 " in file.getvalue()
