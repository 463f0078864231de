"""Export formats: writing and reloading of each."""

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from trainyard.errors import InputError
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


class Format(NamedTuple):
    write: Callable[[nn.Module, Description, Path], None]
    load: Callable[[Description, Path], Exported]
    check: Callable[[], None] = lambda: None
    """Raises InputError if a needed package is not installed."""
    takes_photographs: bool = False
    """True if it takes uint8[height, width, channels] of any size in place of normalised images."""


# --- safetensors: the weights, for timm ---


def _write_safetensors(model: nn.Module, about: Description, path: Path) -> None:
    from safetensors.torch import save_file

    # Clones: shared weights share memory, which the format rejects.
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_file(weights, path, metadata={"format": "pt", **about.metadata()})
    use_umask(path)


def _load_safetensors(about: Description, path: Path) -> Exported:
    import timm
    from safetensors.torch import load_file

    arguments = {"num_classes": len(about.classes), **about.model_args}
    model: nn.Module
    if is_own(about.architecture):
        model = called(about.architecture, arguments)
    else:
        model = timm.create_model(about.architecture, **arguments)
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


def _load_pt2(about: Description, path: Path) -> Exported:
    return torch.export.load(path).module()


def _write_pt2_photograph(model: nn.Module, about: Description, path: Path) -> None:
    _save(_photograph_program(model, about), about.metadata(takes_photographs=True), path)


def _load_pt2_photograph(about: Description, path: Path) -> Exported:
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
    input: tuple[str, dict[int, str]],
    outputs: list[str],
) -> torch.onnx.ONNXProgram:
    """`input`: its name, and the names of axes of any length."""
    name, axes = input
    with _quiet():
        converted = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[name],
            output_names=outputs,
            dynamic_shapes=(axes,),
            verbose=False,
        )
    assert converted is not None  # with dynamo=True
    converted.model.metadata_props.update(metadata)
    return converted


def _write_onnx(model: nn.Module, about: Description, path: Path) -> None:
    program = _program(model, about)
    _converted(program, about.metadata(), (INPUT, {0: "batch"}), [OUTPUT]).save(path)


def _load_onnx(about: Description, path: Path) -> Exported:
    return _session(path, INPUT)


def _session(model: Path | bytes, name: str) -> Exported:
    """A function from the input of this name to logits."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        logits: Any = session.run([OUTPUT], {name: images.numpy()})[0]
        return torch.from_numpy(logits)

    return run


def _onnx_photograph(model: nn.Module, about: Description) -> bytes:
    """The program of a photograph, with the names of the classes as a third output."""
    import onnx
    from onnx import TensorProto, helper

    program, metadata = _photograph_program(model, about), about.metadata(takes_photographs=True)
    image, outputs = (PHOTOGRAPH, {0: "height", 1: "width"}), [OUTPUT, PROBABILITIES]
    whole = _converted(program, metadata, image, outputs).model_proto
    names = helper.make_node("Constant", [], [NAMES], value_strings=about.classes)
    whole.graph.node.append(names)
    shape = [len(about.classes)]
    whole.graph.output.append(helper.make_tensor_value_info(NAMES, TensorProto.STRING, shape))
    onnx.checker.check_model(whole, full_check=True)
    content: bytes = whole.SerializeToString()
    return content


def _write_onnx_photograph(model: nn.Module, about: Description, path: Path) -> None:
    path.write_bytes(_onnx_photograph(model, about))


def _load_onnx_photograph(about: Description, path: Path) -> Exported:
    return _session(path, PHOTOGRAPH)


def html_format(runtime: Mapping[str, bytes], title: str | None = None) -> Format:
    """The format of pages with these files of onnxruntime-web; see page.py."""

    def write(model: nn.Module, about: Description, path: Path) -> None:
        text = page(about, _onnx_photograph(model, about), runtime, title)
        path.write_text(text, encoding="utf-8")

    def load(about: Description, path: Path) -> Exported:
        return _session(model_in(path.read_text("utf-8")), PHOTOGRAPH)

    return Format(write, load, _check_onnx, takes_photographs=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings about operators of packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


FORMATS = {
    "safetensors": Format(_write_safetensors, _load_safetensors),
    "onnx": Format(_write_onnx, _load_onnx, _check_onnx),
    "onnx-photograph": Format(
        _write_onnx_photograph, _load_onnx_photograph, _check_onnx, takes_photographs=True
    ),
    "html": html_format({}),
    "pt2": Format(_write_pt2, _load_pt2),
    "pt2-photograph": Format(_write_pt2_photograph, _load_pt2_photograph, takes_photographs=True),
}
