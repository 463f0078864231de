"""Output of ranks, printed by the launcher."""

import io
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
