import errno
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, complaint, run, shown
from tests.report.histories import train_report, write_run
from trainyard.errors import DiskError


def test_the_report_lies_in_the_run_directory(copied: Path, capsys: Capture) -> None:
    said = shown(capsys, "report", copied)
    assert said.startswith(f"{copied / 'report.html'} (")
    assert (copied / "report.html").read_text().startswith("<!doctype html>")


def test_of_several_runs_it_lies_here(
    trained: list[Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert json.loads(shown(capsys, "report", *trained, "--json")) == {
        "report": "report.html",
        "bytes": (tmp_path / "report.html").stat().st_size,
        "runs": [str(folder) for folder in trained],
    }


def test_another_file(copied: Path, tmp_path: Path, capsys: Capture) -> None:
    (copied / "report.html").unlink()  # that of the end of training
    shown(capsys, "report", copied, "--out", tmp_path / "of mine.html")
    assert (tmp_path / "of mine.html").exists()
    assert not (copied / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere"], "/nowhere: no run directory"),
        (["RUN", "--out", "report.pdf"], "--out report.pdf: name a file that ends in .html"),
        (["RUN", "--out", "/nowhere/report.html"], "/nowhere/report.html: cannot be written"),
        (["RUN", "RUN"], "given twice"),
        (["RUN", "--port", "1"], "--port is for --watch"),
        (["RUN", "--watch", "--json"], "--watch writes no file"),
        (["RUN", "--watch", "--port", "99999"], "--port 99999"),
        (["RUN", "--optim.lr", "1"], "report takes no recipe keys"),
    ],
)
def test_mistakes_are_named(
    words: list[str], message: str, trained: list[Path], capsys: Capture
) -> None:
    filled = [str(trained[0]) if word == "RUN" else word for word in words]
    assert message in complaint(capsys, "report", *filled)


def test_help_names_the_options(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        run("report", "--help")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(option in said for option in ("--out", "--watch", "--port", "--json"))


def test_a_report_needs_no_torch(copied: Path) -> None:
    code = (
        "import sys; from trainyard.command_line import main; "
        f"main(['report', {str(copied)!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- watching ---


@contextmanager
def watching(folder: Path) -> Iterator[tuple[int, "subprocess.Popen[str]"]]:
    """The port at which a run is served, and the process."""
    command = [sys.executable, "-m", "trainyard", "report", str(folder), "--watch", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.match(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
            assert found
            yield int(found[1]), process
        finally:
            process.kill()


def answer(port: int, path: str = "/", **headers: str) -> tuple[int, str | None, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    found = connection.getresponse()
    body = found.read().decode()
    connection.close()
    return found.status, found.getheader("ETag"), body


def test_a_run_is_watched(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_report(1)])
    with watching(folder) as (port, process):
        status, tag, body = answer(port)
        assert status == 200
        assert tag
        assert "connect-src &#x27;self&#x27;" in body
        assert answer(port, **{"If-None-Match": tag}) == (304, None, "")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(train_report(77)) + "\n")
        status, newer, body = answer(port, **{"If-None-Match": tag})
        assert status == 200
        assert newer != tag
        assert "77 steps" in body
        assert answer(port, "/etc/passwd")[0] == 404
        assert answer(port, "/metrics.jsonl")[0] == 404
        assert answer(port, Host="elsewhere.example:80")[0] == 403
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert not (folder / "report.html").exists()


def test_a_file_that_is_being_replaced_is_waited_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_report(1)])
    with watching(folder) as (port, _):
        whole = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text("nonsense\n")
        assert answer(port)[0] == 503
        (folder / "metrics.jsonl").write_text(whole)
        assert answer(port)[0] == 200


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: Capture) -> None:
    folder = write_run(tmp_path / "run", [train_report(1)])
    with watching(folder) as (port, _):
        message = complaint(capsys, "report", folder, "--watch", "--port", port)
        assert f"--port {port}" in message


def _bug(folders: object) -> Path:
    raise KeyError("top1")


def _full(folders: object) -> Path:
    raise DiskError(errno.ENOSPC, "No space left on device", "report.html")


@pytest.mark.parametrize("write_report", [_bug, _full])
def test_a_finished_run_without_its_report_is_a_finished_run(
    write_report: Callable[[object], Path],
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """A bug in the report was a traceback and exit code 1, after days of training."""
    monkeypatch.setattr("trainyard.report.page.write_report", write_report)
    assert run("train", "debug", "--data", digits, "--run", tmp_path / "a run", *SHORT) == 0
    said = capsys.readouterr()
    assert "the run is in" in said.out
    assert said.err.startswith("trainyard: the run is complete, no report (")
    assert said.err.endswith(f"`trainyard report '{tmp_path / 'a run'}'` writes it\n")
    assert said.err.count("\n") == 1
