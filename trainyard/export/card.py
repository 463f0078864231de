"""The card of an exported model: properties, accuracy, and code that runs."""

import json
import re
from string import Template
from typing import Any

import yaml

from trainyard.config import tree_as_toml
from trainyard.export.check import Difference
from trainyard.export.description import INPUT, OUTPUT, Description
from trainyard.export.formats import METADATA
from trainyard.image_size import height_width
from trainyard.installation import DISTRIBUTION
from trainyard.monitor.outcome import METRICS
from trainyard.own_code import is_own

MADE_BY = "Made by `trainyard export`"
"""Text in every card, which tells cards from other files."""
_MANY = 50  # most classes that are listed
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

_CARD = Template("""\
---
$front---
# $architecture, $num_classes classes

$made_by: the $weights of step $step, as $format.

| | |
|---|---|
| architecture | `$architecture` of $owner, $parameters parameters |
| built with | $model_args |
| input | float32[batch, $channels, $height, $width], $pixels, normalised; batch as you like |
| preprocessing | $resizing ($interpolation), central $height x $width, \
from 0 to 1, minus mean $mean, divided by std $std |
| output | logits of $num_classes classes; $probabilities |
| trained on | $train |
| evaluated on | $val |
| accuracy | $accuracy |
| checked | $checked |
| versions | $versions |

## Use

```python
$usage
```

## Classes

$classes

## Recipe

What differs from Trainyard's defaults; `trainyard recipes --keys` explains each key.

```toml
$recipe
```

## Train and evaluate again

Save the recipe as `recipe.toml`; DATA is the data set, a folder or a URL.

```bash
pip install $distribution
trainyard train recipe.toml --data DATA --run again
trainyard evaluate again
```
""")

_OF_SEVERAL = "a sigmoid makes the probability of each, as an image may have any number of them"
_SHOW_ONE = "print(classes[logits.argmax()])"
_SHOW_SEVERAL = "print([name for name, logit in zip(classes, logits[0]) if logit > 0])"

_OPEN = """\
def open_image(path):
    image = $opened
    if image.mode.startswith("I"):  # grey of 16 bits: the upper 8
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("$mode")

"""

_TIMM_TRANSFORM = """\

${open_image}transform = timm.data.create_transform(
    input_size=($channels, $height, $width),
    crop_pct=$crop_pct,
    interpolation="$interpolation",
    mean=$mean,
    std=$std,
)
with torch.no_grad():
    logits = model(transform(open_image("image.png"))[None])
$show"""

_HUB_TRANSFORM = """\

${open_image}transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
with torch.no_grad():
    logits = model(transform(open_image("image.png"))[None])
$show"""

_PREPARE = """\

${open_image}def crop(image):
$resize
    left, top = round((image.width - $width) / 2), round((image.height - $height) / 2)
    return np.asarray(image.crop((left, top, left + $width, top + $height)), np.float32)

def prepare(path):
    pixels = ($cropped / 255 - $mean) / $std
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)

"""
# Crops of an image, or of an array, at `path`, as height x width x channels.
_CROPPED = {1: "crop(open_image(path))[..., None]", 3: "crop(open_image(path))"}
_CROPPED_ARRAY = (
    "np.stack([crop(Image.fromarray(c)) for c in np.load(path).transpose(2, 0, 1)], -1)"
)
_PREPARED = (
    _PREPARE
    + """
with torch.no_grad():
    logits = model(torch.from_numpy(prepare("$image")))
$show"""
)

_RESIZE_SHORT_SIDE = """\
    shortest = min(image.size)
    image = image.resize([side * $down // shortest for side in image.size], Image.$filter)"""

_RESIZE_TO_COVER = """\
    factor = min(image.width / $across, image.height / $down)
    image = image.resize([round(side / factor) for side in image.size], Image.$filter)"""

_USAGE = {
    "safetensors": """\
import json

import numpy as np
import timm
import torch
from PIL import $pillow
from safetensors import safe_open
from safetensors.torch import load_file
$import_model
model = $build(${name}num_classes=$num_classes$arguments).eval()
model.load_state_dict(load_file("$file"))
with safe_open("$file", "pt") as file:
    classes = json.loads(file.metadata()["classes"])
""",
    "hub": """\
import numpy as np
import timm
import torch
from PIL import $pillow

model = timm.create_model("$file", pretrained=True).eval()
classes = model.pretrained_cfg["label_names"]
""",
    "onnx": """\
import json

import numpy as np
import onnxruntime
from PIL import $pillow

session = onnxruntime.InferenceSession("$file")
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
"""
    + _PREPARE
    + """
(logits,) = session.run(["$output"], {"$input": prepare("$image")})
$show""",
    "pt2": """\
import json

import numpy as np
import torch
from PIL import $pillow

extra = {"$metadata": ""}
model = torch.export.load("$file", extra_files=extra).module()
classes = json.loads(json.loads(extra["$metadata"])["classes"])
"""
    + _PREPARE
    + """
logits = model(torch.from_numpy(prepare("$image")))
$show""",
}


def card(about: Description, kind: str, file: str, difference: Difference) -> str:
    """The card of a model; `kind` is a format, and `file` its name, or "hub", and timm's name."""
    sizes, resize = _sizes(about)
    texts = {
        **sizes,
        **_channels(about),
        "architecture": about.architecture,
        "num_classes": str(len(about.classes)),
        "crop_pct": str(about.crop_pct),
        "interpolation": about.interpolation,
        "resize": Template(resize).substitute(sizes, filter=about.interpolation.upper()),
        "mean": str(about.mean),
        "std": str(about.std),
        "arguments": "".join(f", {key}={value!r}" for key, value in about.model_args.items()),
        "file": file,
        "input": INPUT,
        "output": OUTPUT,
        "metadata": METADATA,
        "show": _SHOW_SEVERAL if about.has_lists else _SHOW_ONE,
        **_model_code(about),
    }
    return _CARD.substitute(
        texts,
        front=_front_matter(about),
        made_by=MADE_BY,
        distribution=DISTRIBUTION,
        probabilities=_OF_SEVERAL if about.has_lists else "softmax makes probabilities",
        weights=_weights(about.weights),
        step=f"{about.step:,}",
        format="a folder for timm" if kind == "hub" else kind,
        parameters=f"{about.parameters:,}",
        model_args=f"`{json.dumps(about.model_args)}`" if about.model_args else "the defaults",
        train=_in_table(about.train),
        val=_in_table(about.val),
        accuracy=_accuracy(about),
        checked=_checked(difference),
        versions=", ".join(f"{name} {version}" for name, version in about.versions.items()),
        usage=_usage(kind, texts),
        classes=_classes(about.classes),
        recipe=tree_as_toml(about.recipe).rstrip(),
    )


def _in_table(data: str) -> str:
    return data.replace("|", "\\|").replace("\n", " ") or "not told"


def _usage(kind: str, texts: dict[str, str]) -> str:
    """A program that uses the model."""
    ending = ""
    if kind in ("safetensors", "hub"):  # the programs of other formats are complete
        ending = _TIMM_TRANSFORM if kind == "safetensors" else _HUB_TRANSFORM
        ending = ending if texts["open_image"] else _PREPARED
    return Template(_USAGE[kind] + ending).substitute(texts)


def _channels(about: Description) -> dict[str, str]:
    """Texts about the channels and how a file is opened. timm's transforms take no arrays."""
    is_array = about.channels not in _CROPPED
    turns = about.exif and not is_array
    opened = "ImageOps.exif_transpose(Image.open(path))" if turns else "Image.open(path)"
    mode = "L" if about.channels == 1 else "RGB"
    return {
        "channels": str(about.channels),
        "pixels": about.pixels,
        "pillow": "Image, ImageOps" if turns else "Image",
        "open_image": "" if is_array else Template(_OPEN).substitute(opened=opened, mode=mode),
        "cropped": _CROPPED.get(about.channels, _CROPPED_ARRAY),
        "image": "image.npy" if is_array else "image.png",
    }


def _weights(name: str) -> str:
    decay = name.partition("-")[2]
    of = f" of decay {decay}" if decay else ""
    return "weights" if name == "raw" else f"moving average of the weights{of}"


def _front_matter(about: Description) -> str:
    """YAML for the Hub: github.com/huggingface/hub-docs, modelcard.md."""
    library = [] if about.own_module else ["timm"]
    datasets = sorted(set(_ON_HUB.findall(f"{about.train} {about.val}")))
    front: dict[str, Any] = {
        **({"library_name": library[0]} if library else {}),
        **({"license": about.license} if about.license else {}),
        "pipeline_tag": _TASK,
        "tags": [_TASK, *library, "trainyard"],
        **({"datasets": datasets} if datasets else {}),
    }
    if about.evaluation:
        name, on_hub = about.val or "unknown", _ON_HUB.match(about.val)
        metrics = [
            {"type": kind, "value": round(about.evaluation[key], 6), "name": title}
            for key, (kind, title) in _ON_CARD.items()
            if key in about.evaluation
        ]
        result = {
            "task": {"type": _TASK, "name": "Image Classification"},
            "dataset": {"name": name, "type": on_hub[1] if on_hub else "custom"},
            "metrics": metrics,
        }
        front["model-index"] = [{"name": about.architecture, "results": [result]}]
    text: str = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return text


def _sizes(about: Description) -> tuple[dict[str, str], str]:
    """Texts about the image size, and the code that resizes an image as CentralCrop does."""
    height, width = height_width(about.image_size)
    down, across = int(height / about.crop_pct), int(width / about.crop_pct)
    texts = {"height": height, "width": width, "down": down, "across": across}
    if down == across:
        resizing, code = f"short side to {down} pixels", _RESIZE_SHORT_SIDE
    else:
        resizing, code = f"to the smallest size that covers {down} x {across}", _RESIZE_TO_COVER
    resizing = f"turned upright by EXIF, {resizing}" if about.exif else resizing
    return {**{key: str(value) for key, value in texts.items()}, "resizing": resizing}, code


def _model_code(about: Description) -> dict[str, str]:
    """The parts of a program that build the model."""
    module = about.own_module
    if is_own(about.architecture):
        function = about.architecture.partition(":")[2]
        line = f"\nfrom {module} import {function}\n"
        return {"owner": "its author", "import_model": line, "build": function, "name": ""}
    build = {"build": "timm.create_model", "name": f'"{about.architecture}", '}
    if module is None:
        return {"owner": "timm", "import_model": "", **build}
    line = f"\nimport {module}  # timm learns the architecture\n"
    return {"owner": "Trainyard", "import_model": line, **build}


def _accuracy(about: Description) -> str:
    found = about.evaluation
    if not found:
        return "not evaluated at this step with these settings"
    shares = [f"{METRICS[key]} {found[key]:.2%}" for key in METRICS if key in found]
    return (
        f"{', '.join(shares)}, loss {found['loss']:.4f} on {found['samples']:,} images, computed "
        f"in {about.precision}"
    )


def _checked(difference: Difference) -> str:
    on = "noise"
    if difference.images:
        on = f"{difference.images} validation images and noise"
    if not difference.largest:
        return f"its logits are the trained model's, on {on}"
    return (
        f"its logits differ from the trained model's by {difference.largest:.1e} at most, on {on}"
    )


def _classes(classes: tuple[str, ...]) -> str:
    shown = ", ".join(f"`{name}`" for name in classes[:_MANY])
    rest = len(classes) - _MANY
    return shown if rest <= 0 else f"{shown} and {rest:,} more, which the metadata names."
