"""What a command loads, and says, before its work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import Capture, run
from trainyard.commands import train

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
import trainyard.run.train
print([name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))])
import torch._dynamo.utils, torch
roi_align = sys.modules["torchvision.ops.roi_align"]
assert torch._dynamo.utils.counters is not None
assert roi_align.is_compile_supported("cpu") == torch._dynamo.utils.is_compile_supported("cpu")
assert torch.compiler.disable.__module__ == "torch.compiler"
"""


def test_torchs_compiler_is_not_imported_by_a_start() -> None:
    """It takes a third of the time; what stood for it is gone afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("options", "line"), [((), "loading torch"), (("--quiet",), "")])
def test_a_terminal_shows_a_line_before_torch_is_loaded(
    options: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def heard(_: object) -> None:
        assert line in capsys.readouterr().err
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "config_of", heard)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run("train", "digits", *options) == 130
