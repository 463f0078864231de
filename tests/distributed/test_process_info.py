"""What a rank knows of another process."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from trainyard import world
from trainyard.children import kill_group, wait_for
from trainyard.distributed import process_info
from trainyard.distributed.process_info import ProcessInfo


def test_ends_of_processes_are_seen_without_proc_and_waitid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without /proc a rank failed at its start, and its launcher without waitid."""
    monkeypatch.setattr(process_info, "_PROC", tmp_path / "none")
    monkeypatch.delattr(os, "waitid")
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    monkeypatch.setattr(os, "getpid", lambda: child.pid)
    info = ProcessInfo.current()
    assert not info.has_ended()
    assert info._replace(started="another time").has_ended()
    os.kill(child.pid, signal.SIGSTOP)
    while process_info._state_of(child.pid) == ("S", info.started):
        pass
    info.kill_if_stopped()
    wait_for(child)
    kill_group(child)
    assert child.returncode == -signal.SIGKILL
    assert info.has_ended()


def test_hosts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their namespaces may have the same numbers: those of a kernel's first ones are fixed."""
    here = ProcessInfo.current()
    assert world._BOOT.read_text().strip() in here.namespaces
    monkeypatch.setattr(world, "_BOOT", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("another")
    assert not ProcessInfo.current().is_visible_from(here)
    (tmp_path / "boot_id").unlink()  # a sandbox without it
    assert ProcessInfo.current().is_visible_from(ProcessInfo.current())
