"""Training from node-local copies of what the real nginx serves."""

import json
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, run
from tests.services.servers import needs_nginx, web_server

pytestmark = [pytest.mark.slow, needs_nginx]


def flip(path: Path, place: int) -> None:
    """Alter one byte, of an image's pixels, so that only a checksum can tell."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", ["altered", "truncated"])
def test_a_damaged_shard_is_fetched_again_and_then_named(
    harm: str,
    own_shards: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    shard = own_shards / "digits-train-000002.tar"
    if harm == "altered":
        flip(shard, 512 + 60)  # inside the first image
    else:
        with open(shard, "r+b") as file:  # at its end mark, so that all members are there
            file.truncate(shard.stat().st_size - 1024 * 4)
    with web_server(own_shards) as server:
        code = run("data", "stage", server.url, "--to", tmp_path / "node")
        asked = (server.options.folder / shard.name).name
    said = capsys.readouterr().err
    assert code == 2
    assert asked in said
    assert "checksum" in said or "dataset.json" in said or "truncated" in said
    assert not list((tmp_path / "node").rglob("*.part"))


def test_training_from_copies_is_training_from_the_server(
    shards: Path, tmp_path: Path, capsys: Capture
) -> None:
    losses = {}
    with web_server(shards) as server:
        assert run("data", "stage", server.url, "--to", tmp_path / "node") == 0
        for name, stage in (("direct", ()), ("staged", ("--data.stage", tmp_path / "node"))):
            where = ("--data", server.url, "--run", tmp_path / name)
            assert run("train", "debug", *where, *SHORT, *stage, "--json") == 0
            metrics = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            losses[name] = [line["loss"] for line in map(json.loads, metrics) if "lr" in line]
    capsys.readouterr()
    assert len(losses["direct"]) == 2
    assert losses["direct"] == losses["staged"]
