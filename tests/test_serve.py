"""examples/serve.py: photographs over HTTP."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from trainyard.classifier import load

EXAMPLE = Path(__file__).parent.parent / "examples" / "serve.py"


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a server for a run."""
    command = [sys.executable, str(EXAMPLE), str(run), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
def test_guesses_are_those_of_the_run(finished: Path, digits: Path) -> None:
    photograph = next((digits / "val").glob("*/*"))
    with served(finished) as address:
        assert address.startswith("http://127.0.0.1:")
        found = json.load(urlopen(address, photograph.read_bytes()))
        for content in (b"no image", b""):
            with pytest.raises(HTTPError) as caught:
                urlopen(address, content)
            assert caught.value.code == 400
            assert "error" in json.load(caught.value)
    (expected,) = load(finished).predict(photograph)
    assert [guess["name"] for guess in found] == [guess.name for guess in expected]
    assert found[0]["probability"] == pytest.approx(expected[0].probability)
