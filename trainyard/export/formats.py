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

from trainyard.errors import InputError
from trainyard.export.check import Exported
from trainyard.export.description import INPUT, OUTPUT, Description
from trainyard.export.page import model_in, page
from trainyard.export.photograph import PHOTOGRAPH, take_photographs
from trainyard.files import use_umask
from trainyard.image_size import height_width
from trainyard.installation import install_hint
from trainyard.model.own import called
from trainyard.own_code import is_own

_BATCH = {0: torch.export.Dim("batch")}  # an axis of any length
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


def _write_pt2(model: nn.Module, about: Description, path: Path) -> None:
    program = torch.export.export(model, (_example(about),), dynamic_shapes=(_BATCH,))
    packed = io.BytesIO()  # torch aborts the process if it cannot write to a file
    torch.export.save(program, packed, extra_files={METADATA: json.dumps(about.metadata())})
    path.write_bytes(packed.getbuffer())


def _load_pt2(about: Description, path: Path) -> Exported:
    return torch.export.load(path).module()


# --- ONNX ---


def _check_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(
            "export.needs-onnx", hint=install_hint("onnx"), reason=str(error)
        ) from None


def _onnx_program(model: nn.Module, about: Description) -> torch.onnx.ONNXProgram:
    with _quiet():
        program = torch.onnx.export(
            model,
            (_example(about),),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=(_BATCH,),
            verbose=False,
        )
    assert program is not None  # with dynamo=True
    program.model.metadata_props.update(about.metadata())
    return program


def _write_onnx(model: nn.Module, about: Description, path: Path) -> None:
    _onnx_program(model, about).save(path)


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


# --- photographs ---


def _photograph_model(model: nn.Module, about: Description) -> bytes:
    import onnx

    whole = _onnx_program(model, about).model_proto
    take_photographs(whole.graph, about)
    onnx.checker.check_model(whole, full_check=True)
    content: bytes = whole.SerializeToString()
    return content


def _write_photograph(model: nn.Module, about: Description, path: Path) -> None:
    path.write_bytes(_photograph_model(model, about))


def _load_photograph(about: Description, path: Path) -> Exported:
    return _session(path, PHOTOGRAPH)


def html_format(runtime: Mapping[str, bytes]) -> Format:
    """The format of pages with these files of onnxruntime-web; see page.py."""

    def write(model: nn.Module, about: Description, path: Path) -> None:
        path.write_text(page(about, _photograph_model(model, about), runtime), encoding="utf-8")

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


def _example(about: Description) -> Tensor:
    """Two images: with one, the exporter would fix the batch size at 1."""
    return torch.zeros(2, about.channels, *height_width(about.image_size))


FORMATS = {
    "safetensors": Format(_write_safetensors, _load_safetensors),
    "onnx": Format(_write_onnx, _load_onnx, _check_onnx),
    "photograph": Format(_write_photograph, _load_photograph, _check_onnx, takes_photographs=True),
    "html": html_format({}),
    "pt2": Format(_write_pt2, _load_pt2),
}
