"""Training from the nginx that `trainyard data serve` configures, and what that nginx refuses."""

import dataclasses
import json
import os
import pwd
import resource
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import Capture, run, shown
from tests.errors import check, raises, refused
from tests.services.servers import WebServer, let_others_read, needs_nginx, web_server
from tests.test_cli_signals import LONG, Started, has_begun, started, wait_for
from tests.tiers import tiered
from tests.web import free_port
from trainyard.data.decode.crops import RandomResizedCrop
from trainyard.data.index.build import build_index, open_index
from trainyard.data.index.splits import find_splits
from trainyard.data.index.table import Index
from trainyard.data.loader.loader import Loader
from trainyard.data.loader.spec import LoaderSpec
from trainyard.data.reading.reader import Reader
from trainyard.data.sampler.plan import ShuffledPlan
from trainyard.data.storage.remote import request

pytestmark = [pytest.mark.slow, needs_nginx]

TRAIN = "digits-train-{000000..000003}.tar"
SHARD = "digits-train-000002.tar"


def spec(index: Index, **changes: Any) -> LoaderSpec:
    usual = LoaderSpec(
        plan=ShuffledPlan(len(index), 32, seed=3),
        crop=RandomResizedCrop(seed=3, scale=(0.5, 1.0), ratio=(0.8, 1.25), flip=0.5),
        image_size=24,
        stop=20,
        threads=4,
    )
    return dataclasses.replace(usual, **changes)


def refuse_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(place: Any) -> Any:
        raise AssertionError(f"{place.location} is scanned")

    monkeypatch.setattr("trainyard.data.formats.scan", scan)


# --- the index ---


def test_the_index_is_that_of_the_files(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = build_index(str(shards / TRAIN))
    with web_server(shards) as server:
        remote = build_index(f"{server.url}/{TRAIN}")
        assert remote.fingerprint == local.fingerprint
        assert remote.classes == local.classes
        assert remote.locate(5)[0].startswith(server.url)
        assert [Reader(remote).read(n) for n in (0, 700, 1432)] == [
            Reader(local).read(n) for n in (0, 700, 1432)
        ]
        refuse_scans(monkeypatch)
        assert open_index(f"{server.url}/{TRAIN}").path == remote.path


def test_shards_that_are_missing_are_counted(own_shards: Path) -> None:
    (own_shards / SHARD).unlink()
    with web_server(own_shards) as server:
        check(refused("data", "show", f"{server.url}/{TRAIN}"), "data.not-found")
        check(refused("data", "show", f"{server.url}/nothing"), "data.not-found")


# --- training ---


def test_training_outlives_a_killed_server(shards: Path, tmp_path: Path) -> None:
    """kill -9 in the middle, back after a while: same ids, same losses, nothing quarantined."""
    steps = ("--run.length", "30 steps", "--run.log_every", "1 steps", "--data.threads", "2")
    quick = (*steps, "--run.eval_every", "0 steps")
    with web_server(shards) as server:
        data = ("--data", server.url)
        assert run("train", "debug", *data, "--run", tmp_path / "calm", *quick) == 0
        lines = tmp_path / "storm" / "metrics.jsonl"

        def storm() -> None:
            for number in (6, 18):
                while not lines.exists() or lines.read_bytes().count(b"\n") < number:
                    time.sleep(0.005)
                server.kill_and_start(down_s=1.5).join()

        thread = threading.Thread(target=storm)
        thread.start()
        assert run("train", "debug", *data, "--run", tmp_path / "storm", *quick) == 0
        thread.join()
    calm, storm_lines = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("calm", "storm")
    )
    losses = [(line["kind"], line["step"], line["loss"]) for line in calm if "loss" in line]
    assert len(losses) >= 30
    assert losses == [
        (line["kind"], line["step"], line["loss"]) for line in storm_lines if "loss" in line
    ]
    assert not (tmp_path / "storm" / "quarantine.jsonl").exists()


@pytest.mark.night
def test_a_second_ctrl_c_does_not_wait_for_a_server(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with web_server(shards) as server:
        where = ("--data", server.url, "--run", folder)
        with started(tmp_path, "train", "debug", *where, *LONG) as command:
            wait_for(lambda: has_begun(folder), "the first report")
            server.kill()
            time.sleep(1)  # until what was read ahead is used up
            command.process.send_signal(signal.SIGINT)
            time.sleep(1.5)
            command.process.send_signal(signal.SIGINT)
            # The signal itself, if it had data left, stopped at the first and was leaving already.
            assert command.process.wait(timeout=20) in (130, -signal.SIGINT)
            wait_for(lambda: not command.members(), "the end of the loader")


@pytest.mark.night
@pytest.mark.parametrize("is_open", [False, True])
def test_a_shard_that_changes_is_named(own_shards: Path, is_open: bool) -> None:
    """Whether it was open already, or is opened for the first time after it has changed."""
    with web_server(own_shards) as server:
        index = open_index(f"{server.url}/{TRAIN}")
        reader = Reader(index)
        sample = next(n for n in range(len(index)) if index.locate(n)[0].endswith(SHARD))
        if is_open:
            reader.read(sample)
            sample += 100  # beyond what has been read ahead
        os.utime(own_shards / SHARD, (0, 0))
        code = "storage.changed-while-read" if is_open else "data.changed-since-indexed"
        with raises(code):
            reader.read(sample)
        (own_shards / SHARD).unlink()
        with Loader(index, spec(index)) as loader, raises("storage.gone"):
            list(loader)


# --- who may read, and what ---


def get(server: WebServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.options.port, timeout=10)
    connection.request(method, path)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def test_only_what_is_meant_can_be_had(own_shards: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (own_shards / ".netrc").write_text("secret")
    (own_shards / ".git").mkdir()
    (own_shards / ".git" / "config").write_text("secret")
    (own_shards / "link").symlink_to(tmp_path / "secret")
    (own_shards / "folder").symlink_to(tmp_path)
    index = build_index(str(own_shards / TRAIN)).path.name
    with web_server(own_shards) as server:
        assert get(server, f"/{SHARD}") == (200, (own_shards / SHARD).read_bytes())
        assert get(server, f"/{SHARD}", "HEAD") == (200, b"")
        hidden = (index, ".netrc", ".git/config", "link", "folder/secret", "", "absent")
        for path in (f"/{name}" for name in hidden):
            status, content = get(server, path)
            assert (status in (403, 404), b"secret" in content) == (True, False), path
        for path in ("/../secret", "/%2e%2e/secret", "/folder/../../secret", "//../secret"):
            status, content = get(server, path)
            assert (status in (400, 403, 404), b"secret" in content) == (True, False), path
        for method in ("POST", "PUT", "DELETE", "MKCOL", "OPTIONS"):
            assert get(server, f"/{SHARD}", method)[0] == 405
        assert (own_shards / SHARD).exists()


@contextmanager
def idle(server: WebServer, number: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Connections of clients that send no more than this."""
    with ExitStack() as stack:
        clients = []
        for _ in range(number):
            client = socket.create_connection(("127.0.0.1", server.options.port), timeout=20)
            clients.append(stack.enter_context(client))
            client.sendall(sent)
        yield clients


@pytest.mark.night
def test_clients_that_send_nothing_are_let_go(shards: Path) -> None:
    with (
        web_server(shards, head_s=1) as server,
        idle(server, 1, b"") as (silent,),
        idle(server, 1, b"GET /a") as (slow,),
    ):
        assert silent.recv(1) == slow.recv(1) == b""


@pytest.mark.night
def test_idle_clients_lock_nobody_out(shards: Path) -> None:
    """1,024 for each core did, without a login; as many as 8 ranks may have."""
    number = 1100 * (os.cpu_count() or 1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most[1] < 3 * number:
        pytest.skip("too few files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most[1], most[1]))
    try:
        with web_server(shards) as server, idle(server, number, b"GET /a") as clients:
            assert get(server, f"/{SHARD}")[0] == 200
            let_go = select.poll()
            for client in clients:
                let_go.register(client, select.POLLIN)
            assert let_go.poll(0) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


@pytest.mark.night
def test_a_folder_may_have_any_name(shards: Path, tmp_path: Path) -> None:
    name = """a "b" 'c' $document_root ${host}; }\n # {x} \\ ü"""
    folder = shutil.copytree(shards, tmp_path / name)
    with web_server(folder) as server:
        assert get(server, f"/{SHARD}") == (200, (folder / SHARD).read_bytes())


def test_a_password_opens_and_is_never_told(
    own_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    request._login_in_netrc.cache_clear()
    with web_server(own_shards, login="me:s3cret:wörd") as server:
        location = f"{server.url}/{TRAIN}"

        def log_in(name: str, password: str) -> None:
            line = f'machine 127.0.0.1 login {name} password "{password}"\n'
            (tmp_path / "netrc").write_text(line, encoding="utf-8")
            request._login_in_netrc.cache_clear()

        check(refused("data", "show", server.url), "storage.no-login")
        for wrong in ("wr0ng", "s3cret:wörd "):
            log_in("me", wrong)
            error = refused("data", "show", server.url)
            check(error, "storage.login-refused")
            assert wrong not in str(error)
        log_in("me", "s3cret:wörd")
        index = open_index(location)
        assert len(Reader(index).read(0)) > 0
        assert b"s3cret" not in index.path.read_bytes()
        (own_shards / SHARD).unlink()
        assert "s3cret" not in str(refused("data", "index", location))
        assert set(find_splits(server.url)) == {"train", "val"}
    request._login_in_netrc.cache_clear()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that only itself vouches for, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: tests/services/install.sh")
    certificate, key = tmp_path / "our certificate;.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def test_tls_needs_a_certificate_that_is_trusted(
    shards: Path, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """By commands of their own, since a process reads the certificates that it trusts once."""
    with web_server(shards, certificate=certificate[0], key=certificate[1]) as server:
        assert server.url.startswith("https://")
        command = [sys.executable, "-m", "trainyard", "data", "index", server.url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert json.loads(done.stdout)["error"]["code"] == "storage.untrusted-certificate"
        trusted = {ssl.get_default_verify_paths().openssl_cafile_env: str(certificate[0])}
        subprocess.run(command, check=True, capture_output=True, env=os.environ | trusted)


# --- the command ---


@contextmanager
def serving_command(tmp_path: Path, *arguments: object) -> Iterator[Started]:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    let_others_read(temporary)
    environment = pytest.MonkeyPatch()
    environment.setenv("TMPDIR", str(temporary))
    with started(tmp_path, "data", "serve", *arguments) as command:
        environment.undo()
        yield command


def said_by(command: Started) -> list[str]:
    """What the command prints once it serves."""
    assert command.process.stdout is not None
    return [command.process.stdout.readline().rstrip() for _ in range(2)]


@pytest.mark.parametrize("number", tiered([signal.SIGINT, signal.SIGTERM], night=[signal.SIGTERM]))
def test_the_command_serves_until_it_is_ended(
    own_shards: Path, tmp_path: Path, number: signal.Signals
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving_command(tmp_path, own_shards, "--port", port) as command:
        serves, how = said_by(command)
        assert f"{url}/" in serves and str(own_shards) in serves
        assert how.endswith(f" --data {url}")
        assert len(os.listdir(tmp_path / "tmp")) == 1
        assert len(open_index(f"{url}/{TRAIN}")) == 1433
        command.process.send_signal(number)
        out, err = command.process.communicate(timeout=20)
        assert (command.process.returncode, out, err) == (0, "", "")
        wait_for(lambda: not command.members(), "nginx to end", timeout_s=10)
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.night
def test_nginx_ends_even_if_the_command_is_killed(own_shards: Path, tmp_path: Path) -> None:
    with serving_command(tmp_path, own_shards, "--port", free_port()) as command:
        said_by(command)
        command.process.kill()
        command.process.wait()
        wait_for(lambda: not command.members(), "nginx to end", timeout_s=10)


@pytest.mark.night
def test_shards_without_a_manifest_are_named_by_the_user(own_shards: Path, tmp_path: Path) -> None:
    (own_shards / "dataset.json").unlink()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving_command(tmp_path, own_shards, "--port", port) as command:
        assert url in said_by(command)[1]
        assert len(open_index(f"{url}/{TRAIN}")) == 1433


@pytest.mark.skipif(os.geteuid() != 0, reason="for root alone")
def test_no_process_of_nginx_is_root(shards: Path, tmp_path: Path) -> None:
    """Its workers were, on a network."""
    with web_server(shards) as server:
        pid = server.process.pid
        children, deadline = Path(f"/proc/{pid}/task/{pid}/children"), time.monotonic() + 30
        while not (workers := children.read_text().split()):  # it listens before it has any
            assert time.monotonic() < deadline
            time.sleep(0.01)
        owners = {Path(f"/proc/{process}").stat().st_uid for process in (pid, *workers)}
    assert owners == {pwd.getpwnam("nobody").pw_uid}
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    check(refused("data", "serve", secret), "serve.folder-closed", path=secret, user="nobody")


@pytest.mark.night
def test_a_login_is_told_beside_the_url(own_shards: Path, tmp_path: Path) -> None:
    """It stood in the URL, which every command refuses."""
    port = free_port()
    with serving_command(tmp_path, own_shards, "--port", port, "--user", "me:s3cret") as command:
        serves, login = said_by(command)
        assert f"http://127.0.0.1:{port}/" in serves
        assert "machine 127.0.0.1 login" in login and "s3cret" not in login


def test_the_configuration_can_be_seen(shards: Path, capsys: Capture) -> None:
    said = shown(capsys, "data", "serve", shards, "--port", 9001, "--user", "a:b", "--dry-run")
    assert "listen 127.0.0.1:9001;" in said
    assert "auth_basic_user_file users;" in said
    assert str(shards) not in said


def test_mistakes(digits: Path, shards: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    serve = ("data", "serve")
    check(refused(*serve, tmp_path / "absent"), "serve.no-such-folder", path=tmp_path / "absent")
    run("data", "pack", digits / "val", tmp_path / "folder", "--format", "folder")
    check(refused(*serve, tmp_path / "folder"), "serve.single-images", path=tmp_path / "folder")
    with web_server(shards) as server:
        port = server.options.port
        check(refused(*serve, shards, "--port", port), "serve.cannot-listen", port=port)
    for words, code in (
        (("--port", 0), "serve.nginx-failed"),
        (("--host", "a b"), "serve.malformed-host"),
        (("--host", "192.0.2.1"), "serve.cannot-listen"),
        (("--user", "me"), "serve.malformed-login"),
        (("--user", "me:"), "serve.malformed-login"),
        (("--key", broken), "serve.incomplete-tls"),
        (("--certificate", broken, "--key", broken), "serve.nginx-failed"),
    ):
        check(refused(*serve, shards, *words), code)


def test_nginx_that_is_missing_is_asked_for(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    check(refused("data", "serve", shards), "serve.needs-nginx")
