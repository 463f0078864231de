"""`trainyard export --push`, to a local server that behaves like the Hub."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
import yaml
from huggingface_hub import constants

from tests.command_line import Capture, run, shown
from tests.errors import check, refused
from tests.export.hub_server import READ_TOKEN, TOKEN, Hub
from tests.web import free_port
from trainyard.classifier import load
from trainyard.export.check import plain_model

# huggingface_hub 2.4's upload by LFS.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
]
PUSH = ("--push", "hf://acme/digits")
LAYOUT = {"README.md", "config.json", "model.safetensors"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage is another protocol
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with Hub(tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        resolve = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + resolve)
        yield server


def test_timm_loads_what_was_pushed(
    hub: Hub, convolutions: Path, tmp_path: Path, capsys: Capture
) -> None:
    """One commit of weights by LFS, configuration and card; the same logits from the server."""
    said = shown(capsys, "export", convolutions, *PUSH, "--private", "--license", "apache-2.0")
    assert "hf://acme/digits: " in said and f"{hub.url}/acme/digits/commit/" in said
    assert hub.private["acme/digits"]
    ((_, *operations),) = hub.commits
    kinds = {one["value"]["path"]: one["key"] for one in operations}
    assert kinds.keys() == LAYOUT
    assert [name for name, kind in kinds.items() if kind == "lfsFile"] == ["model.safetensors"]

    model = timm.create_model("hf-hub:acme/digits", pretrained=True).eval()
    trained = plain_model(load(convolutions))
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(images), trained(images))
    card = hub.branches["acme/digits"]["main"]["README.md"].decode()
    assert 'timm.create_model("hf-hub:acme/digits", pretrained=True)' in card
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "apache-2.0"
    assert list(tmp_path.glob("cache/**/model.safetensors"))


def test_a_file_beside_them_on_a_branch(
    hub: Hub, convolutions: Path, tmp_path: Path, capsys: Capture
) -> None:
    file, name = tmp_path / "digits.pt2", "hf://acme/digits@next"
    said = json.loads(shown(capsys, "export", convolutions, file, "--push", name, "--json"))
    assert [one["path"] for one in said["exports"]] == [str(file), name]
    assert said["exports"][1]["commit"].startswith(f"{hub.url}/acme/digits/commit/")
    branches = hub.branches["acme/digits"]
    assert branches["next"].keys() == LAYOUT | {"digits.pt2", "digits.pt2.md"}
    assert branches["next"]["digits.pt2"] == file.read_bytes()
    assert branches["main"] == {}
    # Once more: the repository and the branch are there, and the file has a name of the layout.
    assert run("export", convolutions, tmp_path / "model.safetensors", "--push", name) == 0
    assert len(hub.commits) == 2


@pytest.mark.parametrize(
    ("name", "token", "code"),
    [
        ("hf://acme", TOKEN, "malformed-push-name"),
        ("hf://datasets/acme/x", TOKEN, "malformed-push-name"),
        ("hf://acme/a--b", TOKEN, "invalid-repository-name"),
        ("hf://acme/digits", "", "no-token"),
        ("hf://acme/digits", "hf_\x01", "malformed-token"),
        ("hf://acme/digits", "hf_wrong", "token-refused"),
        ("hf://acme/digits", READ_TOKEN, "token-refused"),
        ("hf://other/new", TOKEN, "token-refused"),
        ("hf://other/theirs", TOKEN, "token-refused"),
        ("hf://acme/digits@refs/pr/7", TOKEN, "token-refused"),
    ],
)
def test_what_the_hub_refuses(
    name: str,
    token: str,
    code: str,
    hub: Hub,
    *,
    convolutions: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    error = refused("export", convolutions, "--push", name)
    check(error, f"export.{code}", name=name)
    assert not token or token not in str(error)
    assert hub.commits == [] and hub.stored == {}


def test_a_public_repository_is_not_taken_for_a_private_one(hub: Hub, convolutions: Path) -> None:
    assert run("export", convolutions, *PUSH) == 0
    error = refused("export", convolutions, *PUSH, "--private")
    check(error, "export.repository-public", name="acme/digits")
    assert len(hub.commits) == 1


def test_a_network_that_is_away(
    hub: Hub, convolutions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before the export, and in the middle of the upload."""
    monkeypatch.setattr(hub, "_storage", lambda handler, *_: hub._say(handler, 403, {"error": "x"}))
    check(refused("export", convolutions, *PUSH), "export.token-refused")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert run("export", convolutions, *PUSH) == 1
    assert hub.commits == []


def test_nothing_is_uploaded_before_the_export_was_checked(
    hub: Hub, convolutions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = torch.nan  # of the noise that an export is checked with
    monkeypatch.setattr(torch, "randn", lambda *size, **_: torch.full(size, nan))
    error = refused("export", convolutions, *PUSH, exit_code=1)
    check(error, "export.not-loadable")
    assert all(asked.startswith("GET ") for asked in hub.asked)
