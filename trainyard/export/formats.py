"""Export formats: writing and reloading of each."""

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from trainyard.errors import InputError
from trainyard.export import OPSET
from trainyard.export.check import Exported
from trainyard.export.description import INPUT, OUTPUT, Description
from trainyard.export.page import model_in, page
from trainyard.export.photograph import (
    NAMES,
    PHOTOGRAPH,
    PROBABILITIES,
    PhotographModel,
)
from trainyard.files import use_umask
from trainyard.image_size import height_width
from trainyard.installation import install_hint
from trainyard.model.own import called
from trainyard.own_code import is_own

METADATA = "trainyard.json"
"""Name of the metadata in a .pt2 file."""
Finish = Callable[[bytes, bool], bytes]
"""Makes another ONNX model of one; True if it takes photographs. See int8.py."""


Write = Callable[[nn.Module, Description, Path], None]


class Format(NamedTuple):
    write: Write
    load: Callable[[Path], Exported]
    about: Callable[[Path], Mapping[str, str]]
    """The metadata in a file; see Description.metadata."""
    check: Callable[[], None] = lambda: None
    """Raises InputError if a needed package is not installed."""
    takes_photographs: bool = False
    """True if it takes uint8[height, width, channels] of any size in place of normalised images."""
    is_int8: bool = False


# --- safetensors: the weights, for timm ---


def _write_safetensors(model: nn.Module, about: Description, path: Path) -> None:
    from safetensors.torch import save_file

    # Clones: shared weights share memory, which the format rejects.
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_file(weights, path, metadata={"format": "pt", **about.metadata()})
    use_umask(path)


def _about_safetensors(path: Path) -> Mapping[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        found: Mapping[str, str] = file.metadata()
    return found


def _load_safetensors(path: Path) -> Exported:
    import timm
    from safetensors.torch import load_file

    about = _about_safetensors(path)
    name, count = about["architecture"], int(about["num_classes"])
    arguments = {"num_classes": count, **json.loads(about["model_args"])}
    model: nn.Module = (
        called(name, arguments) if is_own(name) else timm.create_model(name, **arguments)
    )
    model.load_state_dict(load_file(path))
    return model.eval()


# --- torch.export ---


def _program(model: nn.Module, about: Description) -> ExportedProgram:
    # Two images: with one, the exporter would fix the batch size at 1.
    images_BCHW = torch.zeros(2, about.channels, *height_width(about.image_size))
    return _exported(model, images_BCHW, {0: torch.export.Dim("batch")})


def _photograph_program(model: nn.Module, about: Description) -> ExportedProgram:
    photograph_HWC = torch.zeros(97, 131, about.channels, dtype=torch.uint8)
    sides = {axis: torch.export.Dim(name, min=1) for axis, name in enumerate(("height", "width"))}
    return _exported(PhotographModel(model, about).eval(), photograph_HWC, sides)


def _exported(model: nn.Module, example: Tensor, axes: dict[int, Any]) -> ExportedProgram:
    """The program of a model; `axes` may have any length. It tells no paths of this machine."""
    program = torch.export.export(model, (example,), dynamic_shapes=(axes,))
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def _save(program: ExportedProgram, metadata: dict[str, str], path: Path) -> None:
    packed = io.BytesIO()  # torch aborts the process if it cannot write to a file
    torch.export.save(program, packed, extra_files={METADATA: json.dumps(metadata)})
    path.write_bytes(packed.getbuffer())


def _write_pt2(model: nn.Module, about: Description, path: Path) -> None:
    _save(_program(model, about), about.metadata(), path)


def _about_pt2(path: Path) -> Mapping[str, str]:
    extra = {METADATA: ""}
    torch.export.load(path, extra_files=extra)
    found: Mapping[str, str] = json.loads(extra[METADATA])
    return found


def _load_pt2(path: Path) -> Exported:
    return torch.export.load(path).module()


def _write_pt2_photograph(model: nn.Module, about: Description, path: Path) -> None:
    _save(_photograph_program(model, about), about.metadata(takes_photographs=True), path)


def _load_pt2_photograph(path: Path) -> Exported:
    program = torch.export.load(path).module()
    return lambda photograph: program(photograph)[OUTPUT]


# --- ONNX ---


def _check_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(
            "export.needs-onnx",
            "ONNX needs further packages: {hint} ({reason})",
            hint=install_hint("onnx"),
            reason=str(error),
        ) from None


def _converted(
    program: ExportedProgram,
    metadata: dict[str, str],
    *,
    opset: int,
    input: tuple[str, dict[int, str]],
    outputs: list[str],
) -> torch.onnx.ONNXProgram:
    """`input`: its name, and the names of axes of any length."""
    from onnx import helper

    name, axes = input
    with _quiet():
        converted = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[name],
            output_names=outputs,
            dynamic_shapes=(axes,),
            opset_version=opset,
            verbose=False,
        )
    assert converted is not None  # with dynamo=True
    model = converted.model
    if model.opset_imports[""] != opset:
        raise ValueError(f"torch writes no opset {opset} of it, but {model.opset_imports['']}")
    for node in model.graph:
        node.metadata_props.clear()  # modules and lines of code, which older versions do not know
    model.ir_version = helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    model.metadata_props.update(metadata)
    return converted


def session(model: Path | bytes, name: str) -> Exported:
    """A function from the input of this name to logits, run by onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        logits: Any = session.run([OUTPUT], {name: images.numpy()})[0]
        return torch.from_numpy(logits)

    return run


def _onnx_photograph(model: nn.Module, about: Description, opset: int) -> bytes:
    """The program of a photograph, with the names of the classes as a third output."""
    import onnx
    from onnx import TensorProto, helper

    program, metadata = _photograph_program(model, about), about.metadata(takes_photographs=True)
    image, outputs = (PHOTOGRAPH, {0: "height", 1: "width"}), [OUTPUT, PROBABILITIES]
    whole = _converted(program, metadata, opset=opset, input=image, outputs=outputs).model_proto
    names = helper.make_node("Constant", [], [NAMES], value_strings=about.classes)
    whole.graph.node.append(names)
    shape = [len(about.classes)]
    whole.graph.output.append(helper.make_tensor_value_info(NAMES, TensorProto.STRING, shape))
    onnx.checker.check_model(whole, full_check=True)
    content: bytes = whole.SerializeToString()
    return content


@dataclass(frozen=True)
class Onnx:
    """How ONNX models are written, alone and in pages."""

    opset: int = OPSET
    finish: Finish | None = None
    """What makes 8 bits of 32; None for float32."""
    runtime: Mapping[str, bytes] = field(default_factory=dict)
    """The files of onnxruntime-web in a page; see page.py."""
    title: str | None = None
    """Of a page."""

    def write(self, model: nn.Module, about: Description, path: Path) -> None:
        program, input = _program(model, about), (INPUT, {0: "batch"})
        found = _converted(
            program, about.metadata(), opset=self.opset, input=input, outputs=[OUTPUT]
        )
        if self.finish is None:
            found.save(path)  # what is too large for one file goes beside it
        else:
            path.write_bytes(self.finish(found.model_proto.SerializeToString(), False))

    def write_photograph(self, model: nn.Module, about: Description, path: Path) -> None:
        path.write_bytes(self._photograph(model, about))

    def write_page(self, model: nn.Module, about: Description, path: Path) -> None:
        text = page(about, self._photograph(model, about), self.runtime, self.title)
        path.write_text(text, encoding="utf-8")

    def _photograph(self, model: nn.Module, about: Description) -> bytes:
        content = _onnx_photograph(model, about, self.opset)
        return content if self.finish is None else self.finish(content, True)


def formats(how: Onnx = Onnx()) -> dict[str, Format]:
    """The formats of files, by name."""
    onnx, of_photographs = _about_onnx, dict[str, Any](takes_photographs=True)
    of_onnx = dict[str, Any](check=_check_onnx, is_int8=how.finish is not None)
    whole = of_onnx | of_photographs
    return {
        "safetensors": Format(_write_safetensors, _load_safetensors, _about_safetensors),
        "onnx": Format(how.write, _load_onnx, onnx, **of_onnx),
        "onnx-photograph": Format(how.write_photograph, _load_onnx_photograph, onnx, **whole),
        "html": Format(how.write_page, _load_page, _about_page, **whole),
        "pt2": Format(_write_pt2, _load_pt2, _about_pt2),
        "pt2-photograph": Format(
            _write_pt2_photograph, _load_pt2_photograph, _about_pt2, **of_photographs
        ),
    }


def _about_onnx(model: Path | bytes) -> Mapping[str, str]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    found: Mapping[str, str] = session.get_modelmeta().custom_metadata_map
    return found


def _about_page(path: Path) -> Mapping[str, str]:
    return _about_onnx(model_in(path.read_text("utf-8")))


def _load_onnx(path: Path) -> Exported:
    return session(path, INPUT)


def _load_onnx_photograph(path: Path) -> Exported:
    return session(path, PHOTOGRAPH)


def _load_page(path: Path) -> Exported:
    return session(model_in(path.read_text("utf-8")), PHOTOGRAPH)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings about operators of packages that are not installed, and of conversions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


FORMATS = formats()
