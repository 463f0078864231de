"""Exports that take a photograph say what the classifier says of it, and so does the page."""

import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from skimage import data

from tests.browser import chromium
from tests.command_line import Capture, run
from tests.data import test_kinds
from tests.errors import check, raises, refused
from trainyard.classifier import Classifier, load
from trainyard.data.decode.decode import reference_image
from trainyard.data.decode.rendering import BACKGROUND
from trainyard.export import page as page_module
from trainyard.export.export import Exporter
from trainyard.export.page import model_in, read_runtime

pytestmark = pytest.mark.slow

Pixels = NDArray[np.uint8]
Exported = Callable[[Pixels], dict[str, Any]]
TEMPLATE = Path(page_module.__file__).with_name("page.html")
LIBRARY_STUB = b"""export const env = { wasm: {} };
export class Tensor { constructor(kind, data) { this.data = data; } }
const run = async ({ photograph }) => {
  const data = new Float32Array(10).fill(0.01); data[photograph.data[0]] = 0.91;
  return { probabilities: { data } };
};
const create = () => new Promise((done) => { globalThis.arrive = () => done({ run }); });
export const InferenceSession = { create };
"""
"""Takes the first level of a photograph for its class, after arrive()."""
RUNTIME = {"library": LIBRARY_STUB, "wasm": b"\0asm"}
KINDS = ("onnx", "pt2")


def photographs() -> list[Pixels]:
    """Wide, tall, smaller than the model's input, lines and a point."""
    wide: Pixels = data.coffee()  # type: ignore[no-untyped-call]
    parts = wide, wide[:, 100:333], wide[:19, :25], wide[:3], wide[:, 7:8], wide[40:41, 40:41]
    return [np.ascontiguousarray(part) for part in parts]


def exported(classifier: Classifier, folder: Path, kind: str) -> Exported:
    path = folder / f"model.{kind}"
    Exporter(classifier).to_file(path, f"{kind}-photograph")
    if kind == "pt2":
        program = torch.no_grad()(torch.export.load(path).module())
        return lambda photograph: program(torch.from_numpy(photograph))
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return lambda photograph: dict(
        zip(names, session.run(None, {"photograph": photograph}), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "overrides",
    [
        {"data.interpolation": "bicubic"},
        {"data.interpolation": "bilinear", "data.crop_pct": "0.7"},
        {"data.eval_size": "[24, 40]", "data.crop_pct": "1"},
        {"data.fit": "squash", "data.crop_pct": "0.9"},
        {"data.fit": "pad", "data.crop_pct": "1", "data.eval_size": "[24, 41]"},
        {"data.fit": "pad", "data.crop_pct": "0.8"},
    ],
)
def test_the_classes_are_the_classifiers(
    overrides: dict[str, str], kind: str, convolutions: Path, tmp_path: Path
) -> None:
    """Single grey levels differ by rounding: neither library has weights of 15 bits."""
    classifier = load(convolutions, overrides=overrides)
    model = exported(classifier, tmp_path, kind)
    for photograph in photographs():
        expected = classifier.logits(classifier.preprocess([photograph]))[0].numpy()
        found = {name: np.asarray(value) for name, value in model(photograph).items()}
        near = 0.02 * np.abs(expected).max()
        np.testing.assert_allclose(found["logits"][0], expected, atol=near)
        shares = np.exp(expected) / np.exp(expected).sum()
        np.testing.assert_allclose(found["probabilities"], shares, atol=0.02)
        assert kind == "pt2" or tuple(found["names"]) == classifier.classes


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_in_the_card_names_the_class(
    kind: str, convolutions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(photographs()[0]).save("image.png")
    assert run("export", convolutions, f"m.{kind}", "--photograph") == 0
    text = Path(f"m.{kind}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "| input | uint8[height, width, 3], RGB, of any size |" in text
    capsys.readouterr()
    exec(code, {})
    said = capsys.readouterr().out.strip()
    assert said == load(convolutions).predict(["image.png"])[0][0].name


def test_a_page_holds_the_model_and_its_classes(convolutions: Path, tmp_path: Path) -> None:
    classifier = load(convolutions)
    path = tmp_path / "page.html"
    Exporter(classifier, runtime=RUNTIME).to_file(path, "html")
    text = path.read_text("utf-8")
    session = onnxruntime.InferenceSession(model_in(text))
    (photograph, *_) = photographs()
    (probabilities,) = session.run(["probabilities"], {"photograph": photograph})
    (guess,) = classifier.predict([photograph], top=1)[0]
    settings = re.search(r'id="settings">(.*?)</script>', text)
    assert settings is not None
    assert json.loads(settings[1])["classes"][probabilities.argmax()] == guess.name
    assert sorted(file.name for file in tmp_path.iterdir()) == ["page.html", "page.html.md"]


def test_a_page_takes_photographs_while_it_loads(convolutions: Path, tmp_path: Path) -> None:
    """In the order given, also what it cannot read; it asks for nothing and is accessible."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    path = tmp_path / "page.html"
    Exporter(load(convolutions), runtime=RUNTIME, title="<b>Which?").to_file(path, "html")
    given = [tmp_path / f"{9 - n}.png" for n in range(8)]
    for level, photograph in enumerate(given):
        Image.new("RGB", (30, 20), (level, 0, 0)).save(photograph)
    given[3:3] = [tmp_path / "broken.jpg", tmp_path / "phone.HEIC"]
    given[3].write_bytes(b"\xff\xd8\xff\xe0")
    given[4].write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
    drop = """(names) => { const given = new DataTransfer();
      for (const name of names) given.items.add(new File(["no picture"], name));
      document.dispatchEvent(new DragEvent("drop", { dataTransfer: given, cancelable: true })); }"""
    with chromium() as browser:
        tab, asked = browser.new_context(bypass_csp=True).new_page(), []
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        tab.set_input_files("#files", given)
        tab.evaluate(drop, ["dropped.txt"])
        tab.wait_for_selector("article:last-child .cannot")
        assert (tab.locator("canvas").count(), tab.locator("table").count()) == (8, 0)
        tab.wait_for_function("'arrive' in globalThis")
        tab.evaluate("arrive()")
        tab.wait_for_selector("[aria-busy=true]", state="detached")
        names = [*(photograph.name for photograph in given), "dropped.txt"]
        assert tab.locator("h2").all_inner_texts() == names
        assert tab.locator("table tr:first-child th").all_inner_texts() == list("01234567")
        assert (
            tab.locator("article p.soft", has_text=re.compile(r"^computed in .+ ms$")).count() == 8
        )
        assert ["HEIC" in said for said in tab.locator(".cannot").all_inner_texts()] == [0, 1, 0]
        assert tab.locator("#state").inner_text() == f"{given[-1].name}: 7"
        assert tab.title() == "<b>Which?"
        assert [url for url in asked if not url.startswith(("blob:", "data:"))] == [path.as_uri()]
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") == "files"
        assert axe.Axe().run(tab).response["violations"] == []


def test_what_does_not_go_together(convolutions: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with raises("export.no-onnxruntime-web"):
        read_runtime(tmp_path / "other")
    with raises("file.unreadable"):
        read_runtime(tmp_path / "none.tgz")
    for words, code in (
        (["page.html"], "export.page-without-runtime"),
        (["a.onnx", "--onnxruntime-web", tmp_path], "export.runtime-without-page"),
        (["a.onnx", "--title", "What?"], "export.runtime-without-page"),
        (["a.safetensors", "--photograph"], "export.no-photograph-format"),
        (["--hub", tmp_path / "hub", "--photograph"], "option.photograph-without-file"),
    ):
        check(refused("export", convolutions, *words), code)


LIBRARY, WASM = "dist/ort.wasm.bundle.min.mjs", "dist/ort-wasm-simd-threaded.wasm"
GOOD = {LIBRARY: b"export{InferenceSession}", WASM: b"\0asm\1"}


def tarball(path: Path, files: dict[str, bytes], link: str | None = None) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if link:
            member = tarfile.TarInfo(f"package/{LIBRARY}")
            member.type, member.linkname = tarfile.LNKTYPE, link
            archive.addfile(member)
    return path


@pytest.mark.quick
@pytest.mark.parametrize(
    ("files", "link"),
    [
        (GOOD | {LIBRARY: b"abc"}, None),
        (GOOD | {WASM: b"<html>"}, None),
        ({WASM: GOOD[WASM]}, "none"),
        ({WASM: GOOD[WASM]}, f"package/{LIBRARY}"),
    ],
)
def test_a_package_that_holds_something_else(
    files: dict[str, bytes], link: str | None, tmp_path: Path
) -> None:
    assert read_runtime(tarball(tmp_path / "a.tgz", GOOD)) == {
        "library": GOOD[LIBRARY],
        "wasm": GOOD[WASM],
    }
    with raises("export.no-onnxruntime-web"):
        read_runtime(tarball(tmp_path / "b.tgz", files, link))


@pytest.mark.quick
@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_package_that_is_cut_off(kept: float, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(50_000)
    path = tarball(tmp_path / "a.tgz", GOOD | {WASM: GOOD[WASM] + noise})
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with raises("file.unreadable", path=path):
        read_runtime(path)


def transparent(mode: str) -> bytes:
    """A PNG of any colours and opacities, fully transparent pixels among them."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 14, len(mode)), dtype=np.uint8)
    pixels[2:5, :, -1] = 0
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, "PNG")
    return file.getvalue()


@contextmanager
def reading(channels: int = 3) -> Iterator[Callable[[bytes], Any]]:
    """Inside, the pixels of a file, one after another, as the page has them in a browser."""
    (script,) = re.findall(r"function bitmapOf.*?(?=function show)", TEMPLATE.read_text(), re.S)
    about = {"background": BACKGROUND, "channels": channels, "exif": False}
    call = "async (bytes) => [...pixelsOf(await bitmapOf(new Blob([new Uint8Array(bytes)])))]"
    with chromium() as browser:
        tab = browser.new_page()
        names = "Object.assign(globalThis, { pixelsOf, bitmapOf });"
        tab.evaluate(f"() => {{ {script} globalThis.settings = {json.dumps(about)}; {names} }}")
        yield lambda content: tab.evaluate(call, list(content))


def test_a_browser_sees_the_picture_of_every_kind_or_says_that_it_cannot() -> None:
    """Profiles, gamma, transparent levels and frames as training; no browser reads the others."""
    with reading() as pixels_of:
        for name, kind in test_kinds.KINDS.items():
            if name.startswith(("TIFF", "PPM", "PBM", "JPEG 2000")):
                with pytest.raises(Exception, match="could not be decoded"):
                    pixels_of(kind.content)
            else:
                found = np.array(pixels_of(kind.content)).reshape(kind.truth.shape)
                assert test_kinds.difference(found, kind.truth) <= kind.most + 1, name


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_browser_hides_what_training_hides(mode: str, channels: int) -> None:
    """Single grey levels differ: a canvas multiplies by alpha and rounds."""
    content = transparent(mode)
    with reading(channels) as pixels_of:
        found = pixels_of(content)
    expected = np.asarray(reference_image(content, channels)).reshape(-1).astype(int)
    assert np.abs(expected - found).max() <= 1


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_the_code_in_the_card_prepares_images_as_predict_does(
    kind: str, convolutions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transparent ones, and grey of 16 bits, which Pillow turns white."""
    monkeypatch.chdir(tmp_path)
    assert run("export", convolutions, f"m.{kind}", "--photograph") == 0
    (code,) = re.findall(r"```python\n(.*?)```", Path(f"m.{kind}.md").read_text(), re.DOTALL)
    deep = io.BytesIO()
    grey = data.coffee()[..., 0]  # type: ignore[no-untyped-call]
    Image.fromarray(grey.astype(np.uint16) * 257).save(deep, "PNG")
    for content in (transparent("RGBA"), transparent("LA"), deep.getvalue()):
        Path("image.png").write_bytes(content)
        known: dict[str, Any] = {}
        exec(code, known)
        assert np.array_equal(known["photograph"], np.asarray(reference_image(content)))


def test_a_file_and_an_open_image_are_the_same(convolutions: Path, tmp_path: Path) -> None:
    classifier = load(convolutions)
    for mode in ("RGBA", "LA", "P"):
        path = tmp_path / f"{mode}.png"
        path.write_bytes(transparent("RGBA" if mode == "P" else mode))
        if mode == "P":
            Image.open(path).convert("RGB").quantize(16).save(path, transparency=3)
        plain = reference_image(path.read_bytes())
        (expected,) = classifier.predict([plain])
        (said,), (opened,) = classifier.predict([path]), classifier.predict([Image.open(path)])
        assert said == opened == expected


@pytest.mark.night
@pytest.mark.parametrize("bits", [(), ("--int8", "--tolerance", "5")])
def test_a_photograph_in_a_browser(
    bits: tuple[str, ...], convolutions: Path, tmp_path: Path
) -> None:
    """Without a network, from a file, by onnxruntime-web as it is published."""
    if (npm := shutil.which("npm")) is None:
        pytest.skip("needs npm")
    subprocess.run([npm, "pack", "--silent", "onnxruntime-web"], cwd=tmp_path, check=True)
    (package,) = tmp_path.glob("*.tgz")
    page, photograph = tmp_path / "page.html", tmp_path / "coffee.png"
    assert run("export", convolutions, page, "--onnxruntime-web", package, *bits) == 0
    Image.fromarray(photographs()[0]).save(photograph)
    with chromium() as browser:
        tab = browser.new_context(offline=True).new_page()
        tab.goto(page.as_uri())
        tab.wait_for_selector("body[data-ready]")
        tab.set_input_files("#files", photograph)
        tab.wait_for_selector("article")
        rows = tab.inner_text("article table").split()
    (guesses,) = load(convolutions).predict([photograph])
    shares = {guess.name: guess.probability for guess in guesses}
    assert float(rows[1].rstrip("%")) / 100 == pytest.approx(
        shares[rows[0]], abs=0.1 if bits else 0.02
    )
    assert bits or rows[0] == guesses[0].name
