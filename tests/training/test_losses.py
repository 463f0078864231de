"""Losses against torch's and timm's on targets written out, and against the papers' formulas."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from tests.data.batches import batch_of_images
from tests.data.tars import write_files
from tests.errors import raises
from tests.steps import mapped
from trainyard.config import check
from trainyard.data.batch import Batch
from trainyard.data.index.build import open_index
from trainyard.run.loss import class_weights
from trainyard.training.config import LossConfig
from trainyard.training.losses import as_teacher, build_loss

torch.set_num_threads(1)

B, C = 12, 5
Name = Literal["ce", "bce"]
TimmBce: Any = BinaryCrossEntropy
TimmSoftCe: Any = SoftTargetCrossEntropy


def logits_of(seed: int = 0, *, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(B, C, generator=torch.Generator().manual_seed(seed))


def batch_of(*, mixed: bool) -> Batch:
    """Labels with their reverse as partners: in the middle two of one class are mixed."""
    labels = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 1])
    lam = torch.rand(B, generator=torch.Generator().manual_seed(1)) if mixed else torch.ones(B)
    other = labels.flip(0) if mixed else labels
    images = torch.randn(B, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    return replace(batch_of_images(images, labels), mixed_labels=other, lam=lam)


def timms_targets(batch: Batch, smoothing: float) -> Tensor:
    targets: Tensor = mixup_target(batch.labels, C, batch.lam[:, None], smoothing)  # type: ignore[no-untyped-call]
    return targets


def each(loss: Any, logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample, of a loss that takes the mean."""
    return torch.stack([loss(logits[i : i + 1], targets[i : i + 1]) for i in range(B)])


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)


# --- lists of labels ---


@pytest.mark.parametrize("threshold", [None, 0.3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [True, False])
def test_several_labels_are_dense_targets(
    mixed: bool, smoothing: float, threshold: float | None
) -> None:
    """Mixed first, then moved towards 1/2; labels are numbers of lists, one of them empty."""
    lists = torch.tensor([[1, 0, 1, 0, 0], [0] * 5, [0, 1, 1, 1, 0], [1] * 5, [0, 0, 0, 0, 1]])
    logits, batch = logits_of(), batch_of(mixed=mixed)
    config = LossConfig(name="bce", bce_threshold=threshold, bce_sum=not mixed)
    loss = build_loss(
        config, smoothing, teacher=None, mixes=mixed, multi_hot=lists.float().__getitem__
    )
    lam = batch.lam[:, None]
    targets = lam * lists[batch.labels] + (1 - lam) * lists[batch.mixed_labels]
    targets = targets * (1 - smoothing) + smoothing / 2
    if threshold is not None:
        targets = (targets > threshold).float()
    dense = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    close(loss(logits, batch), dense.mean(dim=1) if mixed else dense.sum(dim=1))


# --- cross-entropy ---


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_an_unmixed_batch_is_torchs(smoothing: float, mixes: bool) -> None:
    logits, batch = logits_of(), batch_of(mixed=False)
    found = build_loss(LossConfig(), smoothing, teacher=None, mixes=mixes)(logits, batch)
    close(
        found,
        F.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=smoothing),
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_timms_on_its_mixed_targets(smoothing: float) -> None:
    logits, batch = logits_of(), batch_of(mixed=True)
    found = build_loss(LossConfig(), smoothing, teacher=None)(logits, batch)
    close(found, each(TimmSoftCe(), logits, timms_targets(batch, smoothing)))


@pytest.mark.parametrize("name", ["ce", "bce"])
def test_without_mixing_the_mixed_labels_are_not_looked_at(name: Name) -> None:
    batch = batch_of(mixed=False)
    nonsense = replace(batch, mixed_labels=batch.labels + 1000, lam=batch.lam + torch.nan)
    loss = build_loss(LossConfig(name=name), 0.1, teacher=None, mixes=False)
    assert torch.equal(loss(logits_of(), nonsense), loss(logits_of(), batch))


# --- class weights and the focal loss ---


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_cross_entropy_is_torchs(smoothing: float, mixed: bool) -> None:
    logits, batch, weights = logits_of(), batch_of(mixed=mixed), torch.rand(C)
    loss = build_loss(LossConfig(), smoothing, teacher=None, mixes=mixed, class_weights=weights)
    targets = timms_targets(batch, smoothing)
    close(loss(logits, batch), F.cross_entropy(logits, targets, weights, reduction="none"))


@pytest.mark.parametrize("weights", [None, torch.tensor([0.1, 2.0, 1.0, 0.5, 3.0])])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_focal_loss_is_its_formula(
    smoothing: float, mixed: bool, gamma: float, weights: Tensor | None
) -> None:
    """Lin et al. 2017, equation 5, on dense targets."""
    logits, batch = logits_of(), batch_of(mixed=mixed)
    config = LossConfig(name="focal", focal_gamma=gamma)
    loss = build_loss(config, smoothing, teacher=None, mixes=mixed, class_weights=weights)
    p = logits.softmax(dim=1)
    terms = timms_targets(batch, smoothing) * (1 - p) ** gamma * -p.log()
    expected = (terms if weights is None else terms * weights).sum(dim=1)
    torch.testing.assert_close(loss(logits, batch), expected, rtol=1e-5, atol=1e-5)


def test_a_certain_guess_has_a_finite_gradient() -> None:
    """The derivative of the root of 1 - p is infinite at p = 1."""
    logits = torch.zeros(B, C).index_fill(1, torch.tensor([0]), 200.0).requires_grad_()
    config = LossConfig(name="focal", focal_gamma=0.5)
    losses = build_loss(config, 0.1, teacher=None)(logits, batch_of(mixed=True))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"name": "bce", "class_weights": "balanced"}, "class_weights"),
        ({"focal_gamma": 1.0}, "focal_gamma"),
        ({"name": "focal", "bce_sum": True}, "bce_sum"),
        ({"class_weights": [1.0, -1.0]}, "class_weights"),
    ],
)
def test_keys_of_other_losses(keys: dict[str, Any], key: str) -> None:
    with raises("recipe.invalid-value", key=f"loss.{key}"):
        check({"loss": keys})


def test_class_weights_of_a_run(tmp_path: Path) -> None:
    numbers = tmp_path / "weights.txt"
    numbers.write_text("1\n2.5\n1e-1\n")
    (tmp_path / "data").mkdir()
    files = [
        f"{name}/{n}.jpg" for name, size in (("a", 6), ("b", 2), ("c", 1)) for n in range(size)
    ]
    index = open_index(write_files(tmp_path / "data", files))
    found = class_weights(LossConfig(class_weights="balanced"), index)
    labels = index.label.tolist()
    assert found == compute_class_weight("balanced", classes=np.arange(3), y=labels).tolist()
    assert class_weights(LossConfig(class_weights=str(numbers)), index) == [1, 2.5, 0.1]
    with raises("recipe.class-weights-wrong-count", num_weights=2, num_classes=3):
        class_weights(LossConfig(class_weights=(1.0, 2.0)), index)
    with raises("recipe.class-weights-zero"):
        class_weights(LossConfig(class_weights=(0.0, 0.0, 0.0)), index)
    numbers.write_text("1\nnan\n1\n")
    with raises("recipe.malformed-class-weight", path=numbers, line=2, value="nan"):
        class_weights(LossConfig(class_weights=str(numbers)), index)


# --- binary cross-entropy ---


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
@pytest.mark.parametrize("in_sum", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_binary_cross_entropy_is_timms(
    smoothing: float, threshold: float | None, in_sum: bool, mixed: bool
) -> None:
    logits, batch = logits_of(), batch_of(mixed=mixed)
    config = LossConfig(name="bce", bce_threshold=threshold, bce_sum=in_sum)
    timms = TimmBce(smoothing, target_threshold=threshold, sum_classes=in_sum)
    # Without mixing timm has the loss smooth the labels, with mixing mixup has done it before.
    targets = timms_targets(batch, smoothing) if mixed else batch.labels
    expected = each(timms, logits, targets)
    for mixes in {mixed, True}:
        close(build_loss(config, smoothing, teacher=None, mixes=mixes)(logits, batch), expected)


# --- distillation ---


def fixed_teacher(logits: Tensor) -> Any:
    return lambda images_BCHW: logits


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_soft_distillation_is_the_formula(share: float, temperature: float) -> None:
    """Touvron et al. 2021, eq. 2, term by term."""
    student, teacher, batch = logits_of(0), logits_of(1), batch_of(mixed=True)
    config = LossConfig(teacher="x", distillation_share=share, temperature=temperature)
    found = build_loss(config, 0.1, teacher=fixed_teacher(teacher))(student, batch)
    p = (teacher / temperature).exp()
    p /= p.sum(dim=1, keepdim=True)
    q = (student / temperature).exp()
    q /= q.sum(dim=1, keepdim=True)
    divergence = (p * (p / q).log()).sum(dim=1)
    base = build_loss(LossConfig(), 0.1, teacher=None)(student, batch)
    close(found, (1 - share) * base + share * temperature**2 * divergence)


def test_soft_distillation_from_oneself_is_nothing() -> None:
    config = LossConfig(teacher="x", distillation_share=1.0, temperature=2.0)
    loss = build_loss(config, 0.0, teacher=fixed_teacher(logits_of()))
    close(loss(logits_of(), batch_of(mixed=False)), torch.zeros(B))


@pytest.mark.parametrize("name", ["ce", "bce"])
def test_hard_distillation_is_the_formula(name: Name) -> None:
    """Touvron et al. 2021, eq. 3: half of the label, half of the teacher's guess."""
    student, teacher, batch = logits_of(0), logits_of(1), batch_of(mixed=True)
    config = LossConfig(name=name, teacher="x", distillation="hard")
    found = build_loss(config, 0.1, teacher=fixed_teacher(teacher))(student, batch)
    base = build_loss(LossConfig(name=name), 0.1, teacher=None)(student, batch)
    guesses = teacher.max(dim=1).indices
    wanted = student.log_softmax(dim=1)[torch.arange(B), guesses]
    close(found, base / 2 - wanted / 2)


LOSSES = {
    "ce": LossConfig(),
    "bce": LossConfig(name="bce"),
    "bce of a sum over a threshold": LossConfig(name="bce", bce_sum=True, bce_threshold=0.2),
    "soft": LossConfig(teacher="x", temperature=2.0),
    "hard": LossConfig(teacher="x", distillation="hard"),
}


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name: str, mixed: bool) -> None:
    batch = batch_of(mixed=mixed)
    batch = replace(batch, lam=batch.lam.double())
    config = LOSSES[name]
    teacher = fixed_teacher(logits_of(1).double()) if config.teacher else None
    loss = build_loss(config, 0.1, teacher=teacher, mixes=mixed)
    logits = logits_of().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, batch), (logits,))


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_no_value_is_read_from_the_device(name: str, mixed: bool) -> None:
    """On tensors of a GPU that have a shape but no values, where that raises."""
    config = LOSSES[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = mapped(batch_of(mixed=mixed), lambda tensor: tensor.to("cuda"))
        teacher = fixed_teacher(logits_of(1).to("cuda")) if config.teacher else None
        losses = build_loss(config, 0.1, teacher=teacher, mixes=mixed)(
            logits_of().to("cuda"), batch
        )
        assert (losses.device.type, losses.shape) == ("cuda", (B,))
        with pytest.raises(DataDependentOutputException):
            float(losses[0])


# --- the teacher ---


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, C)
    )


def test_a_teacher_is_frozen_and_evaluates() -> None:
    model, images = network(), batch_of(mixed=True).images_BCHW.requires_grad_()
    expected = model.eval()(images).detach()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    teacher = as_teacher(model.train(), None)
    for _ in range(2):
        found = teacher(images)
        assert torch.equal(found, expected)
        assert not found.requires_grad
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_teacher_computes_in_the_precision_given() -> None:
    model, images = network(), batch_of(mixed=True).images_BCHW
    exact, rough = as_teacher(model, None)(images), as_teacher(model, torch.bfloat16)(images)
    assert rough.dtype == torch.float32
    assert 0 < (exact - rough).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_gradients_reach_the_student_only(kind: str) -> None:
    batch = batch_of(mixed=True)
    model, student = network(), network()
    loss = build_loss(
        LossConfig.model_validate({"teacher": "x", "distillation": kind}),
        0.0,
        teacher=as_teacher(model, None),
    )
    torch.autograd.backward(loss(student(batch.images_BCHW), batch).sum())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


# --- keys that would do nothing are refused ---

REFUSED = [
    ({"bce_threshold": 0.2}, "bce_threshold", "name = bce"),
    ({"bce_sum": True}, "bce_sum", "name = bce"),
    ({"distillation": "hard"}, "distillation", "loss.teacher"),
    ({"distillation_share": 0.3}, "distillation_share", "loss.teacher"),
    ({"temperature": 2.0}, "temperature", "loss.teacher"),
    (
        {"teacher": "x", "distillation": "hard", "temperature": 2.0},
        *("temperature", 'loss.distillation = "soft"'),
    ),
]


@pytest.mark.parametrize(("keys", "key", "needed"), REFUSED, ids=str)
def test_keys_that_would_do_nothing_are_refused(
    keys: dict[str, Any], key: str, needed: str
) -> None:
    with raises("recipe.invalid-value", key=f"loss.{key}") as caught:
        check({"loss": keys})
    assert needed in str(caught.value.fields["reason"])


@pytest.mark.parametrize("keys", [{}, {"name": "bce"}, {"teacher": "x"}])
def test_a_recipe_that_is_written_out_in_full_can_be_read(keys: dict[str, Any]) -> None:
    config = check({"loss": keys})
    assert check(config.model_dump(mode="json", exclude_none=True)) == config
