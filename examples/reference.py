"""A training in one file: what `trainyard train` computes on CPUs, to the last bit.

    trainyard recipes digits > recipe.toml    # complete; so is the recipe.toml of a run
    python examples/reference.py recipe.toml OUTPUT
    torchrun --nproc-per-node 2 examples/reference.py recipe.toml OUTPUT

Read it from top to bottom. It is plain PyTorch and timm with Trainyard's random numbers, crops and
image decoder, without its loader process, checkpoints, restarts and searches for memory. It reads
image folders, and ends at a key that it does not know. OUTPUT gets metrics.jsonl and
model.safetensors; tests/test_reference.py compares both with those of `trainyard train`.
"""

import copy
import hashlib
import json
import math
import os
import sys
import tomllib
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from timm.optim.lamb import Lamb
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainyard.config import RunConfig
from trainyard.data._native import own_decoder
from trainyard.data.decode.crops import CentralCrop, RandomResizedCrop
from trainyard.data.decode.decode import decode_batch
from trainyard.data.rng import fold_in, permute, uniforms

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MIX, TRANSLATION = 8, 13  # streams: uses of a seed that are independent
Ints = NDArray[np.int64]
Recipe = dict[str, Any]  # by section.key

# --- the recipe, its random numbers, and the order of samples ---

# Keys that this file computes, some of them for a few values alone, and keys that change no weight.
# All others have their defaults.
KNOWN = """
model.name model.options model.drop_path model.ema_decay data.train data.val data.image_size=[0-9]*
data.eval_size=[0-9]* data.crop_pct data.channels data.mean data.std data.interpolation
augment.scale augment.ratio augment.flip augment.flip_mode augment.translate augment.mixup
augment.cutmix augment.mix_prob augment.switch_prob augment.label_smoothing optim.name=sgd
optim.name=lamb optim.name=adam optim.name=adamw optim.name=accum_adam optim.lr optim.weight_decay
optim.momentum optim.nesterov optim.betas optim.eps optim.accum_iter optim.trust_clip
optim.bias_correction optim.decay optim.lr_scale optim.clip_norm schedule.name=cosine
schedule.name=linear schedule.name=constant schedule.per schedule.warmup schedule.warmup_from
schedule.warmup_ends schedule.min_lr batch.size batch.micro batch.precision=fp32
batch.precision=bf16 average.name=allreduce average.name=gossip
average.topology=one-peer-exponential run.length run.seed run.eval_every run.log_every
run.save_every run.keep run.best_by run.max_* run.hang_timeout watch.* data.threads data.max_bad
"""


def read_recipe(path: Path) -> Recipe:
    tree, usual = tomllib.loads(path.read_text()), RunConfig().model_dump(mode="json")
    recipe = {f"{section}.{key}": v for section, keys in tree.items() for key, v in keys.items()}
    for key, value in recipe.items():
        section, _, name = key.partition(".")
        if value != usual.get(section, {}).get(name) and not any(
            fnmatchcase(text, known) for text in (key, f"{key}={value}") for known in KNOWN.split()
        ):
            sys.exit(f"{path}: {key} = {value!r} is not known here")
    recipe["mixes"] = bool(recipe["augment.mixup"] or recipe["augment.cutmix"])
    return recipe


def keyed(recipe: Recipe, stream: int, *parts: Ints | list[int]) -> NDArray[np.uint64]:
    """A key for each element of columns of integers."""
    return fold_in(recipe["run.seed"], *np.atleast_1d(np.full_like(parts[0], stream), *parts))


def order(seed: int, num_samples: int, positions: Ints) -> tuple[Ints, Ints]:
    """Sample ids and epochs at positions of a stream of epochs without an end.

    Step t takes the positions from t * batch on, and rank r of R every R-th of them, from the r-th.
    """
    epochs = positions // num_samples
    return permute(positions % num_samples, fold_in(seed, epochs), num_samples), epochs


# --- images ---


class Images:
    """A folder of images, CLASS/NAME; classes, and the images of each, in the order of names."""

    def __init__(self, folder: str) -> None:
        self.classes = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        in_class = [sorted((Path(folder) / name).iterdir()) for name in self.classes]
        self.paths = [path for paths in in_class for path in paths]
        self.label = np.repeat(np.arange(len(in_class)), [len(paths) for paths in in_class])

    def pixels(self, recipe: Recipe, ids: Ints, epochs: Ints | None = None) -> Tensor:
        """uint8[B, H, W, C]: random crops, or central ones without epochs.

        The decoder rounds pixels once, where Pillow does at each of its passes.
        """
        side, how = recipe["data.image_size"], recipe["data.interpolation"]
        if epochs is None:
            side = recipe.get("data.eval_size") or side
            crops: Any = CentralCrop(side, recipe["data.crop_pct"])
        else:
            scale, ratio, flip = (recipe[f"augment.{key}"] for key in ("scale", "ratio", "flip"))
            alternates = recipe["augment.flip_mode"] == "alternating"
            crops = RandomResizedCrop(recipe["run.seed"], scale, ratio, flip, alternates)
        pixels_BHWC = np.empty((len(ids), side, side, recipe["data.channels"]), np.uint8)
        files = [self.paths[sample].read_bytes() for sample in ids.tolist()]
        drawn, decoder = crops.draw(ids, epochs), own_decoder()
        if bad := decode_batch(files, drawn, pixels_BHWC, how, decoder=decoder):
            sys.exit(f"{[str(self.paths[ids[row]]) for row in bad]} cannot be read")
        return torch.from_numpy(pixels_BHWC)


def translated(recipe: Recipe, pixels_BHWC: Tensor, ids: Ints, epochs: Ints) -> Tensor:
    """Images moved down and to the right by up to N pixels; borders are reflected."""
    most, last = recipe["augment.translate"], pixels_BHWC.shape[1] - 1
    if not most:
        return pixels_BHWC
    u = uniforms(keyed(recipe, TRANSLATION, epochs, ids), 2)
    moves = torch.from_numpy(np.floor(u * (2 * most + 1)).astype(np.int64) - most)
    moved = torch.arange(last + 1) + moves[:, :, None]
    rows, columns = (last - (last - moved.abs()).abs()).unbind(1)
    return pixels_BHWC[torch.arange(len(ids))[:, None, None], rows[:, :, None], columns[:, None]]


def normalised(recipe: Recipe, pixels_BHWC: Tensor) -> Tensor:
    """Images[B, C, H, W], channels last in memory: float32, or bf16 if it is the precision."""
    shift = torch.tensor(recipe["data.mean"]) * 255
    scale = (torch.tensor(recipe["data.std"]) * 255).reciprocal()
    images_BCHW = ((pixels_BHWC.float() - shift) * scale).permute(0, 3, 1, 2)
    return images_BCHW.bfloat16() if recipe["batch.precision"] == "bf16" else images_BCHW


class Batch(NamedTuple):
    """A rank's part of a global batch."""

    images_BCHW: Tensor
    labels: Tensor
    others: Tensor  # labels of the images that are mixed in
    share: Tensor  # float32[B], of the own label


def mixed(recipe: Recipe, images_BCHW: Tensor, labels: Tensor, position: int) -> Batch:
    """mixup or CutMix of a batch and itself in reverse order, by one draw for all ranks."""
    u = uniforms(keyed(recipe, MIX, [position]), 6)[0]
    is_cut = u[1] < (recipe["augment.switch_prob"] if recipe["augment.mixup"] else 1)
    is_cut &= recipe["augment.cutmix"] > 0
    # A draw from Beta(alpha, alpha) by Bailey's method (Devroye 1996).
    alpha = recipe["augment.cutmix" if is_cut else "augment.mixup"]
    power, cosine = u[2] ** (1 / alpha), np.cos(2 * np.pi * u[3])
    root = np.sqrt((1 - power) / (power + (1 - power) * cosine**2))
    drawn = float(np.clip((1 + cosine * root) / 2, 0, 1))
    share = drawn if u[0] < recipe["augment.mix_prob"] else 1.0
    side, partners_BCHW = images_BCHW.shape[2], images_BCHW.flip(0)
    if is_cut:
        cut, (y, x) = int(side * np.sqrt(1 - share)), (side * u[4:]).astype(int)
        (top, left), (bottom, right) = (
            [min(max(centre + half, 0), side) for centre in (y, x)]
            for half in (-(cut // 2), (cut + 1) // 2)
        )
        share = 1 - (bottom - top) * (right - left) / side**2
        images_BCHW[:, :, top:bottom, left:right] = partners_BCHW[:, :, top:bottom, left:right]
    elif share < 1:
        kept = torch.tensor(share, dtype=torch.float32)
        images_BCHW = images_BCHW * kept + partners_BCHW * (1 - kept)
    return Batch(images_BCHW, labels, labels.flip(0), torch.full((len(labels),), float(share)))


# --- model and optimizer ---


def build_model(recipe: Recipe, data: Images) -> Any:
    """A fresh timm model; the seed is set before it, and nothing in between draws a number."""
    import trainyard.model.whitened_convnet  # noqa: F401  # timm learns the name of one more

    options = {"num_classes": len(data.classes), **recipe["model.options"]}
    options |= {"in_chans": recipe["data.channels"]} if recipe["data.channels"] != 3 else {}
    options |= {"drop_path_rate": recipe["model.drop_path"]} if "model.drop_path" in recipe else {}
    if getattr(timm.get_pretrained_cfg(recipe["model.name"]), "fixed_input_size", False):
        options["img_size"] = recipe["data.image_size"]
    torch.manual_seed(recipe["run.seed"])
    model: Any = timm.create_model(recipe["model.name"], **options)
    if hasattr(model, "adapt_to"):  # it starts from the first batches of the run
        size = min(recipe["batch.size"], 4096)
        positions = np.arange(math.ceil(4096 / size) * size)
        ids, epochs = order(recipe["run.seed"], len(data.paths), positions)
        model.adapt_to(normalised(recipe, data.pixels(recipe, ids, epochs)).float())
    return model.to(memory_format=torch.channels_last).train()


def build_optimizer(recipe: Recipe, model: Any) -> Any:
    """An optimizer of groups that have factors of the learning rate and of the weight decay."""
    exempt: set[str] = getattr(model, "no_weight_decay", set)()
    members: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1 and not name.endswith(".bias")
        is_exempt = any(fnmatchcase(name, pattern) for pattern in exempt)
        decays = recipe["optim.decay"] == "all" or (is_matrix and not is_exempt)
        factor = 1.0
        for pattern, number in (text.rsplit(":", 1) for text in recipe["optim.lr_scale"]):
            factor = float(number) if fnmatchcase(name, pattern.strip()) else factor
        if parameter.requires_grad:
            members.setdefault((factor, decays), []).append(parameter)
    groups: Any = [{"params": p, "lr_scale": lr, "decays": wd} for (lr, wd), p in members.items()]
    of = {key.removeprefix("optim."): value for key, value in recipe.items()}
    moments: Recipe = {key: of[key] for key in ("betas", "eps") if key in of}
    if of["name"] == "sgd":
        momentum, nesterov = of.get("momentum", 0.9), of.get("nesterov", False)
        return SGD(groups, momentum=momentum, nesterov=nesterov, fused=True)
    if of["name"] == "lamb":
        trust: Recipe = {key: of[key] for key in ("bias_correction", "trust_clip") if key in of}
        trust |= {"always_adapt": of["decay"] == "all", "max_grad_norm": None}
        return Lamb(groups, **trust, **moments)
    if of["name"] == "accum_adam":
        moments = {"betas": (0.9, 0.999), "eps": 1e-8} | moments
        return AccumAdam(groups, {"every": of["accum_iter"], **moments})
    return {"adam": Adam, "adamw": AdamW}[of["name"]](groups, fused=True, **moments)


class AccumAdam(Optimizer):
    """Adam whose moments move every K steps, by the mean gradient (Wang et al. 2024)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, **{key: torch.zeros_like(p) for key in ("mean", "m", "v")}}
                self._update(p, state, group)

    def _update(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        (beta1, beta2), every, decay = group["betas"], group["every"], group["weight_decay"]
        m, v, mean = state["m"], state["v"], state["mean"]
        grad = p.grad.add(p, alpha=decay) if decay else p.grad
        state["step"] += 1
        mean.add_(grad, alpha=1 / every)
        updates = math.ceil(state["step"] / every)
        root = (v * beta2).addcmul_(grad, grad, value=1 - beta2).sqrt_()
        root.div_(math.sqrt(1 - beta2**updates)).add_(group["eps"])
        p.addcdiv_(m.lerp(grad, 1 - beta1), root, value=-group["lr"] / (1 - beta1**updates))
        if state["step"] % every == 0:
            m.lerp_(mean, 1 - beta1)
            v.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            mean.zero_()


# --- durations and the learning rate ---


class Course(NamedTuple):
    """Durations of a run in steps, which may be fractions."""

    length: str
    batch: int
    epoch: int  # samples

    def steps(self, duration: str) -> Fraction:
        number, unit = duration.replace("%", " %").split()
        if unit == "%":
            return self.steps(self.length) * Fraction(number) / 100
        samples = {"step": self.batch, "sample": 1, "epoch": self.epoch}[unit.rstrip("s")]
        return Fraction(number) * samples / self.batch

    def due(self, duration: str, step: int) -> bool:
        """True if a multiple of the duration lies in the `step`-th step, counted from 1."""
        every = self.steps(duration)
        return bool(every) and step // every > (step - 1) // every


def learning_rate(recipe: Recipe, course: Course, step: int) -> float:
    """The rate in a step; with per = "epoch", time is counted in epochs, and stands in each."""
    per = Fraction(1) if recipe["schedule.per"] == "step" else course.steps("1 epoch")
    now = math.floor(step / per)
    warmup, end = (float(course.steps(x) / per) for x in (recipe["schedule.warmup"], course.length))
    lr, last, first = (recipe[k] for k in ("optim.lr", "schedule.min_lr", "schedule.warmup_from"))
    if now < warmup:
        rise = {
            "first": now / warmup,
            "neither": (now + 1) / (warmup + 1),
            "both": min(now / (warmup - 1), 1) if warmup > 1 else 0,
        }[recipe["schedule.warmup_ends"]]
        return float(lr * (first + (1 - first) * rise))
    done = (now - warmup) / (end - warmup)
    rates = {
        "cosine": last + (lr - last) * 0.5 * (1 + math.cos(math.pi * done)),
        "linear": (1 - done) * lr + done * last,
        "constant": lr,
    }
    return float(rates[recipe["schedule.name"]])


# --- averages over ranks ---


def total(tensor: Tensor) -> Tensor:
    """The sum over all ranks."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def fill(tensors: list[Tensor], values: Tensor) -> None:
    parts = torch.split(values, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances of batch norm."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def all_reduce(model: nn.Module, count: Tensor) -> None:
    """The mean of gradients; of batch norm statistics that over all samples, in float64."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad = total(p.grad * (1 / WORLD))
    if buffers := statistics(model):
        sums = total(torch.cat([flat(buffers).double() * count, count.view(1)]))
        fill(buffers, sums[:-1] / sums[-1])


def gossip_groups() -> list[Any]:
    """This rank's pairs in each round: at distances of 1, 2, 4, ... ranks."""
    groups: dict[int, Any] = {}
    for distance in (1 << k for k in range(WORLD.bit_length() - 1)):
        for one in (n for n in range(WORLD) if not n & distance):
            group = dist.new_group([one, one + distance])  # every rank makes every group
            groups[distance] = group if RANK in (one, one + distance) else groups.get(distance)
    return [*groups.values()]


def consensus(model: nn.Module) -> None:
    """The mean of all ranks, by one message for weights and one for statistics."""
    for tensors in ([p.data for p in model.parameters()], statistics(model)):
        if tensors:
            fill(tensors, total(flat(tensors)) / WORLD)


# --- a step ---


class Trainer:
    """The state of a run, and its next step."""

    def __init__(self, recipe: Recipe, data: Images) -> None:
        self.recipe, self.data, self.model = recipe, data, build_model(recipe, data)
        self.course = Course(recipe["run.length"], recipe["batch.size"], len(data.paths))
        self.optimizer = build_optimizer(recipe, self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.groups = gossip_groups() if recipe["average.name"] == "gossip" and WORLD > 1 else []
        self.decay = recipe.get("model.ema_decay", 0.0)
        self.ema = copy.deepcopy(self.model).eval() if self.decay else None

    def batch(self, step: int) -> Batch:
        recipe, size = self.recipe, self.recipe["batch.size"]
        positions = np.arange(step * size + RANK, (step + 1) * size, WORLD)
        ids, epochs = order(recipe["run.seed"], len(self.data.paths), positions)
        pixels_BHWC = translated(recipe, self.data.pixels(recipe, ids, epochs), ids, epochs)
        labels = torch.from_numpy(self.data.label[ids])
        if recipe["mixes"]:  # in float32, which the model rounds
            images_BCHW = normalised(recipe | {"batch.precision": "fp32"}, pixels_BHWC)
            return mixed(recipe, images_BCHW, labels, step * size)
        return Batch(normalised(recipe, pixels_BHWC), labels, labels, torch.ones(len(labels)))

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Sums of losses, hits and samples, and the norm of the gradient before it is clipped."""
        recipe, lr = self.recipe, learning_rate(self.recipe, self.course, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            group["weight_decay"] = recipe["optim.weight_decay"] * group["decays"]
        batch = self.batch(step)
        count = torch.tensor(float(len(batch.labels)))
        samples = count if self.groups else total(count.clone()) / WORLD
        key = hashlib.blake2b(repr((recipe["run.seed"], RANK, step)).encode(), digest_size=8)
        torch.manual_seed(int.from_bytes(key.digest(), "little"))  # for dropout and drop path
        micro = len(batch.labels) if recipe["batch.micro"] == "auto" else recipe["batch.micro"]
        sums, num_parts = torch.zeros(2), math.ceil(len(batch.labels) / micro)
        for part in zip(*(torch.tensor_split(column, num_parts) for column in batch), strict=True):
            sums += self._forward_backward(Batch(*part), samples)
        if not self.groups and WORLD > 1:
            all_reduce(self.model, count)
        norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if not norm.isfinite():
            sys.exit(f"step {step}: a gradient that is not finite, whose update a run would skip")
        if self.groups:  # the gradient is that of the weights before they mix
            for parameter in self.parameters:
                dist.all_reduce(parameter.data, group=self.groups[step % len(self.groups)])
                parameter.data.div_(2)
        if "optim.clip_norm" in recipe:
            clip_grads_with_norm_(self.parameters, recipe["optim.clip_norm"], norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._update_ema(self.decay if step else 0.0)
        return torch.cat([sums, count.view(1)]), norm

    def _forward_backward(self, batch: Batch, samples: Tensor) -> Tensor:
        """Adds the gradient of a micro-batch, whose losses are divided by the global batch."""
        logits = forward(self.recipe, self.model, batch.images_BCHW)
        loss_sum = losses_of(self.recipe, logits.float(), batch).sum()
        torch.autograd.backward(loss_sum / samples)
        guess, share = logits.argmax(dim=1), batch.share
        hits = share * (guess == batch.labels) + (1 - share) * (guess == batch.others)
        return torch.stack([loss_sum.detach(), hits.sum()])

    def _update_ema(self, decay: float) -> None:
        now = self.model.state_dict()
        for name, average in self.ema.state_dict().items() if self.ema else ():
            if average.is_floating_point():
                average.lerp_(now[name], 1.0 - decay)
            else:
                average.copy_(now[name])


def forward(recipe: Recipe, model: nn.Module, images_BCHW: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe["batch.precision"] == "bf16"):
        logits: Tensor = model(images_BCHW)
    return logits


def losses_of(recipe: Recipe, logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of each sample with smoothed and mixed targets."""
    smoothing = recipe["augment.label_smoothing"]
    if not recipe["mixes"]:
        return F.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=smoothing)
    terms = F.log_softmax(logits, dim=1)
    own, other = (F.nll_loss(terms, of, reduction="none") for of in (batch.labels, batch.others))
    losses = batch.share * own + (1 - batch.share) * other
    return (1 - smoothing) * losses - smoothing * terms.mean(dim=1) if smoothing else losses


# --- evaluation, and the run ---


@torch.no_grad()
def evaluate(recipe: Recipe, model: nn.Module, data: Images) -> dict[str, float]:
    """Top-1 and mean cross-entropy; each rank takes a part of each batch."""
    count, size, table = len(data.paths), recipe["batch.size"], torch.zeros(2, len(data.paths))
    model.eval()
    for start in range(0, count, size):
        ids = np.arange(start + RANK, min(start + size, count), WORLD)
        images_BCHW = normalised(recipe, data.pixels(recipe, ids))
        logits, labels = forward(recipe, model, images_BCHW).float(), torch.tensor(data.label[ids])
        table[0, ids] = (logits.argmax(dim=1) == labels).float()
        table[1, ids] = F.cross_entropy(logits, labels, reduction="none")
    model.train()
    hits, losses = total(table).numpy()
    return {"top1": int(hits.sum()) / count, "loss": float(losses.sum(dtype=np.float64)) / count}


def run(recipe: Recipe, output: Path) -> None:
    train, val = Images(recipe["data.train"]), Images(recipe["data.val"])
    trainer = Trainer(recipe, train)
    course, num_steps = trainer.course, math.ceil(trainer.course.steps(recipe["run.length"]))
    models = {"": trainer.model, "ema_": trainer.ema} if trainer.ema else {"": trainer.model}
    sums, rows = torch.zeros(3, dtype=torch.float64), list[dict[str, Any]]()
    for step in range(1, num_steps + 1):
        of_step, norm = trainer.step(step - 1)
        sums += of_step
        if step == num_steps or course.due(recipe["run.log_every"], step):
            loss, hits, count = total(sums).tolist()
            means = {"loss": loss / count, "top1": hits / count, "grad_norm": float(norm)}
            lr = learning_rate(recipe, course, step - 1)
            rows.append({"kind": "train", "step": step, "lr": lr, **means})
            sums.zero_()
        if step == num_steps or course.due(recipe["run.eval_every"], step):
            own = [copy.deepcopy(model.state_dict()) for model in models.values()]
            for model in models.values() if trainer.groups else ():
                consensus(model)
            rows.append({"kind": "val", "step": step})
            for prefix, model in models.items():
                found = evaluate(recipe, model, val)
                rows[-1] |= {f"{prefix}{key}": value for key, value in found.items()}
            weights = copy.deepcopy(trainer.model.state_dict())
            for model, state in zip(models.values(), own, strict=True):
                model.load_state_dict(state)
    if RANK == 0:
        output.mkdir(parents=True, exist_ok=True)
        (output / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        save_file({key: t.contiguous() for key, t in weights.items()}, output / "model.safetensors")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if "OMP_NUM_THREADS" not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's 1
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORLD))
    if WORLD > 1:
        dist.init_process_group("gloo")
    run(read_recipe(Path(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
