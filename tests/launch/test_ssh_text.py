"""`launch ssh`: host lists, the dry run, and a connection that ends; no host is reached."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import Capture, shown
from tests.errors import check, raises, refused
from trainyard.launch.hosts import GivenHost, read_hosts
from trainyard.launch.job import Job
from trainyard.launch.ssh import Login, SshOptions, launch_ssh, sync


def test_hosts_in_a_list() -> None:
    assert read_hosts("a,b:4,me@c,[2001:db8::1]:2,me@::1") == [
        GivenHost("a"),
        GivenHost("b", 4),
        GivenHost("me@c"),
        GivenHost("2001:db8::1", 2),
        GivenHost("me@::1"),
    ]
    assert [host.name for host in read_hosts("me@c,me@::1")] == ["c", "::1"]


def test_hosts_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\na\n\nme@b slots=8  # the new one\nc:2\n")
    assert read_hosts(str(file)) == [GivenHost("a"), GivenHost("me@b", 8), GivenHost("c", 2)]
    file.write_text("a\nb slot=8\n")
    with raises("launch.malformed-slots", where=f"{file}, line 2", value="slot=8"):
        read_hosts(str(file))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("a,a", "host-named-twice"),
        ("a:x", "malformed-host"),
        ("a:0", "malformed-host"),
        ("-oProxyCommand=x", "malformed-host"),
        (",", "no-hosts"),
        ("no/such", "no-such-hosts-file"),
        (f"{'a,' * 300}", "host-named-twice"),  # too long for the name of a file
    ],
)
def test_what_is_no_host(given: str, code: str) -> None:
    with raises(f"launch.{code}"):
        read_hosts(given)


def test_dry_run(capsys: Capture, digits: Path) -> None:
    words = ("launch", "ssh", "debug", "--data", digits, "--dry-run", "--hosts", "a:2,me@b")
    text = shown(capsys, *words, "--ssh", "ssh -p 2222", "--ssh-config", "mine", "--folder", "/w")
    first, second = text.splitlines()
    assert first.startswith("ssh -p 2222 -F mine -T -o BatchMode=yes")
    assert "-- a 'cd /w || exit 2; exec " in first and "launch agent debug" in first
    assert "--hosts=2:2 --run-id=RUN-0" in first and "--ranks=2 --listen=" in first
    assert " -- me@b " in second and "--ranks" not in second and "--listen" not in second


def test_data_that_only_the_hosts_have(capsys: Capture) -> None:
    words = ("launch", "ssh", "debug", "--data", "/only/there", "--hosts", "a", "--dry-run")
    assert "--data /only/there" in shown(capsys, *words)
    check(refused(*words, "--optim.lr", "much"), "recipe.invalid-value", key="optim.lr")
    check(refused(*words, "--min-hosts", 1), "launch.min-hosts-without-restarts")


def test_a_copy_names_what_is_missing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rsync = tmp_path / "rsync"
    rsync.write_text('#!/bin/sh\necho "$@" >"$SAID"; echo oh >&2; exit $CODE\n')
    rsync.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    login = Login(ssh=("ssh",), folder="/my work", python="python")
    for code, is_absent in ((12, True), (23, False)):
        monkeypatch.setenv("CODE", str(code))
        with raises("launch.sync-failed") as caught:
            sync([GivenHost("a")], login)
        assert ("installed" in str(caught.value)) == is_absent
    assert "--rsync-path mkdir -p '/my work' && rsync" in (tmp_path / "said").read_text()


def test_what_ssh_leaves_behind_is_not_waited_for(tmp_path: Path, capsys: Capture) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nsleep 1000 &\necho refused >&2\nexit 255\n")
    ssh.chmod(0o755)
    options = SshOptions(hosts=[GivenHost("a")], login=Login((str(ssh),), "/w", "python"))
    told: list[str] = []
    job = Job(("train", "debug", "--run", "runs/debug"), Path("runs/debug"))
    assert launch_ssh(job, options, told.append) == 2
    assert told == ["host a: ssh has failed: refused"]
    assert capsys.readouterr().err == "a | refused\n"


def test_hosts_that_have_ended_before_anyone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_and_end(thread: threading.Thread) -> None:
        start(thread)
        thread.join(5)

    monkeypatch.setattr(threading.Thread, "start", start_and_end)
    options = SshOptions(
        hosts=[GivenHost("a"), GivenHost("b")], login=Login(("/no/ssh",), "/w", "python")
    )
    told: list[str] = []
    job = Job(("train", "debug", "--run", "runs/debug"), Path("runs/debug"))
    assert launch_ssh(job, options, told.append) == 2
    assert [each.partition(":")[0] for each in told] == ["host a", "host b"]


HOSTS_OF_WHICH_ONE_IS_LOST = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
cd "{folder}"
[ -e "$2" ] && exit 255  # it is not back
touch "$2"
echo "@trainyard-agent localhost:1"
[ "$2" = b ] && exit 255
for second in 1 2 3 4 5 6 7 8 9 10; do [ -e over ] && exit 0; sleep 1; done
exit 1
"""


def test_a_run_goes_on_with_as_few_hosts_as_asked_for(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(HOSTS_OF_WHICH_ONE_IS_LOST.format(folder=tmp_path))
    ssh.chmod(0o755)
    hosts = [GivenHost("a"), GivenHost("b")]
    options = SshOptions(hosts=hosts, login=Login((str(ssh),), "/", "python"), wait_s=0)
    job = Job(("train", "debug", "--run", "runs/debug"), Path("runs/debug"))

    def say(text: str) -> None:
        if "without" in text:
            (tmp_path / "over").touch()

    assert launch_ssh(job, replace(options, min_hosts=1), say) == 0
    assert (tmp_path / "over").exists()
