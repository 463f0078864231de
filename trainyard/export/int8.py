"""ONNX models of 8 bits, by onnxruntime's static quantisation.

Weights have 7 bits, and a scale for each channel: with 8, the products of two of them overflow the
16 bits in which processors without VNNI add them, and the same file has other logits there.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainyard.export.check import Bench, Exported, Measured, Times
from trainyard.export.description import INPUT
from trainyard.export.formats import session
from trainyard.export.photograph import PHOTOGRAPH

_LAYERS = ("Conv", "Gemm", "MatMul")
_BETWEEN = ("Add", "AveragePool", "Clip", "Concat", "GlobalAveragePool", "MaxPool", "Mul", "Relu")
_FEW = 64  # images, on which layers are compared
_CHANGED = 2  # calibration images whose answer may change, in tolerances: not every change loses


class Int8:
    """Quantises the layers of a model, and what is between them, as far as the accuracy allows.

    If too many calibration images get another answer, those layers are left out that lose most:
    one, 2, 4 … up to half of them; and what is between, if the layers alone lose less.
    """

    def __init__(self, calibration: Bench, tolerance: float) -> None:
        """`calibration` has the images; `tolerance`: a fall of the accuracy, as a share of 1."""
        self._calibration, self._tolerance = calibration, tolerance
        self.float_layers: tuple[str, ...] = ()
        """What the last model has in float32."""

    def __call__(self, content: bytes, takes_photographs: bool) -> bytes:
        """The model of 8 bits of one of float32."""
        import onnx

        self._content, self._takes_photographs = content, takes_photographs
        self._layers, between = _nodes(onnx.load_from_string(content))
        self._ranges = self._calibrated()
        found, self.float_layers = self._quantised([*self._layers.values(), *between]), ()
        if self._falls(found):
            alone = self._quantised([*self._layers.values()])
            changes = [self._measured(each, self._calibration).change for each in (alone, found)]
            found, between = (alone, []) if changes[0] < changes[1] else (found, between)
            order, count = list[str](), 1
            while self._falls(found) and count <= len(self._layers) // 2:
                order = order or [name for name, _ in self.losses(self._calibration)]
                left = [self._layers[name] for name in order[count:]]
                found, self.float_layers = self._quantised([*left, *between]), (*order[:count],)
                count *= 2
        model = onnx.load_from_string(found)
        about = {"precision": "int8", "float_layers": json.dumps(self.float_layers)}
        onnx.helper.set_model_props(model, {p.key: p.value for p in model.metadata_props} | about)
        quantised: bytes = model.SerializeToString()
        return quantised

    def losses(self, bench: Bench) -> list[tuple[str, float]]:
        """The layers, the one first that alone, with 8 bits, changes the probabilities most."""
        few = bench.part(_FEW)
        changes = [
            (name, self._measured(self._quantised([node]), few).change)
            for name, node in self._layers.items()
            if name not in self.float_layers
        ]
        return sorted(changes, key=lambda pair: -pair[1])

    def float_ms(self, bench: Bench) -> Times:
        """What an image takes in the last model's float32."""
        return bench.milliseconds(self._session(self._content), self._takes_photographs)

    def _falls(self, content: bytes) -> bool:
        agreement = self._measured(content, self._calibration).agreement
        return 1 - agreement > _CHANGED * self._tolerance

    def _measured(self, content: bytes, bench: Bench) -> Measured:
        exported = self._session(content)
        return bench.measure(exported, self._takes_photographs, is_exact=False)

    def _session(self, content: bytes) -> Exported:
        return session(content, self._input)

    @property
    def _input(self) -> str:
        return PHOTOGRAPH if self._takes_photographs else INPUT

    def _calibrated(self) -> Any:
        """The range of each tensor on the calibration images."""
        from onnxruntime.quantization import CalibrationMethod, create_calibrator

        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            path.write_bytes(self._content)
            calibrator = create_calibrator(
                path,
                [*_LAYERS, *_BETWEEN],
                augmented_model_path=str(path.with_name("augmented.onnx")),
                calibrate_method=CalibrationMethod.MinMax,
            )
            for images in self._calibration.real(self._takes_photographs):
                calibrator.collect_data(_Reader(iter([{self._input: images.numpy()}])))
            return calibrator.compute_data()

    def _quantised(self, nodes: list[str]) -> bytes:
        """The model with these nodes in 8 bits."""
        import onnx
        from onnxruntime.quantization import QuantType
        from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

        quantizer = QDQQuantizer(
            onnx.load_from_string(self._content),
            per_channel=True,
            reduce_range=True,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=self._ranges,
            nodes_to_quantize=nodes,
            nodes_to_exclude=[],
            op_types_to_quantize=[*_LAYERS, *_BETWEEN],
            extra_options={},
        )
        quantizer.quantize_model()
        content: bytes = quantizer.model.model.SerializeToString()
        return content


class _Reader:
    """The inputs of a calibration, as onnxruntime asks for them."""

    def __init__(self, inputs: Iterator[dict[str, Any]]) -> None:
        self._inputs = inputs

    def get_next(self) -> dict[str, Any] | None:
        return next(self._inputs, None)


def _nodes(model: Any) -> tuple[Mapping[str, str], list[str]]:
    """The nodes that are layers, by the layers' names; and those after one that are not."""
    weights = {tensor.name for tensor in model.graph.initializer}
    layers: dict[str, str] = {}
    between, after = list[str](), set[str]()
    for node in model.graph.node:
        is_layer = node.op_type in _LAYERS and node.input[1] in weights
        if is_layer:
            name = node.input[1].removeprefix("_model.").removesuffix(".weight")
            layers[name if name not in layers else node.name] = node.name
        elif after.intersection(node.input) and node.op_type in _BETWEEN:
            between.append(node.name)
        if is_layer or after.intersection(node.input):
            after.update(node.output)
    return layers, between
