"""Output of ranks, printed by the launcher."""

import io
import os
import sys

import pytest

from trainyard.launch.output import Printer
from trainyard.launch.ranks import Line


def test_characters_that_stdout_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    Printer(["a"]).line("a", Line(0, "loss → 1"))
    latin.seek(0)
    assert latin.read() == "a/0 | loss ? 1\n"


def test_a_reader_that_is_gone_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        printer = Printer(["a"])
        with pytest.raises(BrokenPipeError):
            printer.line("a", Line(0, "one"))
        printer.line("a", Line(0, "two"))
