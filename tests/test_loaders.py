"""Copies of a loader process, which tests take, beside real starts."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import loaders
from tests.spawn import spawn
from trainyard.children import SAFE_PATH
from trainyard.data.loader.loader import LoaderProcess
from trainyard.errors import LoaderError
from trainyard.world import World

COMMAND = (sys.executable, *SAFE_PATH, "-m", "tests.data.probe")


def facts(is_real: bool) -> dict[str, Any]:
    """What a loader process finds, and how it ends when it is killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders.REAL, "is_wanted", is_real)
        process = LoaderProcess(COMMAND, {}, batch=2, image_size=8, channels=3, threads=1)
    with process:
        found = process._exchange()
        assert found["parent"] == os.getpid()
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(LoaderError) as error:
            process._exchange()
    return found | {"end": error.value.fields, "code": process._process.returncode}


def test_a_copy_finds_what_a_loader_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINYARD_TEST", "a value")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, filter(None, sys.path))))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setattr(loaders, "_hosts", {})
    found = facts(is_real=False)
    assert found == facts(is_real=True)
    assert (found["folder"], found["variables"]["TRAINYARD_TEST"]) == (str(tmp_path), "a value")
    monkeypatch.setenv("LC_ALL", "C")  # counts before the first line of code: no copy has it
    assert facts(is_real=False)["variables"]["LC_ALL"] == "C"
    for _, host in loaders._hosts.values():
        host.close()


def both(_: World) -> list[dict[str, Any]]:
    loaders.install_in_fork()
    copied = facts(is_real=False)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    real = facts(is_real=True)  # started in any folder, it finds the tests by this alone
    for one in (copied, real):
        one["variables"].pop("PYTHONPATH", None)
    return [copied, real]


def test_so_does_the_copy_of_a_rank() -> None:
    ((copied, real),) = spawn(both, 1)
    assert copied.pop("loader") and not real.pop("loader")
    assert copied == real
