"""What rich writes to a terminal, as a notebook shows it."""

from typing import IO, cast

import pytest
from rich.console import Console
from rich.live import Live

from trainyard.monitor import notebook
from trainyard.monitor.notebook import Screen, notebook_console


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def console(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.delenv("TERM", raising=False)
    file = cast(IO[str], Screen(shown.append))
    return Console(file=file, force_terminal=True, color_system=None, width=60, height=20)


def test_lines_come_one_after_another(console: Console, shown: list[str]) -> None:
    console.print("one\ntwo")
    console.print("three")
    assert shown == ["one\ntwo", "one\ntwo\nthree"]


def test_what_is_live_stays_below_and_is_redrawn(console: Console, shown: list[str]) -> None:
    with Live("0%\nbegun", console=console, auto_refresh=False) as live:
        console.print("a row")
        live.update("50%\nhalf", refresh=True)
        console.print("another row")
        live.update("100%", refresh=True)  # a line less
    assert shown[0] == "0%\nbegun"
    assert shown[-1] == "a row\nanother row\n100%"
    console.print("after it")
    assert shown[-1] == "a row\nanother row\n100%\nafter it"


def test_what_passes_is_gone(console: Console, shown: list[str]) -> None:
    console.print("above")
    with Live("in passing", console=console, auto_refresh=False, transient=True):
        pass
    console.print("below")
    assert shown[-1] == "above\nbelow"


def test_colours_pass_through(shown: list[str]) -> None:
    file = cast(IO[str], Screen(shown.append))
    Console(file=file, force_terminal=True, color_system="standard").print("[red]no[/red]")
    assert shown == ["\x1b[31mno\x1b[0m"]


def test_redrawing_is_seldom_and_its_end_is_never_missed(
    console: Console, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "_REDRAW_S", 3600)
    with Live("0", console=console, auto_refresh=False) as live:
        for number in range(1, 100):
            live.update(str(number), refresh=True)
    assert len(shown) < 5
    assert shown[-1] == "99"


def test_there_is_none_outside_of_a_notebook() -> None:
    assert notebook_console() is None
