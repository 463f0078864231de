"""ONNX files that take a photograph: resizing, crop and normalisation are part of the graph.

The input is uint8[height, width, channels] of any size; the sizes in between are those of
data/decode/crops.py. Resized pixels are rounded to 8 bits as those of an evaluation, whose weights
are of 15 bits: 1 in 300 (bilinear) or 50 (bicubic) differs, by one grey level.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from trainyard.export.description import INPUT, OUTPUT, Description
from trainyard.image_size import height_width

if TYPE_CHECKING:
    from onnx import GraphProto

PHOTOGRAPH, PROBABILITIES, NAMES = "photograph", "probabilities", "names"
_FILTERS: dict[str, dict[str, Any]] = {
    "bilinear": {"mode": "linear"},
    "bicubic": {"mode": "cubic", "cubic_coeff_a": -0.5},  # Pillow's
}


def take_photographs(graph: "GraphProto", about: Description) -> None:
    """Put the preparation of a photograph before a graph, and probabilities and names behind it.

    `graph` maps float32[batch, channels, height, width] to logits; it is changed in place.
    """
    from onnx import TensorProto, helper

    before, after = _Nodes("before"), _Nodes("after")
    _prepare(before, about)
    count = len(about.classes)
    after("Sigmoid" if about.has_lists else "Softmax", OUTPUT, name="after_shares")
    after("Reshape", "after_shares", after.constant([count], np.int64), name=PROBABILITIES)
    after("Identity", after.constant(about.classes, object), name=NAMES)
    nodes = [*before.nodes, *graph.node, *after.nodes]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.initializer.extend([*before.values, *after.values])
    shape: list[str | int | None] = ["height", "width", about.channels]
    graph.input.append(helper.make_tensor_value_info(PHOTOGRAPH, TensorProto.UINT8, shape))
    for name, kind in ((PROBABILITIES, TensorProto.FLOAT), (NAMES, TensorProto.STRING)):
        graph.output.append(helper.make_tensor_value_info(name, kind, [count]))


class _Nodes:
    """Nodes, one after another. A call adds one and returns the name of its result."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.nodes: list[Any] = []
        self.values: list[Any] = []

    def __call__(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        from onnx import helper

        name = name or f"{self._prefix}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(self, value: Any, dtype: Any) -> str:
        from onnx import numpy_helper

        name = f"{self._prefix}_constant_{len(self.values)}"
        self.values.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name


def _prepare(add: _Nodes, about: Description) -> None:
    """From the photograph to the model's input: resized, cropped, normalised, a batch of one."""
    sizes = add("Shape", PHOTOGRAPH, start=0, end=2)
    resized = _resized(add, sizes, about)
    one, channels = add.constant([1], np.int64), add.constant([about.channels], np.int64)
    target = add("Concat", one, resized, channels, axis=0)
    batch = add("Unsqueeze", _cast(add, PHOTOGRAPH, np.float32), add.constant([0], np.int64))
    # Pixels beyond the border have no weight, as in Pillow.
    how: dict[str, Any] = {"antialias": 1, "exclude_outside": 1, **_FILTERS[about.interpolation]}
    exact = add("Round", add("Resize", batch, "", "", target, **how))
    limits = add.constant(0, np.float32), add.constant(255, np.float32)
    smaller = add("Clip", exact, *limits)
    pixels = _central(add, smaller, resized, about)
    # In the order of data/device/feed.py.
    mean, std = (np.array(each, np.float32) * np.float32(255) for each in (about.mean, about.std))
    shifted = add("Sub", pixels, add.constant(mean, np.float32))
    scaled = add("Mul", shifted, add.constant(np.float32(1) / std, np.float32))
    add("Transpose", scaled, name=INPUT, perm=[0, 3, 1, 2])


def _resized(add: _Nodes, sizes: str, about: Description) -> str:
    """Height and width of the resized image; see data/config.py: evaluation_crop."""
    covered = (np.array(height_width(about.image_size)) / about.crop_pct).astype(np.int64)
    if about.fit == "squash":
        return add.constant(covered, np.int64)
    if about.fit == "crop" and covered[0] == covered[1]:
        least = add("ReduceMin", sizes, keepdims=1)
        return add("Div", add("Mul", sizes, add.constant(covered, np.int64)), least)
    exact, goal = _cast(add, sizes, np.float64), add.constant(covered, np.float64)
    if about.fit == "crop":
        least = add("ReduceMin", add("Div", exact, goal), keepdims=1)
        return _cast(add, add("Round", add("Div", exact, least)), np.int64)
    scale = add("ReduceMin", add("Div", goal, exact), keepdims=1)
    rounded = _cast(add, add("Round", add("Mul", exact, scale)), np.int64)
    return add("Max", rounded, add.constant([1, 1], np.int64))


def _central(add: _Nodes, image: str, resized: str, about: Description) -> str:
    """The middle of a resized image, of the model's size, with pixels beside it if it is padded."""
    size = add.constant(height_width(about.image_size), np.int64)
    start = _half(add, add("Sub", resized, size))
    axes = add.constant([1, 2], np.int64)
    if about.padding is None:
        return add("Slice", image, start, add("Add", start, size), axes)
    nothing = add.constant([0, 0], np.int64)
    start = add("Max", start, nothing)
    inner = add("Slice", image, start, add("Add", start, size), axes)
    free = add("Max", add("Sub", size, resized), nothing)
    before = add("Div", free, add.constant(2, np.int64))
    beside = add("Concat", before, add("Sub", free, before), axis=0)
    # Padding has one value for all channels: it is that of the difference to the pixel.
    pixel = add.constant(about.padding, np.float32)
    padded = add("Pad", add("Sub", inner, pixel), beside, "", axes)
    return add("Add", padded, pixel)


def _half(add: _Nodes, whole: str) -> str:
    """Half of whole numbers, of which a half is rounded to the even neighbour."""
    halves = add("Div", _cast(add, whole, np.float64), add.constant(2, np.float64))
    return _cast(add, add("Round", halves), np.int64)


def _cast(add: _Nodes, value: str, dtype: Any) -> str:
    from onnx import helper

    return add("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
