"""Files that weights come from: what is found in them, and what is refused."""

import argparse
import os
import pickle
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.errors import raises
from trainyard.model.weights import (
    KEYS,
    LoadedWeights,
    pretrained_weights,
    read_weights,
    without_prefix,
)


def small() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(2, 3).state_dict()


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


# --- what is found ---


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.safetensors", save_file),
        *((name, torch.save) for name in ("a.pth", "a.pt", "a.bin", "checkpoint.pth.tar")),
        ("of before zip.pth", partial(torch.save, _use_new_zipfile_serialization=False)),
    ],
)
def test_a_file_that_is_all_weights_and_one_that_is_cut_off(
    name: str, write: Callable[..., None], tmp_path: Path
) -> None:
    write(small(), tmp_path / name)
    source = read_weights(tmp_path / name)
    assert same(source.weights, small())
    assert source.description == str(tmp_path / name)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    with raises("file.unreadable", path=tmp_path / name):
        read_weights(tmp_path / name)


@pytest.mark.parametrize("key", KEYS)
def test_the_usual_places_are_found(key: str, tmp_path: Path) -> None:
    content = {"epoch": 3, "optimizer": {"state": {}}, key: small()}
    source = read_weights(saved(tmp_path / "a.pth", content))
    assert same(source.weights, small())
    assert source.description.endswith(f"a.pth, entry {key!r}")


def test_averaged_weights_go_first_and_an_empty_entry_is_passed_over(tmp_path: Path) -> None:
    average = {name: weight + 1 for name, weight in small().items()}
    path = saved(tmp_path / "a.pth", {"model": small(), "model_ema": average})
    assert same(read_weights(path).weights, average)
    assert same(read_weights(path, "model").weights, small())
    path = saved(tmp_path / "b.pth", {"model": small(), "model_ema": None})
    assert same(read_weights(path).weights, small())


def test_any_other_entry_by_its_key(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", {"teacher": small(), "student": {}})
    assert same(read_weights(path, "teacher").weights, small())
    with raises("weights.none-in-file", hint="; it has teacher, student"):
        read_weights(path)
    with raises("weights.no-such-entry", entry="model", hint="; it has teacher, student"):
        read_weights(path, "model")
    with raises("weights.entry-without-weights", entry="student"):
        read_weights(path, "student")


def test_options_beside_the_weights_do_no_harm(tmp_path: Path) -> None:
    """ConvNeXt, DeiT and timm keep theirs in the checkpoint."""
    content = {"model": small(), "args": argparse.Namespace(lr=0.1, model="resnet18")}
    assert same(read_weights(saved(tmp_path / "a.pth", content)).weights, small())


def test_the_count_of_an_averaged_model_is_left_out(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 3))
    source = read_weights(saved(tmp_path / "a.pth", average.state_dict()))
    weights, done = without_prefix(source, "", set(small()))
    assert weights.keys() == small().keys()
    assert len(done) == 1 and "'module.'" in done[0]


# --- what is refused ---


class Runs:
    """What would leave a file behind, were it unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_zip", [True, False])
def test_nothing_in_a_file_is_run(is_zip: bool, tmp_path: Path) -> None:
    content = {"model": small(), "extra": Runs(tmp_path / "ran")}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=is_zip)
    with raises("weights.unsafe", path=tmp_path / "a.pth", name=f"{os.mkdir.__module__}.mkdir"):
        read_weights(tmp_path / "a.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut off", b"\x80\x02K\x01."])
def test_damaged_files_are_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with raises("file.unreadable", path=tmp_path / name) as refused:
        read_weights(tmp_path / name)
    assert "weights_only" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("classes", ['{"a": 1}', "[1, 2]", "[" * 100_000, "cat, dog"])
def test_classes_that_are_no_list_of_names_are_passed_over(classes: str, tmp_path: Path) -> None:
    """Deep JSON was a RecursionError."""
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors", {"classes": classes})
    assert read_weights(tmp_path / "a.safetensors").classes is None


@pytest.mark.parametrize("content", [[1, 2], {}, {"a": 1}, small()["bias"]])
def test_a_file_without_weights(content: object, tmp_path: Path) -> None:
    with raises("weights.none-in-file", path=tmp_path / "a.pth"):
        read_weights(saved(tmp_path / "a.pth", content))


def test_a_plain_pickle(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"model": [1.0]}))
    with raises("file.unreadable", path=tmp_path / "a.pkl"):
        read_weights(tmp_path / "a.pkl")


# --- prefixes ---


# Of DDP, torch.compile, Lightning, decent-dp, Colossal-AI and two together.
PREFIXES = ("module.", "_orig_mod.", "model.", "_model.", "module.model.")


@pytest.mark.parametrize("prefix", [*PREFIXES, "_orig_mod.module.", "module._orig_mod."])
def test_what_wrappers_add_is_taken_off(prefix: str) -> None:
    source = LoadedWeights({f"{prefix}{name}": weight for name, weight in small().items()}, "a.pth")
    weights, done = without_prefix(source, "", set(small()))
    assert same(weights, small())
    assert len(done) == prefix.count(".")


def test_names_of_the_model_itself_stay() -> None:
    wrapped = {f"model.{name}": weight for name, weight in small().items()}
    weights, done = without_prefix(LoadedWeights(wrapped, "a.pth"), "", set(wrapped))
    assert same(weights, wrapped)
    assert done == []


def test_no_weights_have_no_prefix() -> None:
    assert without_prefix(LoadedWeights({}, "a.pth"), "", {"weight"}) == ({}, [])


def test_a_prefix_chooses_a_part() -> None:
    names = {f"visual.{name}": weight for name, weight in small().items()}
    source = LoadedWeights(names | {"text.weight": torch.ones(1)}, "clip.pth")
    weights, done = without_prefix(source, "visual.", set(small()))
    assert same(weights, small())
    assert len(done) == 1 and "'visual.'" in done[0]
    with raises("weights.no-such-prefix", source="clip.pth", prefix="audio."):
        without_prefix(source, "audio.", set(small()))


# --- timm's own ---


def test_pretrained_weights_are_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    there = timm.create_model("test_resnet").state_dict()
    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", lambda *_, **__: there)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    source = pretrained_weights("test_resnet")
    assert same(source.weights, there)
    assert source.description == "timm's test_resnet.r160_in1k"
    assert torch.equal(torch.get_rng_state(), before)


def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no route to the hub\nand a long story")

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", fails)
    with raises("weights.not-downloaded", name="test_resnet", reason="no route to the hub"):
        pretrained_weights("test_resnet")


@pytest.mark.slow
def test_a_model_that_timm_never_trained() -> None:
    with raises("weights.not-downloaded", name="resnet200"):
        pretrained_weights("resnet200")


def test_without_a_network_the_way_round_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client tries again for minutes if a name cannot be resolved."""
    tried: list[str] = []

    def unknown(host: str, *_: object, **__: object) -> None:
        tried.append(host)
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("trainyard.model.weights.getproxies", dict)
    with raises("weights.not-downloaded") as refused:
        pretrained_weights("test_vit.r160_in1k")
    assert len(tried) <= 2
    assert "\n" not in str(refused.value)
