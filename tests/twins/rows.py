"""The rows of the table: commands that both editions run in a folder beside ../data."""

from collections.abc import Mapping
from dataclasses import dataclass

Words = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """Trainyard's, or a script of this folder and its arguments: their prints and runs count."""

    commands: tuple[Words, ...]
    killed_at: int | None = None
    """The step at which the first command is killed; it is then given again."""


# Rows that differ on purpose: why, in one sentence. Their differences are printed, not counted.
_DEFAULTS = "Keys of an optimizer that a recipe leaves out have its library's defaults."
CHANGED: dict[str, str] = {
    "schedule-free": "Re-estimated variances are the mean of those of batches, as in training, "
    "without the variance between batches.",
    **dict.fromkeys(("lamb, clipped", "lion, layer decay", "muon"), _DEFAULTS),
    "recipes NAME": "The recipe no longer lists keys of the optimizer that it leaves out.",
    "evaluate": "`bn_samples` is gone with `--bn-samples`.",
    "data verify": "The saved index is not compared; `structure` counts the files of a folder.",
    "estimate": "Its model is FLOPs, activations and an all-reduce; averagers are not compared.",
    "export to torch and ONNX": "The files have other bytes: they tell no paths; logits are equal.",
    "export for timm": "The folder has other bytes: its configuration is written by timm.",
    "rand augment": "Its geometry has one kernel, equal within a grey level.",
    "recipes --keys": "Keys of averagers are gone; those of optimizers have no default here.",
}

_RUN = {
    "run.length": "24 steps",
    "run.eval_every": "8 steps",
    "run.save_every": "8 steps",
    "run.log_every": "4 steps",
    "data.threads": "1",
}


def train(recipe: str, /, ranks: int = 1, *, data: str | None = "digits", **keys: str) -> Words:
    """A command that trains in the folder `run`; keys have __ for the point."""
    options = _RUN | {key.replace("__", "."): value for key, value in keys.items()}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    start = ["launch", "local", "--ranks", str(ranks)] if ranks > 1 else ["train"]
    where = ["--data", f"../data/{data}"] if data else []
    return (*start, recipe, *where, "--run", "run", "--json", *words)


def _runs() -> dict[str, Row]:
    of = {
        "all-reduce, 2 ranks": train("digits", 2),
        "gossip, 4 ranks": train("digits", 4, average__name="gossip"),
        "local SGD, outer momentum, 2 ranks": train(
            "digits",
            2,
            average__name="periodic",
            average__every="4",
            average__outer_lr="0.7",
            average__outer_momentum="0.9",
        ),
        "sharded, 2 ranks": train("debug", 2, average__name="sharded"),
        "sgd, step schedule, bf16": train(
            "debug",
            optim__name="sgd",
            optim__nesterov="true",
            schedule__name="step",
            schedule__milestones='["50%"]',
            batch__precision="bf16",
        ),
        "lamb, clipped": train("debug", optim__name="lamb", optim__clip_norm="1.0"),
        "lars, resnet": train("debug", model__name="test_resnet", optim__name="lars"),
        "lion, layer decay": train("debug", optim__name="lion", optim__layer_decay="0.8"),
        "muon": train("debug", optim__name="muon", schedule__name="linear"),
        "accumulated adam": train("debug", optim__name="accum_adam", optim__accum_iter="4"),
        "schedule-free": train(
            "debug",
            model__name="test_resnet",
            optim__name="schedule_free_adamw",
            schedule__name="constant",
            run__bn_samples="256",
        ),
        "locality": train("debug", data__locality="256"),
        "balance, repeats": train("debug", data__balance="0.5", data__repeats="3"),
        "resample": train("debug", data="webdataset", data__order="resample"),
        "join, 3 ranks": train(
            "debug",
            3,
            data=None,
            data__train="../data/webdataset/imagenet-train-{000000..000003}.tar",
            data__val="../data/digits/val",
            data__order="join",
            data__samples="1433",
        ),
        "moving averages": train(
            "digits", model__ema_decay="[0.9, 0.99]", model__ema_warmup="true"
        ),
        "stages of batch and image size": train(
            "digits",
            schedule__batch_size='["12 steps: 96"]',
            schedule__image_size='["8 steps: 40"]',
            batch__micro="40",
        ),
        "several labels": train(
            "debug",
            data=None,
            data__train="../data/lists/train.csv",
            data__val="../data/lists/val.csv",
            loss__name="bce",
            run__best_by="map",
        ),
        "one channel": train("fashion-mnist", batch__size="128"),
        "four channels": train(
            "debug",
            data="arrays",
            data__channels="4",
            data__mean="[0.5, 0.5, 0.5, 0.5]",
            data__std="[0.3, 0.3, 0.3, 0.3]",
        ),
        "rand augment": train("debug", augment__randaugment="rand-m9-mstd0.5-inc1"),
        "3-augment, jitter, erasing, mixing": train(
            "debug",
            augment__randaugment="3a",
            augment__color_jitter="[0.4, 0.4, 0.4]",
            augment__translate="2",
            augment__erasing="0.25",
            augment__mixup="0.8",
            augment__cutmix="1.0",
        ),
    }
    return {name: Row((words,)) for name, words in of.items()}


def _after_a_run() -> dict[str, Row]:
    first = train("digits")
    again = train("debug", loss__teacher="run")
    fine = train("digits", data="three", model__checkpoint="run", optim__backbone_lr="0.1")
    other = {"--run": "other"}
    return {
        "resumed after a kill, 2 ranks": Row((train("digits", 2),), killed_at=13),
        "distillation": Row((first, _with(again, other))),
        "fine-tuning with another head": Row((first, _with(fine, other))),
        "evaluate": Row(
            (
                first,
                ("evaluate", "run", "--per-class", "3", "--confusions", "3", "--json"),
                ("evaluate", "run", "--data", "../data/three/val", "--flip", "--json"),
            )
        ),
        "predict, export": Row(
            (
                first,
                ("predict", "run", "../data/digits/val/3", "--json"),
                ("export", "run", "model.safetensors", "--json"),
            )
        ),
        "export to torch and ONNX": Row(
            (
                first,
                ("export", "run", "model.pt2", "--json"),
                ("export", "run", "model.onnx", "--json"),
                *(("logits.py", path) for path in ("model.pt2", "model.onnx")),
            )
        ),
        "export for timm": Row(
            (first, ("export", "run", "--hub", "hub", "--json"), ("logits.py", "hub"))
        ),
    }


def _with(words: Words, options: Mapping[str, str]) -> Words:
    found = list(words)
    for key, value in options.items():
        found[found.index(key) + 1] = value
    return tuple(found)


_TRAIN = {
    "folder": "digits/train",
    "photographs": "photographs/train",
    "arrays": "arrays/train",
    "list": "lists/train.csv",
    "WebDataset": "webdataset/imagenet-train-{000000..000003}.tar",
    "TFRecord": "tfrecord/train",
    "HDF5": "hdf5/imagenet-train-{00000..00003}.h5",
    "packed": "packed/imagenet-train-{000000..000003}.packed",
    "Parquet": "parquet/data/train-*.parquet",
}


def _formats() -> dict[str, Row]:
    """The first 50 batches of each format."""
    of = {f"batches: {name}": ("batches.py", f"../data/{path}") for name, path in _TRAIN.items()}
    return {name: Row((words,)) for name, words in of.items()}


def _prints() -> dict[str, Row]:
    of = {
        "recipes": ("recipes", "--json"),
        "recipes NAME": ("recipes", "resnet50-a1", "--json"),
        "recipes --keys": ("recipes", "--keys", "--json"),
        "recipes --params": ("recipes", "convnext-tiny", "--params", "--json"),
        "estimate": ("estimate", "resnet50-a3", "--device", "h100-sxm", "--gpus", "8,64", "--json"),
        "data show": ("data", "show", "../data/digits", "--json"),
        "data verify": ("data", "verify", "../data/digits", "--deep", "--json"),
    }
    return {name: Row((words,)) for name, words in of.items()}


ROWS: dict[str, Row] = _runs() | _after_a_run() | _formats() | _prints()
