"""Where fuzzing begins: small JPEGs of every kind, packed records and seek tables."""

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from trainyard.data._native import core
from trainyard.data.decode.packed_record import record_of_pixels

# Options, see fuzz.c.
PLAIN = bytes((0, 0, 0, 0, 0, 0, 0, 15, 0, 0, 255, 255, 0, 0, 0, 0))  # the whole image
DERIVED = PLAIN[:5] + b"\x04" + PLAIN[6:]  # and what is made of it
LUMA = PLAIN[:6] + b"\x20" + PLAIN[7:]
CROP = bytes((0, 0, 0, 0, 0, 0, 0, 8, 64, 64, 128, 128, 15, 0, 0, 0))


def jpegs() -> Iterator[bytes]:
    flower = Image.fromarray(load_sample_images().images[1])
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (17, 41, 3), np.uint8))
    pictures = [
        flower.crop((300, 200, 340, 233)),
        flower.resize((64, 43)),
        noise,
        flower.resize((8, 8)),
        flower.resize((1, 1)),
        flower.resize((300, 24)),
    ]
    for picture in pictures:
        for options in (
            {"quality": 90, "subsampling": "4:4:4"},
            {"quality": 75, "subsampling": "4:2:0", "optimize": True},
            {"quality": 100, "subsampling": "4:2:2"},
            {"quality": 30, "subsampling": "4:2:0", "restart_marker_blocks": 2},
            {"quality": 95, "restart_marker_rows": 1},
            {"quality": 80, "progressive": True},
        ):
            yield encode(picture, **options)
        yield encode(picture.convert("L"), quality=85)
        options_of_440 = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x121111, cv2.IMWRITE_JPEG_QUALITY, 60]
        yield cv2.imencode(".jpg", np.asarray(picture)[..., ::-1], options_of_440)[1].tobytes()
    yield encode(pictures[0].convert("CMYK"), quality=85)


def encode(picture: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    return file.getvalue()


def damaged(images: Sequence[bytes], rng: np.random.Generator) -> Iterator[bytes]:
    """The images in turn, without end, each with a few bits, bytes or stretches changed."""
    for number, image in enumerate(itertools.cycle(images)):
        content = bytearray(image)
        for _ in range(1 + number % 3):
            at = int(rng.integers(2, len(content) - 2))
            match rng.integers(5):
                case 0 | 1 | 2:
                    content[at] ^= 1 << int(rng.integers(8))
                case 3:
                    content[at] = int(rng.integers(256))
                case _:
                    del content[at : at + int(rng.integers(1, 4))]
        yield bytes(content)


def write_seeds(folder: Path) -> None:
    """Each picture plain, as luma, in part, with its seek table, and packed."""
    decoder = core.Decoder()
    pixels = np.arange(9 * 13 * 3, dtype=np.uint8).reshape(9, 13, 3)
    for colours, shown in (("rgb", pixels), ("grey", pixels[..., 0])):
        for kind, options in (("plain", PLAIN), ("crop", CROP), ("luma", LUMA)):
            (folder / f"seed-{colours}-{kind}").write_bytes(options + record_of_pixels(shown))
    for number, jpeg in enumerate(jpegs()):
        inputs = {"plain": PLAIN + jpeg, "derived": DERIVED + jpeg, "crop": CROP + jpeg}
        inputs["luma"] = LUMA + jpeg
        table, record = decoder.seek_table(jpeg), decoder.pack(jpeg)
        if table is not None and len(table) // core.SEEK_ENTRY < 256:
            count = len(table) // core.SEEK_ENTRY
            inputs["seek"] = PLAIN[:5] + bytes((1, count)) + PLAIN[7:] + table + jpeg
        if record is not None:
            inputs["packed"] = PLAIN + record
        for kind, content in inputs.items():
            (folder / f"seed-{number:02d}-{kind}").write_bytes(content)
