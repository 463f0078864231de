"""A page that classifies photographs in a browser: one file, without a server or a network."""

import base64
import gzip
import io
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from trainyard.data.decode.rendering import written
from trainyard.errors import InputError
from trainyard.export.description import Description
from trainyard.files import open_regular

_FILES = {"library": "ort.wasm.bundle.min.mjs", "wasm": "ort-wasm-simd-threaded.wasm"}
_SIGNS = {"library": b"InferenceSession", "wasm": b"\0asm"}
"""What is in each, by which a file of that name is known to be it."""
_MOST_BYTES = 2**28
_NAMED = 5  # classes in a title, or one fewer and the count of the others
_DAMAGED = (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError)


def read_runtime(package: Path) -> dict[str, bytes]:
    """The files of onnxruntime-web that a page holds, from `npm pack onnxruntime-web` or a folder.

    InputError if they are not there.
    """
    found: dict[str, bytes] = {}
    try:
        for name, content in _members(package):
            found |= {
                key: content
                for key, wanted in _FILES.items()
                if name == wanted and _SIGNS[key] in content
            }
    except _DAMAGED as error:
        reason = str(error).partition(":")[0]
        raise InputError("file.unreadable", path=package, reason=reason) from None
    if missing := [_FILES[key] for key in _FILES if key not in found]:
        raise InputError(
            "export.no-onnxruntime-web",
            "{path}: not what `npm pack onnxruntime-web` makes: no {names} in it, or a damaged one",
            path=package,
            names=", ".join(missing),
        )
    return found


def _members(package: Path) -> Iterator[tuple[str, bytes]]:
    if package.is_dir():
        for name in _FILES.values():
            for path in sorted(package.rglob(name))[:1]:
                with open_regular(path) as file:
                    yield name, file.read()
        return
    with tarfile.open(package) as archive:
        for member in archive:
            name = member.name.rpartition("/")[2]
            is_wanted = name in _FILES.values() and member.isreg() and member.size < _MOST_BYTES
            if is_wanted and (content := archive.extractfile(member)):
                yield name, content.read()


def page(
    about: Description, model: bytes, runtime: Mapping[str, bytes], title: str | None = None
) -> str:
    """The page, with a model that takes photographs. `title`: else a question after its classes."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    settings = {
        "background": about.background,
        "channels": about.channels,
        "classes": about.classes,
        "exif": about.exif,
        "several": about.has_lists,
    }
    return template.render(
        title=title or _question(about.classes),
        classes=about.classes,
        about=_lines(about),
        settings=json.dumps(settings).replace("<", "\\u003c"),
        model=_packed(model),
        **{key: _packed(content) for key, content in runtime.items()},
    )


def _question(classes: Sequence[str]) -> str:
    """The classes in short: "Cat, dog or fox?", "Ant, bee, cat, dog or 96 others?"."""
    named = [*classes] if len(classes) <= _NAMED else [*classes[: _NAMED - 1]]
    others = len(classes) - len(named)
    *first, last = [*named, f"{others:,} others"] if others else named
    text = f"{', '.join(first)} or {last}?" if first else f"{last}?"
    return text[:1].upper() + text[1:]


def _lines(about: Description) -> Iterator[str]:
    """What is known of the model, and who made the page."""
    samples, top1 = (about.evaluation.get(key) for key in ("samples", "top1"))
    if samples and top1 is not None:
        yield f"It was right for {top1:.1%} of {samples:,} images that it had not seen in training."
    if about.range:
        yield (
            f"Images of more than 8 bits had values from {written(about.range)} in training: give "
            "them in 8 bits of that range."
        )
    yield f"Made by trainyard export from {about.architecture}. Runs by onnxruntime-web (MIT)."


def model_in(text: str) -> bytes:
    """The model in a page."""
    packed = re.search(r'id="model">([^<]*)<', text)
    assert packed is not None
    return gzip.decompress(base64.b64decode(packed[1]))


def _packed(content: bytes) -> str:
    """Base64 of gzip."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
        file.write(content)
    return base64.b64encode(packed.getvalue()).decode()
