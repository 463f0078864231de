"""Advice on a run's bottleneck: recipe keys that would change it."""

from trainyard.config import RunConfig
from trainyard.estimate.account import Account

_PRECISE = ("fp32", "tf32")


def advice(config: RunConfig, found: Account) -> list[str]:
    """Changes, the most promising first; each is a key and its effect."""
    if not found.fits:
        fewer = [f"batch.micro = {found.memory.largest}"] if found.memory.largest else []
        return [*fewer, *_to_fit(config), "a GPU with more memory"]
    return {
        "arithmetic": _to_compute,
        "memory traffic": _to_compute,
        "device": _to_compute,
        "kernel launches": _to_launch,
        "decoding": _to_decode,
        "storage": _to_read,
        "network": _to_send,
    }[found.bound](config)


def _to_fit(config: RunConfig) -> list[str]:
    keys = []
    if config.average.name != "sharded":
        keys.append('average.name = "sharded" (each GPU keeps a part)')
    if not config.model.grad_checkpointing:
        keys.append("model.grad_checkpointing = true")
    if config.model.ema_decay is not None and not config.model.ema_cpu:
        keys.append("model.ema_cpu = true")
    return keys


def _to_compute(config: RunConfig) -> list[str]:
    keys = []
    if config.batch.precision in _PRECISE:
        keys.append('batch.precision = "bf16" ("fp16" before A100)')
    if config.model.compile == "off":
        keys.append('model.compile = "default"')
    if config.model.grad_checkpointing:
        keys.append("model.grad_checkpointing = false, if it fits")
    if not config.model.channels_last:
        keys.append("model.channels_last = true")
    if not config.schedule.image_size:
        keys.append("smaller images to begin with (data.image_size, schedule.image_size)")
    return [*keys, "more GPUs"]


def _to_launch(config: RunConfig) -> list[str]:
    keys = [] if config.model.compile != "off" else ['model.compile = "reduce-overhead"']
    return [*keys, "a larger batch.size, or fewer GPUs"]


def _to_decode(config: RunConfig) -> list[str]:
    keys = ["data that `trainyard data pack --format packed` has written", "more cores per GPU"]
    if config.data.decode == "cpu":
        keys.append('data.decode = "gpu"')
    if config.data.repeats == 1:
        keys.append("images stored with a short side of 256 pixels")
    return keys


def _to_read(config: RunConfig) -> list[str]:
    keys = [] if config.data.stage else ["data.stage (copies on each node's own disk)"]
    return [*keys, "images stored with a short side of 256 pixels", "faster storage"]


def _to_send(config: RunConfig) -> list[str]:
    keys = []
    if config.average.name == "allreduce" and config.average.compress is None:
        keys.append('average.compress = "bf16"')
    if config.average.name in ("allreduce", "sharded"):
        keys.append('average.name = "gossip" or "periodic"')
    return [*keys, "a larger batch.size, or fewer GPUs", "a faster network"]
