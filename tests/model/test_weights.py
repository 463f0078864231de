"""Files that weights come from: what is found in them, and what is refused."""

import argparse
import os
import pickle
import socket
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.errors import raises
from trainyard.data.batch import BadSample
from trainyard.errors import CheckpointError
from trainyard.model import catalogue
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


def _of_before_safe_reading() -> dict[str, Any]:
    """Objects that trainers keep beside weights; torch's safe reader refuses most of them."""
    options = SimpleNamespace(lr=0.1, path=Path("data"))
    options.itself = options
    return {
        "a number of NumPy": np.float64(0.9),
        "an array of NumPy": np.arange(6.0).reshape(2, 3),
        "a path": Path("runs/best"),
        "a namespace of its own": options,
        "a data class": LoadedWeights({}, "x"),
        "a defaultdict": defaultdict(list, {"loss": [1.0]}),
        "an enum": HTTPStatus.NOT_FOUND,
        "a model": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm2d(2)),
        "an optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(2))]),
        "a date": datetime(2026, 1, 1),
        "a number of any size": Decimal("0.1"),
        "a set of names": {"a", "b"},
        "a named tuple": BadSample(1, "a.jpg", 0, "cut"),
        "a class": nn.Linear,
        "a function": timm.create_model,
        "a type": torch.float16,
        "a device": torch.device("cpu"),
        "a size": torch.ones(2, 3).shape,
        "complex": 1j,
        "bytes": b"abc",
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("kind", _of_before_safe_reading())
def test_what_lies_beside_weights_does_no_harm(kind: str, protocol: int, tmp_path: Path) -> None:
    content = {"state_dict": small(), "beside": _of_before_safe_reading()[kind], "epoch": 3}
    torch.save(content, tmp_path / "a.pth", pickle_protocol=protocol)
    assert same(read_weights(tmp_path / "a.pth").weights, small())


@pytest.mark.parametrize("make", [lambda model: model, lambda model: {"model": model, "epoch": 3}])
def test_a_whole_model_is_read_as_its_weights(make: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("resnet18", "test_vit", "swin_tiny_patch4_window7_224"):
        model = timm.create_model(name)
        source = read_weights(saved(tmp_path / "a.pth", make(model)))
        assert same(source.weights, model.state_dict())
    shared = torch.arange(12.0)
    parts = {"a": shared[3:9].view(2, 3).t(), "b": shared[::2], "c": torch.empty(0)}
    kinds = [torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    of_kinds = {str(kind): torch.arange(4).to(kind) for kind in kinds}
    content = {"model": parts | of_kinds, "beside": np.float64(1)}
    assert same(read_weights(saved(tmp_path / "b.pth", content)).weights, parts | of_kinds)


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
    assert same(read_weights(tmp_path / "a.pth").weights, small())
    assert not (tmp_path / "ran").exists()


def global_of(name: str) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode()


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


# Instructions that leave one object, or fail; each would do harm in Python's own reader.
HOSTILE = {
    "a command": global_of("os.system") + text("touch ran") + b"\x85R",
    "by another module": global_of("posix.system") + text("touch ran") + b"\x85R",
    "eval": global_of("builtins.eval") + text("open('ran', 'w')") + b"\x85R",
    "a name on the stack": text("os") + text("system") + b"\x93" + text("touch ran") + b"\x85R",
    "a new object": global_of("subprocess.Popen") + text("touch ran") + b"\x85\x81",
    "an instance": b"(" + text("touch ran") + b"ios\nsystem\n",
    "an object": b"(" + global_of("os.system") + text("touch ran") + b"o",
    "names by getattr": global_of("builtins.getattr")
    + global_of("os.path")
    + text("os")
    + b"\x86R",
    "a state of torch's class": global_of("torch.Tensor") + b"N}" + text("add") + b"Ns\x86b",
    "a state of a function": global_of("torch._utils._rebuild_tensor_v2")
    + b"N}"
    + text("__defaults__")
    + b"Ns\x86b",
    "a state of a tuple": b"(K\1tN}" + text("x") + b"K\1s\x86b",
    "an import": global_of("importlib.import_module") + text("antigravity") + b"\x85R",
    "a whole module": global_of("torch.load") + text("b.pth") + b"\x85R",
    "an extension": b"\x82\1",
    "a buffer": b"\x97",
    "another persistent id": b"Pos.system\n",
    "tuples in tuples as a key": b"}" + b"K\1" + b"\x85" * 300_000 + b"K\1s",
    "lists in lists": b"]" * 300_000 + b"a" * 299_999,
    "itself": b"]q\1h\1a",
    "a long text": b"X\xff\xff\xff\x7f",
    "an unknown instruction": b"\xf0",
    "no object": b"",
    "too many pops": b"0000",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_does_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused; no process starts, and no file, class or function changes."""
    monkeypatch.chdir(tmp_path)
    before = torch.Tensor.add, torch._utils._rebuild_tensor_v2.__defaults__
    saved(tmp_path / "b.pth", {"model": small(), "extra": np.float64(1)})
    with zipfile.ZipFile("b.pth") as archive, zipfile.ZipFile("a.pth", "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("data.pkl"):  # {"extra": …} around the object that was there
                begin = b"\x80\2}(" + text("extra") + HOSTILE[kind] + text("model")
                content = begin + global_of("torch._utils._rebuild_parameter") + b"N\x85Ru."
            changed.writestr(name, content)
    with pytest.raises(CheckpointError) as refused:
        read_weights(tmp_path / "a.pth")
    assert refused.value.code in ("weights.none-in-file", "file.unreadable")
    assert not (tmp_path / "ran").exists()
    assert "antigravity" not in sys.modules
    assert (torch.Tensor.add, torch._utils._rebuild_tensor_v2.__defaults__) == before


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


def test_names_are_those_that_timm_registers() -> None:
    """They are read from its sources, as its import takes seconds."""
    from trainyard.model import plain_vit, whitened_convnet  # noqa: F401  # timm learns their names

    names, former = catalogue.model_names()
    assert names == sorted(timm.list_models())
    assert set(former) == timm.models._registry._deprecated_models.keys()
    catalogue.check_name("resnet50.a1_in1k")
    with raises("model.unknown-name") as refused:
        catalogue.check_name("resnet50d0")
    assert "'resnet50d'" in str(refused.value)


def test_weights_in_a_cache_need_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "is_hub_unknown", lambda _: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    for folder in ("models--timm--resnet18.a1_in1k", "hub"):
        (tmp_path / folder).mkdir()
        with raises("weights.not-downloaded", name="convnext_tiny", key="model.checkpoint"):
            catalogue.check_weights("convnext_tiny")
    (tmp_path / "models--timm--convnext_tiny.in12k_ft_in1k").mkdir()
    catalogue.check_weights("convnext_tiny")


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
    monkeypatch.setattr("trainyard.model.catalogue.getproxies", dict)
    with raises("weights.not-downloaded") as refused:
        pretrained_weights("test_vit.r160_in1k")
    assert len(tried) <= 2
    assert "\n" not in str(refused.value)
