"""What a rank knows of another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainyard.distributed.process_info import ProcessInfo
from trainyard.distributed.stacks import DUMP
from trainyard.world import BOOT_ID, kernel

pytestmark = pytest.mark.slow

STUCK = """
import os, signal, sys
from pathlib import Path
from trainyard.distributed.stacks import Stacks
stacks = Stacks(Path(sys.argv[1]), 0)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("shell", [(), ("sh", "-c", 'trap "" QUIT; exec "$@"', "sh")])
def test_a_process_that_is_stopped_writes_its_stacks_and_ends(
    shell: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one that was started in the background of a script, where SIGQUIT is ignored."""
    command = [*shell, sys.executable, "-c", STUCK, str(tmp_path / "stacks")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"ready\n"
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        monkeypatch.setattr(os, "getpid", lambda: child.pid)
        info = ProcessInfo.current()
        assert not info.has_ended()
        assert info._replace(started="another time").has_ended()
        info._replace(started="another time").end()  # of another process with this PID
        assert not info.has_ended()
        info.end()
        assert child.wait(60) == -DUMP
        assert info.has_ended()
        info.end()
    assert "most recent call first" in (tmp_path / "stacks" / "rank-00000.txt").read_text()


def test_hosts_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Their namespaces may have the same numbers: those of a kernel's first ones are fixed."""
    here = ProcessInfo.current()
    assert here.is_visible_from(ProcessInfo.current())
    assert here.namespaces.endswith(f" {kernel()}")
    assert kernel() == BOOT_ID.read_text().strip()
    assert kernel(tmp_path / "boot_id") == here.host  # a sandbox without it
    (tmp_path / "boot_id").write_text("another\n")
    another = here.namespaces.replace(kernel(), kernel(tmp_path / "boot_id"))
    assert not here._replace(namespaces=another).is_visible_from(here)
