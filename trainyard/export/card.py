"""The card of an exported model: properties, accuracy, and code that runs."""

import json
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined

from trainyard.config import tree_as_toml
from trainyard.data.decode.rendering import written
from trainyard.export.check import Measured
from trainyard.export.description import INPUT, OUTPUT, Description
from trainyard.export.formats import METADATA
from trainyard.image_size import height_width
from trainyard.model.weights import CROP_MODES
from trainyard.monitor.history import METRICS, shows_top5
from trainyard.own_code import is_own
from trainyard.printable import printable

MADE_BY = "Made by `trainyard export`"
"""Text in every card, which tells cards from other files."""
_MOST = 50  # classes that are listed
_TASK = "image-classification"
# Values of an evaluation on the Hub: type, name.
_ON_CARD = {
    "top1": ("accuracy", "Top-1 accuracy"),
    "top5": ("accuracy", "Top-5 accuracy"),
    "balanced_accuracy": ("accuracy", "Balanced accuracy"),
    "map": ("mean_average_precision", "Mean average precision"),
    "micro_f1": ("f1", "Micro F1"),
    "macro_f1": ("f1", "Macro F1"),
    "loss": ("loss", "Loss"),
}
_ON_HUB = re.compile(r"hf://datasets/([^/@\s]+/[^/@\s]+)")


def card(about: Description, kind: str, file: str, measured: Measured) -> str:
    """The card of a model; `kind` is a format, and `file` its name, or "hub", and timm's name."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(
        written=written,
        json=partial(json.dumps, ensure_ascii=False),
        repr=repr,
        code=_code,
        cell=_cell,
    )
    template = environment.from_string(Path(__file__).with_name("card.md.jinja").read_text())
    height, width = height_width(about.image_size)
    names = METRICS.items()
    metrics = {k: v for k, v in names if k != "top5" or shows_top5(len(about.classes))}
    return template.render(
        about=about,
        background=about.background,
        kind=kind,
        file=file,
        front=_front_matter(about, metrics).to_yaml(),
        made_by=MADE_BY,
        function=about.architecture.partition(":")[2] if is_own(about.architecture) else "",
        height=height,
        width=width,
        crop_mode=CROP_MODES[about.fit],
        metrics=metrics,
        measured=measured,
        metric=METRICS["map" if about.has_lists else "top1"],
        input=INPUT,
        output=OUTPUT,
        metadata=METADATA,
        most=_MOST,
        recipe=tree_as_toml(about.recipe).rstrip(),
    )


def _code(text: str) -> str:
    """A name as a code span, out of which it cannot get: Markdown and HTML in it are text."""
    text = printable(text) or " "
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.strip("` ") != text else ""  # Markdown takes one away
    return f"{fence}{space}{text}{space}{fence}"


def _cell(text: str) -> str:
    """A code span in a cell of a table."""
    return _code(text).replace("|", "\\|")


def _front_matter(about: Description, metrics: Collection[str]) -> ModelCardData:
    library = [] if about.own_module else ["timm"]
    on_hub = _ON_HUB.match(about.val)
    results = [
        EvalResult(
            task_type=_TASK,
            task_name="Image Classification",
            dataset_type=on_hub[1] if on_hub else "custom",
            dataset_name=about.val or "unknown",
            metric_type=kind,
            metric_name=title,
            metric_value=round(about.evaluation[key], 6),
        )
        for key, (kind, title) in _ON_CARD.items()
        if key in about.evaluation and key in (*metrics, "loss")
    ]
    return ModelCardData(
        library_name=library[0] if library else None,
        license=about.license,
        pipeline_tag=_TASK,
        tags=[_TASK, *library, "trainyard"],
        datasets=sorted(set(_ON_HUB.findall(f"{about.train} {about.val}"))) or None,
        model_name=about.architecture if results else None,
        eval_results=results or None,
    )
