"""Losses per sample of a micro-batch; the step takes their weighted mean."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainyard.data.batch import Batch
from trainyard.training.config import LossConfig
from trainyard.training.precision import autocast

Loss = Callable[[Tensor, Batch], Tensor]
"""Gives losses[B] for float32 logits[B, C] and their micro-batch."""
Teacher = Callable[[Tensor], Tensor]
"""images[B, C, H, W] to float32 logits[B, classes]."""
MultiHot = Callable[[Tensor], Tensor]
"""Numbers of lists of labels, int64[B], to float32 targets[B, classes]."""


def build_loss(
    config: LossConfig,
    smoothing: float,
    *,
    teacher: Teacher | None,
    mixes: bool = True,
    class_weights: Tensor | None = None,
    multi_hot: MultiHot | None = None,
) -> Loss:
    """A function from float32 logits[B, C] and their micro-batch to losses[B].

    `smoothing` spreads part of the targets over all classes, for bce too, as in timm. If `mixes`
    is false, mixed labels are ignored, and cross-entropy is torch's own. `class_weights[C]`, on the
    device of the logits, multiply each class's term; the teacher's term has none. With `multi_hot`,
    the labels are numbers of lists of labels, and the loss is bce.
    """
    if multi_hot is not None or config.name == "bce":
        loss = _bce_loss(config, targets_of(smoothing, mixes, multi_hot))
    else:
        gamma = config.focal_gamma if config.name == "focal" else 0.0
        loss = _cross_entropy(smoothing, mixes, class_weights, gamma)
    return loss if teacher is None else _distilled(config, loss, teacher)


def _cross_entropy(
    smoothing: float, mixes: bool, class_weights: Tensor | None, gamma: float
) -> Loss:
    """Cross-entropy with mixed, smoothed targets (timm's SoftTargetCrossEntropy), never dense.

    The sum over classes of target * weight * (1 - p)^gamma * -log p: for the target of a single
    class the focal loss of Lin et al. 2017, equation 5.
    """

    def plain(logits: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(
            logits,
            batch.labels,
            class_weights,
            reduction="none",
            label_smoothing=smoothing,
        )

    def mixed(logits: Tensor, batch: Batch) -> Tensor:
        terms = F.log_softmax(logits, dim=1)
        if gamma:
            # The root of 0 has no gradient.
            terms = terms * (-terms.expm1()).clamp(min=torch.finfo(terms.dtype).eps) ** gamma
        losses = F.nll_loss(terms, batch.labels, class_weights, reduction="none")
        if mixes:
            other = F.nll_loss(terms, batch.mixed_labels, class_weights, reduction="none")
            losses = batch.lam * losses + (1 - batch.lam) * other
        if smoothing:
            all_terms = terms if class_weights is None else terms * class_weights
            losses = (1 - smoothing) * losses - smoothing * all_terms.mean(dim=1)
        return losses

    return mixed if mixes or gamma else plain


def _bce_loss(config: LossConfig, targets_of: Loss) -> Loss:
    """A binary loss per class (Wightman et al. 2021), as timm's BinaryCrossEntropy."""

    def losses_of(logits: Tensor, batch: Batch) -> Tensor:
        targets = targets_of(logits, batch)
        if config.bce_threshold is not None:
            targets = (targets > config.bce_threshold).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return losses.sum(dim=1) if config.bce_sum else losses.mean(dim=1)

    return losses_of


def targets_of(smoothing: float, mixes: bool, multi_hot: MultiHot | None) -> Loss:
    """A function from [B, C] and a micro-batch to its targets, float[B, C]; see `build_loss`."""
    if multi_hot is None:
        return _single_targets(smoothing, mixes)
    return _several_targets(multi_hot, smoothing, mixes)


def _single_targets(smoothing: float, mixes: bool) -> Loss:
    """Targets[B, C] of one label per sample: the smoothing is spread over all classes."""

    def targets_of(logits: Tensor, batch: Batch) -> Tensor:
        targets = torch.zeros_like(logits)
        if mixes:
            targets.scatter_add_(1, batch.labels[:, None], batch.lam[:, None])
            targets.scatter_add_(1, batch.mixed_labels[:, None], 1 - batch.lam[:, None])
        else:
            targets.scatter_(1, batch.labels[:, None], 1.0)
        return targets.mul_(1 - smoothing).add_(smoothing / logits.shape[1])

    return targets_of


def _several_targets(multi_hot: MultiHot, smoothing: float, mixes: bool) -> Loss:
    """Targets[B, C] of any number of labels: each moves by the smoothing towards 1/2, as in Keras.

    Each class is a question of its own with two answers, over which the smoothing is spread.
    """

    def targets_of(logits: Tensor, batch: Batch) -> Tensor:
        targets = multi_hot(batch.labels)
        if mixes:
            targets = torch.lerp(multi_hot(batch.mixed_labels), targets, batch.lam[:, None])
        return targets.mul(1 - smoothing).add(smoothing / 2)

    return targets_of


def _distilled(config: LossConfig, loss: Loss, teacher: Teacher) -> Loss:
    """(1 - share) of `loss` plus `share` of the distance from the teacher.

    soft: temperature**2 times KL(teacher || student) of the softened probabilities, summed over
    the classes (Hinton et al. 2015; DeiT, eq. 2; its code also divides by their number). hard:
    cross-entropy with the teacher's top class (DeiT, eq. 3), not smoothed. Both use the logits of
    the classifier; there is no distillation token.
    """
    share, temperature = config.distillation_share, config.temperature

    def hard(logits: Tensor, teachers: Tensor) -> Tensor:
        return F.cross_entropy(logits, teachers.argmax(dim=1), reduction="none")

    def soft(logits: Tensor, teachers: Tensor) -> Tensor:
        student, target = (F.log_softmax(x / temperature, dim=1) for x in (logits, teachers))
        divergence = F.kl_div(student, target, reduction="none", log_target=True)
        return divergence.sum(dim=1) * temperature**2

    distance = hard if config.distillation == "hard" else soft

    def losses_of(logits: Tensor, batch: Batch) -> Tensor:
        teachers = teacher(batch.images_BCHW)
        return (1 - share) * loss(logits, batch) + share * distance(logits, teachers)

    return losses_of


def as_teacher(model: nn.Module, precision: torch.dtype | None) -> Teacher:
    """A function from images to float32 logits of the model, frozen and in evaluation mode.

    See Hinton et al. 2015, and Touvron et al. 2021, section 4.
    """
    model.eval().requires_grad_(False)

    def logits_of(images_BCHW: Tensor) -> Tensor:
        # Not inference_mode: the logits take part in the student's backward pass.
        with torch.no_grad(), autocast(images_BCHW.device, precision):
            logits: Tensor = model(images_BCHW)
        return logits.float()

    return logits_of
