"""Checkpoints are complete or absent, and a damaged one is never taken for a good one."""

import copy
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cuts import Killed, kill
from tests.errors import check, raises
from tests.full_disk import full_disk
from tests.runs import assert_equal
from tests.steps import CPU, build_state, save_checkpoint
from trainyard.averaging.allreduce import AllReduce
from trainyard.averaging.config import AverageConfig
from trainyard.errors import CheckpointError
from trainyard.files import sha256
from trainyard.optim.config import NAMES, OptimConfig
from trainyard.optim.groups import set_group_rates
from trainyard.optim.optimizers import build_optimizer
from trainyard.training import checkpoint, saver
from trainyard.training.checkpoint import TrainState, evaluation_weights, load_checkpoint
from trainyard.training.update import DynamicLossScale
from trainyard.world import World

FILES = ["manifest.json", "model.safetensors", "progress.json", "training.pt"]


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    return model.to(memory_format=torch.channels_last)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    torch.autograd.backward(model(torch.randn(5, 3, 4, 4)).square().mean())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
    averager = AllReduce(AverageConfig(), World())
    averager.wrap(model)
    return build_state(model, optimizer, averager, scale=DynamicLossScale(CPU))


def state_at(step: int, *, seed: int = 0, lr: float = 0.1, emas: Sequence[str] = ()) -> TrainState:
    """A small model and its optimizer after an update, so that there is momentum to save."""
    model = model_of(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=0.01)
    backward(model)
    optimizer.step()
    state = state_of(model, optimizer)
    state.step = step
    state.emas = {name: model_of(seed + 100 + number) for number, name in enumerate(emas)}
    return state


def save(folder: Path, *steps: int, keep: int = 100) -> Path:
    """Checkpoints of some steps; the path of the last."""
    return [save_checkpoint(state_at(step, seed=step), folder, keep=keep) for step in steps][-1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest_good(folder: Path) -> tuple[str | None, list[str]]:
    passed_over: list[str] = []
    path = saver.newest_good(folder, passed_over.append)
    return path.name if path else None, passed_over


def problem_of(path: Path) -> CheckpointError:
    problem = checkpoint.find_problem(path)
    assert problem is not None
    return problem


# --- what is in it ---


@pytest.mark.parametrize("emas", [(), ("ema",), ("ema-0.9", "ema-0.99")], ids=len)
def test_everything_comes_back(emas: tuple[str, ...], tmp_path: Path) -> None:
    saved = state_at(7, emas=emas)
    saved.last, saved.best = {"step": 6, "top1": 0.25}, {"step": 3, "top1": 0.5}
    saved.skipped, saved.roll_backs = 320, 2
    saved.scale.adjust(torch.tensor(False))
    for _ in range(2):
        saved.guard.add(torch.tensor(1.0))
    path = save_checkpoint(saved, tmp_path, keep=1)
    loaded = state_at(0, seed=1, emas=emas)
    load_checkpoint(loaded, path)
    assert (loaded.step, loaded.skipped, loaded.roll_backs) == (7, 320, 2)
    assert (loaded.last, loaded.best) == (saved.last, saved.best)
    assert loaded.scale.state_dict() == saved.scale.state_dict()
    assert loaded.scale.state_dict() != state_at(0).scale.state_dict()
    assert loaded.guard.state_dict() == saved.guard.state_dict()
    assert loaded.guard.state_dict()["running"] == 2
    assert loaded.clock.total >= saved.clock.total - 60
    assert_same_weights(loaded.model, saved.model)
    assert checkpoint.averages(path) == list(emas)
    for name in emas:
        assert_same_weights(loaded.emas[name], saved.emas[name])
    for ours, theirs in zip(
        loaded.optimizer.state.values(), saved.optimizer.state.values(), strict=True
    ):
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("classes", "has_lists", "reason"),
    [
        (["cat", "lion"], False, "1 of its own, such as 'dog' and 1 new, such as 'lion'"),
        (["dog", "cat"], False, "the same in another order"),
        (["cat", "dog"], True, "one of the two has lists of labels"),
    ],
)
def test_rows_go_to_no_other_classes(
    classes: list[str], has_lists: bool, reason: str, tmp_path: Path
) -> None:
    """A class that was renamed or reordered got the row in its place, without a word."""
    path = save(tmp_path, 1)
    loaded = state_at(0, seed=1)
    loaded.classes, loaded.has_lists = classes, has_lists
    with raises("checkpoint.other-classes", path=path, reason=reason):
        load_checkpoint(loaded, path)
    assert loaded.step == 0
    assert_same_weights(loaded.model, state_at(0, seed=1).model)


def test_rates_and_decays_are_the_recipe_s(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    loaded = state_at(0, lr=0.5)
    loaded.optimizer.param_groups[0]["weight_decay"] = 0.25
    load_checkpoint(loaded, path)
    group = loaded.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)


def test_moments_take_the_layout_of_the_parameters(tmp_path: Path) -> None:
    """A fused kernel took those of channels_last weights for contiguous ones, number by number."""
    path = save(tmp_path, 1)
    loaded = state_at(0, seed=1)
    loaded.model.to(memory_format=torch.contiguous_format)
    load_checkpoint(loaded, path)
    for parameter, theirs in zip(
        loaded.model.parameters(), state_at(1, seed=1).optimizer.state.values(), strict=True
    ):
        momentum = loaded.optimizer.state[parameter]["momentum_buffer"]
        assert momentum.stride() == parameter.stride()
        assert torch.equal(momentum, theirs["momentum_buffer"])


def test_every_file_has_its_checksum(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert path == tmp_path / "step-00000001"
    assert names(path) == FILES
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest == {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest()
        for name in FILES
        if name != "manifest.json"
    }
    assert checkpoint.find_problem(path) is None
    checkpoint.check(path)


# --- complete or absent ---


CALLS = [
    "trainyard.training.saver.write_files",
    "trainyard.training.checkpoint.sha256",
    "os.fsync",
    "os.replace",
]


@pytest.mark.parametrize("tidies_up", [True, False], ids=["failed", "killed"])
@pytest.mark.parametrize("call", CALLS)
def test_cut_short_while_writing(
    call: str, tidies_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a checkpoint is none, and at the latest the next save removes it."""
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(call, kill)
        if not tidies_up:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            save(tmp_path, 2)
    assert (names(tmp_path) == ["latest", "step-00000001"]) == tidies_up
    assert newest_good(tmp_path) == ("step-00000001", [])
    assert os.readlink(tmp_path / "latest") == "step-00000001"
    save(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000003"]


def test_killed_before_latest_points_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is complete, and it is the newest that counts, not the link."""
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(saver, "point", kill)
        with pytest.raises(Killed):
            save(tmp_path, 2)
    assert newest_good(tmp_path) == ("step-00000002", [])
    save(tmp_path, 3)
    assert os.readlink(tmp_path / "latest") == "step-00000003"


def test_leftovers_of_links_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".latest.0123abcd.part").symlink_to("step-00000001")
    save(tmp_path, 1)
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "training.pt").unlink()
    save(tmp_path, 1)
    assert newest_good(tmp_path) == ("step-00000001", [])
    assert names(tmp_path) == ["latest", "step-00000001"]


@pytest.mark.parametrize("renamed", [1, 2])
def test_killed_while_one_of_the_same_step_is_replaced(
    renamed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with no other checkpoint goes on, from the old one or the new one."""
    save(tmp_path, 1)
    rename, calls = os.replace, iter(range(1, 9))

    def rename_and_be_killed(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name.strip(".").startswith("step-") and next(calls) == renamed:
            kill()

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", rename_and_be_killed)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            save(tmp_path, 1)
    saver.recover(tmp_path)
    assert newest_good(tmp_path) == ("step-00000001", [])
    save(tmp_path, 1)
    assert names(tmp_path) == ["latest", "step-00000001"]


@pytest.mark.parametrize("size", [0, 300, 900, 2000, 3000])  # model, training.pt, progress.json
def test_a_full_disk(size: int, tmp_path: Path) -> None:
    """One line with path and bytes, and nothing half-written; there is room again afterwards."""
    save(tmp_path, 1)
    state = state_at(2)
    with full_disk(size), raises("disk.full", path=tmp_path / "step-00000002") as caught:
        save_checkpoint(state, tmp_path, keep=5)
    assert f"{checkpoint.num_bytes(state):,} bytes" in str(caught.value)
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert newest_good(tmp_path) == ("step-00000001", [])
    save_checkpoint(state, tmp_path, keep=5)
    assert newest_good(tmp_path) == ("step-00000002", [])


# --- what is not ours ---


def is_file(path: Path) -> None:
    path.write_text("")


def is_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def is_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("entry", [is_file, is_dangling, is_link])
@pytest.mark.parametrize("step", [1, 4, 9])
def test_what_has_the_name_of_a_checkpoint_and_is_none(
    entry: Callable[[Path], None], step: int, tmp_path: Path
) -> None:
    """Saves go on, also at that very step; what a link leads to stays."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    entry(folder / f"step-{step:08d}")
    save(folder, 3, 4, 5, keep=2)
    assert {"step-00000004", "step-00000005"} <= set(names(folder))
    found, passed_over = newest_good(folder)
    assert found == "step-00000005"
    if entry is is_link:  # of a folder that is no checkpoint either: it is dropped as one is
        assert names(tmp_path / "elsewhere") == ["kept"]
    assert len(passed_over) == (entry is not is_link and step == 9)
    if passed_over:
        check(problem_of(folder / "step-00000009"), "checkpoint.not-a-folder")


def test_a_link_to_a_checkpoint_is_one(tmp_path: Path) -> None:
    """As where a disk was full, and it was put elsewhere."""
    moved = save(tmp_path / "checkpoints", 1).rename(tmp_path / "moved")
    (tmp_path / "checkpoints" / "step-00000001").symlink_to(moved)
    assert newest_good(tmp_path / "checkpoints") == ("step-00000001", [])
    save(tmp_path / "checkpoints", 2, keep=1)
    assert names(tmp_path / "checkpoints") == ["latest", "step-00000002"]
    assert checkpoint.find_problem(moved) is None


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        *(
            (lambda progress, key=key: {**progress, key: None}, key)
            for key in ("step", "skipped", "roll_backs", "guard", "clock", "classes", "best")
        ),
        *(
            (lambda progress, key=key, of=of: {**progress, key: of}, f"{key}.{inner}")
            for key, inner, of in (
                ("guard", "running", {"running": "x"}),
                ("clock", "total", {"total": [1]}),
                ("clock", "total", {"total": math.nan}),
                ("clock", "save", {"total": 1.0, "save": 1e99}),
                ("clock", "eval", {"total": 1.0, "eval": {}}),
                ("classes", "1", ["a", 2]),
                ("last", "step", {"step": "last"}),
                ("best", "top1", {"step": 1, "top1": [0.5]}),
                ("stream", "ends", {"ends": 3}),
            )
        ),
    ],
)
def test_a_progress_that_is_not_ours(
    change: Callable[[Any], Any], entry: str, tmp_path: Path
) -> None:
    """Passed over at each save, and named where it is wanted."""
    path = save(tmp_path, 1)
    progress = json.loads((path / "progress.json").read_text())
    (path / "progress.json").write_text(json.dumps(change(progress)))
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["latest", "step-00000002"]
    damaged = save(tmp_path, 3)
    (damaged / "progress.json").write_text(json.dumps(change(progress)))
    with raises("checkpoint.progress-incomplete", path=damaged) as caught:
        load_checkpoint(state_at(0), damaged)
    assert str(caught.value.fields["entry"]).startswith(entry)


@pytest.mark.parametrize("content", [[{}], None])
def test_a_progress_that_is_no_object(content: object, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "progress.json").write_text(json.dumps(content))
    with raises("checkpoint.file-unreadable", path=path, name="progress.json"):
        load_checkpoint(state_at(0), path)


def test_what_is_in_the_way_of_checkpoints(tmp_path: Path) -> None:
    saver.check_folder(tmp_path / "checkpoints")
    save(tmp_path / "checkpoints", 1)
    saver.check_folder(tmp_path / "checkpoints")
    copied = Path(shutil.copytree(tmp_path / "checkpoints", tmp_path / "copied"))
    with raises("run.link-is-a-folder", path=copied / "latest"):
        saver.check_folder(copied)
    (tmp_path / "file").touch()
    with raises("run.checkpoints-not-a-folder", path=tmp_path / "file"):
        saver.check_folder(tmp_path / "file")


# --- damage ---


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def pipe(path: Path) -> None:
    """Nobody writes into it: to read it is to wait for ever."""
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    """It has no end."""
    path.unlink()
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


DAMAGES = [truncate, empty, flip_a_bit, Path.unlink, pipe, device, loop, deep]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_a_damaged_one_is_taken(
    damage: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    last = save(tmp_path, 1, 2)
    damage(last / name)
    found, [problem] = newest_good(tmp_path)
    assert found == "step-00000001"
    assert str(last) in problem
    assert name.partition(".")[0] in problem  # a flip in the manifest may name another file
    if damage is Path.unlink:
        check(problem_of(last), "checkpoint.file-missing", path=last, name=name)
    with pytest.raises(CheckpointError):
        checkpoint.check(last)


@pytest.mark.parametrize("content", ["[]", "null", '"text"', "\0"])
def test_a_manifest_that_is_none(content: str, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_text(content)
    check(problem_of(path), "checkpoint.file-unreadable", path=path)


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
def test_a_manifest_that_lacks_a_file(name: str, tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with_right_checksums(path, [each for each in FILES if each != name])
    check(problem_of(path), "checkpoint.file-not-listed", path=path, name=name)


def test_a_checkpoint_in_the_folder_of_another_step(tmp_path: Path) -> None:
    """One of step 1, renamed to step 3, was taken for the newest."""
    save(tmp_path, 1, 2)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000003")
    assert newest_good(tmp_path)[0] == "step-00000002"
    check(problem_of(tmp_path / "step-00000003"), "checkpoint.renamed", step=1)
    aside = (tmp_path / "step-00000002").rename(tmp_path / "before the change")
    assert checkpoint.find_problem(aside) is None


def test_links_that_lead_to_themselves(tmp_path: Path) -> None:
    """They ended a run at its next save."""
    save(tmp_path, 1)
    for name in ("best", "latest"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(name)
    state = state_at(2)
    state.best = {"step": 2, "top1": 0.5}
    save_checkpoint(state, tmp_path, keep=1)
    assert names(tmp_path) == ["best", "latest", "step-00000002"]
    assert {os.readlink(tmp_path / name) for name in ("best", "latest")} == {"step-00000002"}


@pytest.mark.parametrize("content", [b"not torch's", b"PK\3\4 cut", {"scale": 1}, [1, 2]])
def test_a_training_file_that_is_not_ours(content: Any, tmp_path: Path) -> None:
    """torch explained how to load it with code in it: "Re-running `torch.load` with ... False"."""
    path = save(tmp_path, 1)
    if isinstance(content, bytes):
        (path / "training.pt").write_bytes(content)
    else:
        torch.save(content, path / "training.pt")
    with_right_checksums(path)
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(state_at(0), path)
    said = str(refused.value)
    assert refused.value.code in ("checkpoint.file-unreadable", "checkpoint.malformed-state")
    assert refused.value.fields["name"] == "training.pt"
    assert "\n" not in said and "weights_only" not in said and "False" not in said


def test_the_moving_average_is_checked_where_there_is_one(tmp_path: Path) -> None:
    path = save_checkpoint(state_at(1, emas=["ema"]), tmp_path, keep=1)
    assert names(path) == ["ema.safetensors", *FILES]
    assert "ema.safetensors" in json.loads((path / "manifest.json").read_text())
    checkpoint.check(path)
    flip_a_bit(path / "ema.safetensors")
    check(problem_of(path), "checkpoint.file-altered", path=path, name="ema.safetensors")
    with_right_checksums(path)  # of all the others
    check(problem_of(path), "checkpoint.file-not-listed", path=path, name="ema.safetensors")
    (path / "ema.safetensors").unlink()
    assert checkpoint.find_problem(path) is None  # as saved without one
    with raises("checkpoint.average-missing", path=path, name="ema.safetensors"):
        load_checkpoint(state_at(0, emas=["ema"]), path)
    load_checkpoint(state_at(0), path)


def test_all_damaged(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        truncate(save(tmp_path, step) / "model.safetensors")
    found, problems = newest_good(tmp_path)
    assert found is None
    assert [message.split("/")[-1].split(":")[0] for message in problems] == [
        *("step-00000003", "step-00000002", "step-00000001"),
    ]


def test_none_at_all(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "none") == (None, [])
    assert newest_good(tmp_path) == (None, [])
    check(problem_of(tmp_path / "none"), "checkpoint.not-found", path=tmp_path / "none")


def with_right_checksums(path: Path, files: Sequence[str] = FILES) -> None:
    manifest = {name: sha256(path / name) for name in files if name != "manifest.json"}
    (path / "manifest.json").write_text(json.dumps(manifest))


class Malicious:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.victim,)


def test_a_malicious_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    victim = tmp_path / "victim"
    torch.save({"optimizer": Malicious(victim)}, path / "training.pt")
    with_right_checksums(path)
    checkpoint.check(path)
    with raises("checkpoint.file-unreadable", path=path, name="training.pt") as refused:
        load_checkpoint(state_at(0), path)
    assert not victim.exists()
    assert "\n" not in str(refused.value)
    torch.load(path / "training.pt", weights_only=False)
    assert victim.exists()  # it would have


# --- a checkpoint of something else ---


def another_version(path: Path, state: TrainState) -> None:
    progress = json.loads((path / "progress.json").read_text())
    (path / "progress.json").write_text(json.dumps(progress | {"version": 99}))


def another_model(path: Path, state: TrainState) -> None:
    state.model = nn.Linear(16, 2)


def another_optimizer(path: Path, state: TrainState) -> None:
    state.optimizer = torch.optim.AdamW(state.model.parameters())


def fewer_parameters(path: Path, state: TrainState) -> None:
    state.optimizer = torch.optim.SGD(list(state.model.parameters())[1:], 0.1)


def fewer_saved_parameters(path: Path, state: TrainState) -> None:
    edit_optimizer(path, lambda saved: saved["param_groups"][0]["params"].remove("3.bias"))


def other_groups_and_no_names(path: Path, state: TrainState) -> None:
    edit_optimizer(path, with_numbers)
    groups = [{"params": [parameter]} for parameter in state.model.parameters()]
    state.optimizer = torch.optim.SGD(groups, 0.1)


def a_short_moment(path: Path, state: TrainState) -> None:
    def cut(saved: dict[str, Any]) -> None:
        moments = saved["state"]["0.weight"]
        moments["momentum_buffer"] = moments["momentum_buffer"][:1]

    edit_optimizer(path, cut)


def with_numbers(saved: dict[str, Any]) -> list[str]:
    """As 0.2.0 wrote a state: by position. Returns the names."""
    names = [name for group in saved["param_groups"] for name in group["params"]]
    saved["state"] = {names.index(name): moments for name, moments in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [names.index(name) for name in group["params"]]
    return names


def edit_optimizer(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    training = torch.load(path / "training.pt")
    edit(training["optimizer"])
    torch.save(training, path / "training.pt")


MISFIT = "checkpoint.optimizer-does-not-fit"


@pytest.mark.parametrize(
    ("change", "code", "fields"),
    [
        (another_version, "checkpoint.other-version", {"version": 99}),
        (another_model, "checkpoint.weights-do-not-fit", {}),
        (another_optimizer, "checkpoint.other-optimizer", {"found": "SGD", "wanted": "AdamW"}),
        (fewer_parameters, MISFIT, {"reason": "the recipe does not train 0.weight"}),
        (fewer_saved_parameters, MISFIT, {"reason": "its run did not train 3.bias"}),
        (
            other_groups_and_no_names,
            MISFIT,
            {"reason": "its groups of parameters have other sizes"},
        ),
        (
            a_short_moment,
            *(MISFIT, {"reason": "its momentum_buffer of 0.weight has the shape 1 x 3 x 3 x 3"}),
        ),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    change: Callable[[Path, TrainState], None],
    code: str,
    fields: dict[str, object],
    tmp_path: Path,
) -> None:
    path, state = save(tmp_path, 1), state_at(0)
    change(path, state)
    with raises(code, path=path, **fields) as refused:
        load_checkpoint(state, path)
    assert "\n" not in str(refused.value)


def in_groups(scaled: Sequence[int], name: str) -> TrainState:
    """Four equal layers, some of them with a learning rate of their own, after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), *(nn.Linear(48, 48, bias=False) for _ in range(4)))
    scales = tuple(f"{layer}.*: 0.1" for layer in scaled)
    keys = {"name": name, "lr": 0.05, "lr_scale": scales}
    state = state_of(model, build_optimizer(model, OptimConfig.model_validate(keys)))
    train(state, range(3))
    return state


def moments_of(state: TrainState) -> dict[str, Tensor]:
    return {
        f"{name} {key}": value
        for name, parameter in state.model.named_parameters()
        for key, value in state.optimizer.state[parameter].items()
    }


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_moments_go_to_the_parameters_of_their_names(name: str, tmp_path: Path) -> None:
    """By position they went to other ones, where groups of equal sizes had other members."""
    state = in_groups([1, 2], name)
    path = save_checkpoint(state, tmp_path)
    wanted = copy.deepcopy(moments_of(state))
    for resumed in (in_groups([], name), in_groups([1, 3], name)):
        load_checkpoint(resumed, path)
        assert_equal(moments_of(resumed), wanted)
    groups = resumed.optimizer.param_groups
    assert [group["lr_scale"] for group in groups] == [0.1, 1.0]
    assert [group.get("step") for group in groups] == [3 if name == "lamb" else None] * 2


def test_a_group_of_parameters_with_other_counts_is_refused(tmp_path: Path) -> None:
    """Schedule-free optimizers sum up the rates of a group."""
    pytest.importorskip("schedulefree")
    path = save_checkpoint(in_groups([1, 2], "schedule_free_sgd"), tmp_path)
    with raises("checkpoint.optimizer-does-not-fit", path=path):
        load_checkpoint(in_groups([1, 3], "schedule_free_sgd"), path)


@pytest.mark.parametrize("has_names", [False, True], ids=["0.2.0", "names beside them"])
def test_a_checkpoint_with_numbers_is_loaded(has_names: bool, tmp_path: Path) -> None:
    """By position if it has no names."""
    state = in_groups([1, 2], "adamw")
    path = save_checkpoint(state, tmp_path)

    def number(saved: dict[str, Any]) -> None:
        names = with_numbers(saved)
        saved |= {"names": names} if has_names else {}

    edit_optimizer(path, number)
    resumed = in_groups([1, 3] if has_names else [1, 2], "adamw")
    for moment in moments_of(resumed).values():
        moment.zero_()
    load_checkpoint(resumed, path)
    assert_equal(moments_of(resumed), moments_of(state))


# --- optimizers with more to save ---


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    keys = {"name": name, "lr": 0.05} | ({"accum_iter": 3} if name.startswith("accum") else {})
    return build_optimizer(model, OptimConfig.model_validate(keys))


def train(state: TrainState, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        backward(state.model)
        set_group_rates(state.optimizer, lr=0.05 * min(1, (step + 1) / 4), weight_decay=0.1)
        state.optimizer.step()
        state.step = step + 1


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_bit_by_bit(name: str, tmp_path: Path) -> None:
    """In a new process, and in one that has gone on and comes back."""
    if name.startswith("schedule_free"):
        pytest.importorskip("schedulefree")
    whole = model_of(0)
    train(state_of(whole, optimizer_of(whole, name)), range(12))
    model = model_of(0)
    state = state_of(model, optimizer_of(model, name))
    train(state, range(5))
    path = save_checkpoint(state, tmp_path, keep=1)
    train(state, range(5, 12))
    assert_same_weights(state.model, whole)  # to have saved changes nothing
    load_checkpoint(state, path)  # as after gradients that are not finite
    train(state, range(state.step, 12))
    assert_same_weights(state.model, whole)
    other = model_of(1)
    resumed = state_of(other, optimizer_of(other, name))
    load_checkpoint(resumed, path)
    assert resumed.step == 5
    train(resumed, range(5, 12))
    assert_same_weights(resumed.model, whole)


@pytest.mark.parametrize("name", ["schedule_free_sgd", "schedule_free_adamw"])
def test_what_is_exported_is_what_schedule_free_evaluates(name: str, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    model = model_of(0)
    state = state_of(model, optimizer_of(model, name))
    train(state, range(5))
    in_training = copy.deepcopy(model)
    path = save_checkpoint(state, tmp_path, keep=1)
    assert_same_weights(model, in_training)
    exported = checkpoint.load_weights(path)
    with evaluation_weights(state.optimizer):
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, exported[key])
    assert_same_weights(model, in_training)
    assert not torch.equal(exported["3.weight"], model.state_dict()["3.weight"])


def test_training_weights_come_back_when_an_evaluation_fails() -> None:
    pytest.importorskip("schedulefree")
    model = model_of(0)
    state = state_of(model, optimizer_of(model, "schedule_free_sgd"))
    train(state, range(3))
    before = copy.deepcopy(model)
    with pytest.raises(Killed), evaluation_weights(state.optimizer):
        kill()
    assert_same_weights(model, before)
    train(state, range(3, 4))  # and the optimizer is in training


def test_evaluation_weights_of_others_are_the_weights() -> None:
    state = state_at(1)
    before = [parameter.data_ptr() for parameter in state.model.parameters()]
    values = copy.deepcopy(state.model)
    with evaluation_weights(state.optimizer):
        assert_same_weights(state.model, values)
        assert [parameter.data_ptr() for parameter in state.model.parameters()] == before


# --- which are kept, and the links ---


@pytest.mark.parametrize("keep", [1, 3])
def test_the_best_is_kept(keep: int, tmp_path: Path) -> None:
    saver.point(tmp_path / "best", save(tmp_path, 1))
    save(tmp_path, 2, 3, 4, 5, keep=keep)
    kept = [f"step-{step:08d}" for step in range(6 - keep, 6)]
    assert names(tmp_path) == ["best", "latest", "step-00000001", *kept]
    checkpoint.check(tmp_path / "best")
    # A new best one frees the old.
    saver.point(tmp_path / "best", tmp_path / "step-00000005")
    save(tmp_path, 6, keep=keep)
    assert "step-00000001" not in names(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "keep", "kept"),
    [
        ([], [1, 2, 3, 4], 2, [3, 4]),
        # After a damaged newer one was passed over, and saving went on from the one before.
        ([5, 9], [6], 1, [6, 9]),
    ],
)
def test_the_newest_and_the_latest_are_kept(
    before: list[int], after: list[int], keep: int, kept: list[int], tmp_path: Path
) -> None:
    if before:
        save(tmp_path, *before)
    save(tmp_path, *after, keep=keep)
    assert names(tmp_path) == ["latest", *(f"step-{step:08d}" for step in kept)]
    assert os.readlink(tmp_path / "latest") == f"step-{after[-1]:08d}"


def test_a_copy_that_someone_set_aside_is_no_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 7), tmp_path / "step-00000007.bak")
    save(tmp_path, 8, 9, keep=2)
    assert names(tmp_path) == ["latest", "step-00000007.bak", "step-00000008", "step-00000009"]
    assert newest_good(tmp_path) == ("step-00000009", [])


def test_links_are_relative(tmp_path: Path) -> None:
    """So that a run directory may be moved."""
    folder = tmp_path / "checkpoints"
    saver.point(folder / "best", save(folder, 1))
    save(folder, 2)
    assert os.readlink(folder / "latest") == "step-00000002"
    assert os.readlink(folder / "best") == "step-00000001"
    folder.rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest" / "progress.json").is_file()
    assert (tmp_path / "moved" / "best" / "progress.json").is_file()


def test_a_link_is_moved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no moment without `latest`: the new link takes the old one's place."""
    save(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        with pytest.raises(Killed):
            saver.point(tmp_path / "latest", tmp_path / "step-00000001")
    assert os.readlink(tmp_path / "latest") == "step-00000002"
