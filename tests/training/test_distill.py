"""Runs that distil from a run or a checkpoint, and teachers that are refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.command_line import SHORT, newest, run
from tests.errors import check, raises, refused
from tests.runs import curve, hooked
from trainyard.config import RunConfig, load_recipe
from trainyard.course import build_course
from trainyard.errors import TrainyardError
from trainyard.files import RunDirectory
from trainyard.image_size import height_width
from trainyard.run.loss import build_teacher, files_of_loss
from trainyard.run.model import build_run_model
from trainyard.training.config import LossConfig
from trainyard.training.step import TrainStep

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

CLASSES = [str(number) for number in range(10)]


def recipe(teacher: Path, **changes: str) -> RunConfig:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return load_recipe("debug", {"loss.teacher": str(teacher)} | keys)


def teacher(config: RunConfig, classes: list[str] = CLASSES, sizes: tuple[str, ...] = ()) -> Any:
    course = build_course(
        config.run.length,
        epoch_samples=1000,
        batch=config.batch.size,
        image_size=config.data.image_size,
        size_stages=sizes,
    )
    return build_teacher(config, classes=classes, course=course, device=torch.device("cpu"))


def images_of(config: RunConfig) -> torch.Tensor:
    size = height_width(config.data.image_size)
    return torch.randn(4, 3, *size, generator=torch.Generator().manual_seed(0))


def logits_of(config: RunConfig, weights: Path) -> torch.Tensor:
    """Of a model of the recipe with the weights of a file."""
    model = build_run_model(config, 10)
    model.load_state_dict(load_file(weights))
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(images_of(config))
    return logits


def trained(digits: Path, folder: Path, *options: object) -> Path:
    words = ("train", "debug", "--data", digits, "--run", folder, *SHORT, "--json")
    assert run(*words, *options) == 0
    return folder


# --- which weights ---


@pytest.mark.quick
def test_the_files_of_a_loss_are_told_apart(tmp_path: Path) -> None:
    """And each checkpoint records them: a teacher that still trains is another one later."""
    checkpoints, weights = tmp_path / "run" / "checkpoints", tmp_path / "weights.txt"
    for step in ("step-1", "step-2"):
        (checkpoints / step).mkdir(parents=True)
        (checkpoints / step / "manifest.json").write_text(step)
    found = []
    for step in ("step-1", "step-2", "step-1"):
        (checkpoints / "best").unlink(missing_ok=True)
        (checkpoints / "best").symlink_to(step)
        weights.write_text(f"1\n2 {step}\n")
        config = LossConfig(teacher=str(tmp_path / "run"), class_weights=str(weights))
        found.append(files_of_loss(config))
    assert found[0] == found[2] and found[0].keys() == {"loss.teacher", "loss.class_weights"}
    assert all(found[0][key] != found[1][key] for key in found[0])
    assert found[1]["loss.teacher"].startswith("step-2/manifest.json ")
    assert files_of_loss(LossConfig(teacher="resnet18", class_weights="balanced")) == {}


@pytest.mark.parametrize("by", ["run", "checkpoint"])
def test_a_teacher_is_a_run_or_one_of_its_checkpoints(by: str, finished: Path) -> None:
    config = recipe(finished if by == "run" else newest(finished))
    found = teacher(config)(images_of(config))
    assert torch.equal(found, logits_of(config, newest(finished) / "model.safetensors"))


def test_a_teacher_is_the_moving_average_where_there_is_one(digits: Path, tmp_path: Path) -> None:
    folder = trained(digits, tmp_path / "run", "--model.ema_decay", "0.5")
    config = recipe(folder)
    found = teacher(config)(images_of(config))
    averaged = logits_of(config, newest(folder) / "ema.safetensors")
    assert torch.equal(found, averaged)
    assert not torch.equal(found, logits_of(config, newest(folder) / "model.safetensors"))


def test_a_teacher_can_be_another_model(digits: Path, tmp_path: Path) -> None:
    folder = trained(digits, tmp_path / "run", "--model.name", "test_resnet")
    own = load_recipe(str(RunDirectory(folder).recipe))
    config = recipe(folder)
    assert config.model.name == "test_vit"
    found = teacher(config, sizes=("50%: 64",))(images_of(config))
    assert torch.equal(found, logits_of(own, newest(folder) / "model.safetensors"))


@pytest.fixture(scope="module")
def published() -> dict[str, torch.Tensor]:
    """Weights of another program, for 1,000 classes."""
    torch.manual_seed(7)
    return dict(timm.create_model("test_resnet").state_dict())


THOUSAND = [f"n{number:08d}" for number in range(1000)]
IMAGENET = {"data__mean": "[0.5, 0.5, 0.5]", "data__std": "[0.5, 0.5, 0.5]"}  # test_resnet's


def check_reason(error: TrainyardError, code: str, **fields: object) -> None:
    """Want an error of the teacher's own inside."""
    reason = error.fields["error"]
    assert isinstance(reason, TrainyardError)
    check(reason, code, **fields)


def expected_of(published: dict[str, torch.Tensor], config: RunConfig) -> torch.Tensor:
    model = timm.create_model("test_resnet").eval()
    model.load_state_dict(published)
    with torch.no_grad():
        logits: torch.Tensor = model(images_of(config))
    return logits


def test_a_teacher_can_be_timms(
    published: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = "load_state_dict_from_hf"
    monkeypatch.setattr(timm.models._builder, hub, lambda *_, **__: published)
    config = recipe(Path("test_resnet"), **IMAGENET)
    found = teacher(config, THOUSAND)(images_of(config))
    torch.testing.assert_close(found, expected_of(published, config), rtol=1e-4, atol=1e-5)
    with raises("teacher.classifier-unusable", value="test_resnet"):
        teacher(config, CLASSES)
    with raises("teacher.pixels-differ", value="test_resnet", key="data.mean"):
        teacher(recipe(Path("test_resnet")), THOUSAND)

    def fails(*_: object, **__: object) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr(timm.models._builder, hub, fails)
    with raises("teacher.unusable") as caught:
        teacher(config, THOUSAND)
    check_reason(caught.value, "weights.not-downloaded", reason="no route to the hub")


def test_a_teacher_can_be_a_file(published: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"model": published}, file)
    config = recipe(file, loss__teacher_model="test_resnet")
    found = teacher(config, THOUSAND)(images_of(config))
    torch.testing.assert_close(found, expected_of(published, config), rtol=1e-4, atol=1e-5)
    with raises("teacher.without-model", path=file):
        teacher(recipe(file), THOUSAND)


# --- a run ---


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_run_learns_from_its_teacher(
    kind: str, digits: Path, finished: Path, tmp_path: Path
) -> None:
    """Two steps, whose losses are the written-out formula's on their mixed images."""
    taught = teacher(recipe(finished))
    expected = []

    def note(self: TrainStep, batch: Any, step: int) -> None:
        with torch.no_grad():
            student = F.log_softmax(self.passes.model(batch.images_BCHW), dim=1)
            guess = F.log_softmax(taught(batch.images_BCHW), dim=1)
        rows = torch.arange(len(student))
        base = -batch.lam * student[rows, batch.labels]
        base -= (1 - batch.lam) * student[rows, batch.mixed_labels]
        soft = (guess.exp() * (guess - student)).sum(dim=1)
        hard = -student[rows, guess.argmax(dim=1)]
        loss = 0.3 * base + 0.7 * (soft if kind == "soft" else hard)
        expected.append(loss.mean().item())

    keys = ("--loss.teacher", finished, "--loss.distillation", kind)
    more = ("--loss.distillation_share", "0.7", "--augment.mixup", "0.8")
    with hooked(before=note):
        trained(digits, tmp_path / "run", *keys, *more, "--augment.label_smoothing", "0")
    losses = [loss for (loss,) in curve(tmp_path / "run", "train", "loss").values()]
    assert len(losses) == 2
    assert losses == pytest.approx(expected, rel=1e-5)


# --- refused ---


@pytest.mark.parametrize(
    ("classes", "number", "found", "wanted"),
    [
        (["0", "1", "two", *CLASSES[3:]], 2, "2", "two"),
        (CLASSES[:9], 9, "9", None),
        ([*CLASSES, "ten"], 10, None, "ten"),
        (["1", "0", *CLASSES[2:]], 0, "0", "1"),
    ],
)
def test_a_teacher_of_other_classes_is_refused(
    classes: list[str], number: int, found: str | None, wanted: str | None, finished: Path
) -> None:
    with raises("teacher.class-differs", number=number, found=found, wanted=wanted):
        teacher(recipe(finished), classes)


def test_a_teacher_of_another_size_is_refused(digits: Path, tmp_path: Path) -> None:
    folder = trained(digits, tmp_path / "run", "--model.name", "test_vit3")  # takes one size only
    config = recipe(folder)
    size = config.data.image_size
    assert teacher(config)(images_of(config)).shape == (4, 10)
    with raises("teacher.size-not-accepted", height=2 * size, width=2 * size):
        teacher(recipe(folder, data__image_size=str(2 * size)))
    with raises("teacher.size-not-accepted", height=2 * size, width=2 * size):
        teacher(config, sizes=(f"50%: {2 * size}",))


def test_a_teacher_of_otherwise_normalised_images_is_refused(finished: Path) -> None:
    config = recipe(finished, data__mean="[0.1, 0.2, 0.3]")
    with raises("teacher.pixels-differ", key="data.mean"):
        teacher(config)


def test_a_damaged_teacher_is_refused(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))
    path = newest(folder) / "model.safetensors"
    weights = load_file(path)
    save_file({name: value + 1 for name, value in weights.items()}, path)
    with raises("teacher.unusable") as caught:
        teacher(recipe(folder))
    check_reason(caught.value, "checkpoint.file-altered")


def test_a_run_says_what_is_wrong_with_its_teacher(digits: Path, tmp_path: Path) -> None:
    words = ("train", "debug", "--data", digits, "--run", tmp_path / "run", *SHORT)
    error = refused(*words, "--loss.teacher", tmp_path)
    check(error, "teacher.unusable")
    check_reason(error, "checkpoint.wrong-path", path=tmp_path)
