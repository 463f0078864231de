"""Output of ranks, printed by the launcher."""

import io
import sys

import pytest

from trainyard.launch.output import Printer


def test_characters_that_stdout_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    Printer(["a"]).line("a", "loss → 1", is_error=False)
    latin.seek(0)
    assert latin.read() == "a | loss ? 1\n"
