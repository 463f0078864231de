"""The code in the card of an export turns photographs and reads 16 bits as the model does."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from tests.command_line import run
from tests.data.test_orientation import tagged
from trainyard.classifier import load

pytestmark = pytest.mark.slow

EXIF = ("--data.exif", "true")


@pytest.mark.parametrize("kind", ["safetensors", "pt2", "hub"])
def test_the_code_in_the_card_turns_photographs(
    kind: str, convolutions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.png").write_bytes(tagged(6, quality=95))
    target = ("--hub", "m") if kind == "hub" else (f"m.{kind}",)
    assert run("export", convolutions, *target, *EXIF) == 0
    text = Path("m/README.md" if kind == "hub" else f"m.{kind}.md").read_text()
    assert "| preprocessing | turned upright by EXIF, short side to " in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    asked = [load(convolutions, overrides={"data.exif": exif}) for exif in ("true", "false")]
    turned, stored = (one.logits(one.preprocess(["image.png"])).cpu() for one in asked)
    near = (names["logits"].detach() - turned).abs().max()
    assert 20 * near < (stored - turned).abs().max()


@pytest.mark.parametrize("kind", ["safetensors", "pt2", "hub"])
def test_the_code_in_the_card_takes_the_upper_8_of_16_bits(
    kind: str, convolutions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow's own conversion turns all values above 255 white."""
    monkeypatch.chdir(tmp_path)
    ramp = np.linspace(0, 65535, 40 * 40).astype(np.uint16).reshape(40, 40)
    Image.fromarray(ramp).save("image.png")
    target = ("--hub", "m") if kind == "hub" else (f"m.{kind}",)
    assert run("export", convolutions, *target) == 0
    text = Path("m/README.md" if kind == "hub" else f"m.{kind}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    classifier = load(convolutions)
    expected = classifier.logits(classifier.preprocess(["image.png"])).cpu()
    white = classifier.logits(classifier.preprocess([Image.new("L", (40, 40), 255)])).cpu()
    near = (names["logits"].detach() - expected).abs().max()
    assert 10 * near < (white - expected).abs().max()


def test_the_header_tells_of_it(convolutions: Path, tmp_path: Path) -> None:
    for exif in ("true", "false"):
        file = tmp_path / f"{exif}.safetensors"
        assert run("export", convolutions, file, "--data.exif", exif) == 0
        with safe_open(file, "pt") as opened:
            assert json.loads(opened.metadata()["exif"]) is json.loads(exif)
        assert ("ImageOps" in Path(f"{file}.md").read_text()) == (exif == "true")
