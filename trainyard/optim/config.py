"""The [optim] and [schedule] sections of a recipe."""

import re
from collections.abc import Iterator
from inspect import signature
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from trainyard.course import Duration, SizeStage, Stage
from trainyard.errors import RecipeError
from trainyard.hints import did_you_mean
from trainyard.section import Section, refused

Beta = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]


def _checked_factor(text: str) -> str:
    if not re.fullmatch(r"\S+\s*:\s*\d+(\.\d+)?(e-?\d+)?", text.strip()):
        raise ValueError('write a pattern of parameter names and a factor: "head.*: 10"')
    return text


# Names that need no look into timm, whose import takes seconds.
NAMES = (
    *("sgd", "adam", "adamw", "lamb", "lars", "lion", "muon", "accum_adam", "accum_adamw"),
    *("schedule_free_sgd", "schedule_free_adamw"),
)
_THREE_BETAS = ("adan", "adanw", "cadan", "cadanw")
_RANDOM = "draws random numbers that no checkpoint has, so that a run would not resume exactly"
_REFUSED = {
    "adahessian": "needs second derivatives, which a step does not compute",
    **dict.fromkeys(("kron", "kronc", "kronw"), _RANDOM),
}


def optimizer_names() -> list[str]:
    """Names of the optimizers that a recipe can have: NAMES, and the other ones of timm.

    Those of apex and bitsandbytes, which timm knows by name, are not among them.
    """
    from timm.optim import get_optimizer_info, list_optimizers

    of_timm = [name for name in map(str, list_optimizers()) if name not in {*NAMES, *_REFUSED}]
    return [*NAMES, *(n for n in of_timm if isinstance(get_optimizer_info(n).opt_class, type))]


def _checked_name(name: str) -> str:
    if name in NAMES:
        return name
    if name in _REFUSED:
        raise ValueError(f"{_REFUSED[name]}: use another optimizer")
    if name not in (names := optimizer_names()):
        near = did_you_mean(name, names) or f": use one of {', '.join(names)}"
        raise ValueError(f"neither an optimizer of Trainyard nor of timm{near}")
    return name


_ADAMS = ("adam", "adamw", "lamb", "muon", "accum_adam", "accum_adamw", "schedule_free_adamw")

PatternFactor = Annotated[str, AfterValidator(_checked_factor)]


class OptimConfig(Section):
    TAKEN_BY: ClassVar = {
        "momentum": ("sgd", "lars", "muon"),
        "nesterov": ("sgd", "lars", "muon"),
        "betas": (*_ADAMS, "lion", "schedule_free_sgd"),
        "eps": (*_ADAMS, "lars"),
        "accum_iter": ("accum_adam", "accum_adamw"),
        "trust_coefficient": ("lars",),
        "trust_clip": ("lamb", "lars"),
        "bias_correction": ("lamb",),
        "schedule_free_r": ("schedule_free_sgd", "schedule_free_adamw"),
    }

    name: Annotated[str, AfterValidator(_checked_name)] = "sgd"
    """The optimizer: sgd, adam, adamw, lamb, lars, lion, muon, another one of timm such as nadamw,
    adan or adopt, accum_adam, accum_adamw, schedule_free_sgd or schedule_free_adamw. Keys below
    that are not set have the default of the optimizer's library; keys that it does not have are
    refused."""
    lr: float = Field(0.1, gt=0)
    """Peak learning rate for the whole global batch; no automatic scaling."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay. Norms, biases and other vectors have none by default; see `decay`."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """Momentum. If not set: 0.95 for muon, else 0.9."""
    nesterov: bool | None = None
    """Nesterov momentum of sgd (not by default), lars and muon. With muon, vectors, position
    embeddings, depthwise kernels and the classifier then use NAdamW instead of AdamW."""
    betas: tuple[Beta, Beta] | tuple[Beta, Beta, Beta] | None = None
    """Decay rates of the moments, three for adan; schedule_free_sgd uses only the first. If not
    set: 0.9 and 0.999 for adam, adamw and lamb, 0.9 and 0.99 for lion."""
    eps: float | None = Field(None, gt=0)
    """Added to the denominator. If not set: 1e-8 for adam and adamw, 1e-6 for lamb."""
    accum_iter: int = Field(4, ge=1)
    """Steps between two updates of the moments, for accum_adam and accum_adamw."""
    trust_coefficient: float | None = Field(None, gt=0)
    """Factor of lars' trust ratio; 1e-3 if not set."""
    trust_clip: bool | None = None
    """Clip the trust ratio of lamb at 1. For lars, clip as LARC does: the smaller of trust ratio
    and learning rate takes the place of their product."""
    bias_correction: bool | None = None
    """Bias correction of the moments, for lamb; true if not set."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay: matrices and kernels, unless the model exempts them, or all."""
    decay_scale: tuple[PatternFactor, ...] = ()
    """Factors of the weight decay by parameter name: ["*.gamma: 0", "head.*: 2"]. The last match
    applies and overrides `decay`."""
    lr_scale: tuple[PatternFactor, ...] = ()
    """Factors of the learning rate by parameter name: ["stem.*: 0.1"]. The last match applies, in
    addition to `backbone_lr` and `layer_decay`."""
    backbone_lr: float = Field(1.0, ge=0)
    """Factor of the learning rate of all layers except the classifier."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Factor of the learning rate from each layer (as timm groups them) to the previous one."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest norm of the whole gradient; no clipping if not set."""
    clip_agc: float | None = Field(None, gt=0)
    """Adaptive clipping (Brock et al. 2021): largest norm of a unit's gradient, as a share of the
    norm of its weight. The classifier is not clipped."""
    schedule_free_r: float = Field(0.0, ge=0)
    """Power of the step number in the weights of a schedule-free average (`r` of the package);
    above 0, late steps count more."""
    compile: bool = False
    """Compile the update with torch.compile."""

    @classmethod
    def keys_of_others(cls, name: str) -> set[str]:
        """Keys that an optimizer, also of timm's, does not take; none for an unknown one."""
        if name in NAMES:
            return super().keys_of_others(name)
        if name not in optimizer_names():
            return set()
        from timm.optim import get_optimizer_class

        taken = signature(get_optimizer_class(name, bind_defaults=False)).parameters
        in_timm = {"trust_coefficient": "trust_coeff"}
        return {key for key in cls.TAKEN_BY if in_timm.get(key, key) not in taken}

    @field_validator("nesterov")
    @classmethod
    def _has_momentum(cls, nesterov: bool | None, others: ValidationInfo) -> bool | None:
        if nesterov and others.data.get("momentum") == 0:
            raise ValueError("needs optim.momentum above 0")
        return nesterov

    @field_validator("betas")
    @classmethod
    def _fit(cls, betas: tuple[float, ...] | None, others: ValidationInfo) -> object:
        name = str(others.data.get("name"))
        if betas is None:
            return None
        if betas[0] == 0 and name.startswith("schedule_free"):
            raise ValueError("the first must be above 0 for a schedule-free optimizer")
        if len(betas) != (count := 3 if name in _THREE_BETAS else 2):
            raise ValueError(f"{name} takes {count}")
        return betas

    @field_validator("clip_agc")
    @classmethod
    def _clips_once(cls, clip_agc: float | None, others: ValidationInfo) -> float | None:
        if clip_agc is not None and others.data.get("clip_norm") is not None:
            raise ValueError("optim.clip_norm is set too: use only one of them")
        return clip_agc

    @field_validator("compile")
    @classmethod
    def _compiles(cls, compile: bool, others: ValidationInfo) -> bool:
        name = str(others.data.get("name"))
        if compile and name.startswith(("accum", "schedule_free")):
            raise ValueError(f"an update of {name} counts its steps in ways that do not compile")
        return compile

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        """A schedule-free optimizer excludes a schedule, and averages of weights."""
        if not self.name.startswith("schedule_free"):
            return
        schedule, averager = recipe.schedule.name, recipe.average.name
        setting = f"optim.name = {self.name!r}, which replaces a schedule,"
        hint = "set schedule.name = 'constant'; schedule.warmup may stay"
        other = f"schedule.name = {schedule!r}"
        yield from refused({setting: schedule != "constant"}, other, hint)
        has_own_weights = averager not in ("allreduce", "sharded")
        others = "which evaluates other weights than the ones that replicas average"
        other = f"optim.name = {self.name!r}, {others}"
        hint = "use another optimizer, or average.name = 'allreduce'"
        yield from refused({f"average.name = {averager!r}": has_own_weights}, other, hint)


class ScheduleConfig(Section):
    TAKEN_BY: ClassVar = dict.fromkeys(
        ("decay", "min_lr", "warmup_prefix"), ("cosine", "linear", "sqrt")
    ) | dict.fromkeys(("milestones", "gamma"), ("step",))
    NEEDS = (
        ("warmup_from", "warmup"),
        ("warmup_ends", "warmup"),
        ("warmup_prefix", "warmup"),
    )

    name: Literal["cosine", "linear", "sqrt", "step", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up. sqrt: 1 minus the square root of progress, a
    good cooldown (Hägele et al. 2024)."""
    per: Literal["step", "epoch"] = "step"
    """Update rates in every step, or once per epoch."""
    warmup: Duration = "0 steps"
    """Length of the linear warm-up to `optim.lr`. A shorter run ends during the warm-up."""
    warmup_from: Share = 0.0
    """Share of `optim.lr` at the start of the warm-up."""
    warmup_ends: Literal["first", "both", "neither"] = "first"
    """Ends of the ramp that belong to the warm-up steps: the first (torch, timm), both (ConvNeXt)
    or neither (Colossal-AI)."""
    warmup_prefix: bool = True
    """Begin the decay after the warm-up. If false, it begins with the run, and the warm-up covers
    its first part (timm's default)."""
    decay: Duration | None = None
    """Length of the decay of cosine, linear and sqrt at the end of the run, after a constant rate
    (warm-up, stable, decay); from the warm-up to the end if not set."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of cosine, linear and sqrt."""
    milestones: tuple[Duration, ...] = Field((), validate_default=True)
    """Times at which the schedule `step` multiplies the learning rate by `gamma`."""
    gamma: float = Field(0.1, gt=0, le=1)
    """Factor of the schedule `step`."""
    weight_decay_end: float | None = Field(None, ge=0)
    """Weight decay at the end of the run, on a half cosine from `optim.weight_decay`; constant if
    not set."""
    drop_path_start: float | None = Field(None, ge=0, lt=1)
    """Drop path in the first epoch, with a linear rise to `model.drop_path` in the last; constant
    if not set."""
    image_size: tuple[SizeStage, ...] = ()
    """Later image sizes (progressive resizing), after `data.image_size`:
    ["6 epochs: 160", "12 epochs: 192"]; of rectangles: ["6 epochs: [128, 256]"]."""
    batch_size: tuple[Stage, ...] = ()
    """Later global batch sizes, after `batch.size`: ["30 epochs: 4096"]."""

    @field_validator("milestones")
    @classmethod
    def _has_milestones(cls, milestones: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if info.data.get("name") == "step" and not milestones:
            raise ValueError('schedule.name = "step" needs some: ["30 epochs", "60 epochs"]')
        return milestones

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        """Rates that change a compiled update or model in every step or epoch."""
        if self.weight_decay_end is not None and recipe.optim.compile:
            yield RecipeError(
                "recipe.weight-decay-end-compiled",
                "{key} changes the update in every step, which would recompile it every time: set "
                "optim.compile = false",
                key="schedule.weight_decay_end",
            )
        if self.drop_path_start is not None and recipe.model.compile not in ("off", "auto"):
            yield RecipeError(
                "recipe.drop-path-start-compiled",
                "{key} changes the model in every epoch, which would recompile it every time: set "
                "model.compile = 'off'",
                key="schedule.drop_path_start",
            )
