"""A loaded classifier says of images what the evaluation says of them."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.command_line import newest, run
from tests.data.test_orientation import pillow, tagged
from tests.errors import raises
from trainyard.classifier import Classifier, Guess, Picture, content_of, load
from trainyard.data.config import DataConfig
from trainyard.data.index.build import open_index
from trainyard.data.index.unlabelled import open_images
from trainyard.files import RunDirectory, find_checkpoint
from trainyard.training.recorded import load_recorded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bfloat16(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bfloat16") / "run"
    where = ("--data", digits, "--run", folder, "--data.threads", "1")
    short = ("--run.length", "8 steps", "--batch.precision", "bf16")
    assert run("train", "debug", *where, *short, "--json") == 0
    return folder


def files_of(digits: Path) -> list[Path]:
    """The validation images in the order of their index."""
    return sorted((digits / "val").glob("*/*"))


@pytest.mark.parametrize("name", ["averaged", "bfloat16"])
def test_image_by_image_as_in_the_evaluation(
    name: str, digits: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    recorded = load_recorded(RunDirectory(folder).predictions)
    assert recorded is not None
    classifier = load(folder, ema=recorded.weights == "ema_")
    assert classifier.step == recorded.step
    guesses = [guesses[0] for guesses in classifier.predict(files_of(digits))]
    assert [int(guess.name) for guess in guesses] == recorded.scores.guess.tolist()
    # Batches of other sizes are summed in another order.
    near = 1e-4 if name == "averaged" else 2e-2
    found = [guess.probability for guess in guesses]
    np.testing.assert_allclose(found, recorded.scores.confidence, rtol=near)
    right = np.mean(
        [int(g.name) == label for g, label in zip(guesses, recorded.labels, strict=True)]
    )
    assert right == recorded.scores.evaluation().top1


@pytest.mark.parametrize("name", ["averaged", "bfloat16"])
def test_the_loader_and_a_list_of_files_say_the_same(
    name: str, digits: Path, request: pytest.FixtureRequest
) -> None:
    classifier = load(request.getfixturevalue(name))
    begun: list[int] = []
    said = classifier.predict_index(open_index(str(digits / "val")), 3, on_batch=begun.append)
    assert begun == sorted(begun)
    assert begun[-1] == 364
    assert said.bad == {}
    assert said.counts.tolist() == np.bincount(said.classes[:, 0], minlength=10).tolist()
    for row, guesses in enumerate(classifier.predict(files_of(digits), top=3)):
        own = classifier.named(said.classes[row], said.probabilities[row])
        assert [guess.name for guess in own] == [guess.name for guess in guesses]
        np.testing.assert_allclose([g[1] for g in own], [g[1] for g in guesses], rtol=2e-2)


def test_the_better_weights_are_taken_unless_asked(averaged: Path) -> None:
    _, checkpoint = find_checkpoint(averaged)
    last = json.loads((checkpoint / "progress.json").read_text())["last"]
    assert last["ema_top1"] != last["top1"]
    assert load(averaged).uses_ema == (last["ema_top1"] > last["top1"])
    for ema, name in ((True, "ema"), (False, "model")):
        classifier, weights = load(averaged, ema=ema), load_file(checkpoint / f"{name}.safetensors")
        assert classifier.uses_ema == ema
        for key, weight in classifier.model.state_dict().items():
            assert torch.equal(weight, weights[key])


def test_what_is_loaded(averaged: Path) -> None:
    classifier = load(str(averaged), device="cpu")
    assert classifier.classes == tuple("0123456789")
    assert classifier.checkpoint == (averaged / "checkpoints" / "best").resolve()
    assert (classifier.step, classifier.image_size) == (16, 40)
    assert classifier.device == torch.device("cpu")
    assert not classifier.model.training
    assert load(classifier.checkpoint).step == 16


def test_without_an_average_there_is_none_to_ask_for(finished: Path) -> None:
    assert not load(finished).uses_ema
    with raises("checkpoint.no-average"):
        load(finished, ema=True)


def test_of_several_averages_the_best_is_taken(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its top-1 in the last evaluation: of one that follows the weights, and one far behind."""
    where = ("--data", digits, "--run", tmp_path / "run", "--data.threads", "1")
    length = ("--run.length", "24 steps", "--schedule.warmup", "0 steps")
    averages = ("--model.ema_decay", "[0.999, 0.2, 0.0]")
    assert run("train", "digits", *where, *length, *averages) == 0
    path = newest(tmp_path / "run")
    last = json.loads((path / "progress.json").read_text())["last"]
    top1 = {decay: last[f"ema_{decay}_top1"] for decay in (0.0, 0.2, 0.999)}
    assert max(top1.values()) > top1[0.999] + 0.1
    best = max(top1, key=lambda decay: top1[decay])  # the first of several
    names = {f"ema_{key}": last[f"ema_{best}_{key}"] for key in ("top1", "loss")}
    assert last.items() >= (names | {"ema_decay": best}).items()
    assert load(path, ema=True).weights == f"ema-{best}"
    behind = load(path, ema=0.999)
    for name, weight in load_file(path / "ema-0.999.safetensors").items():
        assert torch.equal(behind.model.state_dict()[name], weight)
    with raises("checkpoint.no-such-average", decay=0.5):
        load(path, ema=0.5)
    capsys.readouterr()
    assert run("evaluate", path, "--ema-decay", "0.999", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert "top1" not in found
    assert (found["ema_0.999_top1"], found["samples"]) == (top1[0.999], 364)


def test_a_damaged_checkpoint_is_not_used(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    for file in (tmp_path / "run" / "checkpoints").glob("*/model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with raises("checkpoint.file-altered", name="model.safetensors"):
        load(tmp_path / "run")


# --- images as a program has them ---


def test_an_image_in_every_form_is_the_same(averaged: Path, digits: Path) -> None:
    file = files_of(digits)[5]
    classifier = load(averaged)
    forms: list[Picture] = [
        file,
        str(file),
        file.read_bytes(),
        Image.open(file),
        Image.open(file).convert("RGB"),
        np.asarray(Image.open(file)),
        np.asarray(Image.open(file))[..., None],
        np.asarray(Image.open(file).convert("RGB")),
    ]
    first, *others = classifier.preprocess(forms)
    assert first.shape == (3, 40, 40)
    for other in others:
        assert torch.equal(first, other)
    assert len({str(guesses) for guesses in classifier.predict(forms[:2])}) == 1


def test_one_image_is_a_list_of_one(averaged: Path, digits: Path) -> None:
    """A path was read as a list of letters."""
    file, classifier = files_of(digits)[5], load(averaged)
    pixels = np.asarray(Image.open(file).convert("RGB"))
    expected = classifier.predict([file])
    for one in (file, str(file), file.read_bytes(), Image.open(file), pixels, pixels[None]):
        assert classifier.predict(one) == expected
    assert classifier.preprocess(file).shape == (1, 3, 40, 40)
    # Batches of other sizes are summed in another order.
    for several in ((path for path in (file, file)), np.stack([pixels, pixels])):
        found = classifier.predict(several)
        assert [guesses[0].name for guesses in found] == [expected[0][0].name] * 2


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (np.zeros((9, 9, 3), np.float32), "wrong-array"),
        (np.zeros((3, 9, 9), np.uint8), "wrong-array"),
        (np.zeros((0, 9, 3), np.uint8), "wrong-array"),
        ([torch.zeros(3, 9, 9)], "wrong-type"),
        ([None], "wrong-type"),
        (7, "not-images"),
    ],
)
def test_what_is_no_image_is_refused(wrong: Any, code: str, averaged: Path) -> None:
    with raises(f"image.{code}"):
        load(averaged).predict(wrong)


def test_a_classifier_is_shown_in_a_line(averaged: Path) -> None:
    """It was 82 lines in a notebook: the recipe, twice."""
    shown = repr(load(averaged))
    assert shown.startswith("<Classifier: test_resnet, 10 classes, images of 40 pixels, step 16 of")
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_photograph_in_every_form_is_upright(kind: str, averaged: Path, tmp_path: Path) -> None:
    file, classifier = tmp_path / "photo", load(averaged, overrides={"data.exif": "true"})
    for orientation in range(1, 9):
        file.write_bytes(tagged(orientation, kind))
        first, *others = classifier.preprocess(
            [file, Image.open(file), Image.open(file).convert("RGB"), pillow(file.read_bytes())]
        )
        for other in others:
            # Decoders differ at edges alone; a wrong turn differs everywhere.
            assert (first - other).abs().mean() < 1 / 255 / 0.38


@pytest.mark.quick
def test_an_open_image_is_turned_as_the_recipe_says() -> None:
    with Image.open(io.BytesIO(tagged(6, "PNG"))) as image:
        stored = image.size
        for exif, size in ((False, stored), (True, stored[::-1])):
            content = content_of(image, 0, DataConfig(exif=exif))
            assert Image.open(io.BytesIO(content)).size == size


def test_an_image_of_16_bits_is_that_of_8(averaged: Path) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    classifier = load(averaged)
    deep, plain = classifier.preprocess(
        [Image.fromarray(ramp), Image.fromarray((ramp >> 8).astype(np.uint8))]
    )
    assert torch.equal(deep, plain)
    with raises("image.unreadable", name="image 1"):
        classifier.preprocess([Image.fromarray(ramp.astype(np.int32))])


def test_pixels_are_resized_cropped_and_normalised_as_pillow_does(averaged: Path) -> None:
    image = Image.fromarray(
        np.random.default_rng(0).integers(80, 176, (90, 70, 3), np.uint8), "RGB"
    )
    (found,) = load(averaged).preprocess([image])
    resized = image.resize((50, 64), Image.Resampling.BICUBIC).crop((5, 12, 45, 52))
    expected = (np.asarray(resized, np.float32) / 255 - 0.31) / 0.38
    np.testing.assert_allclose(found.permute(1, 2, 0), expected, atol=1.6 / 255 / 0.38)


def test_top_is_as_many_as_there_are(averaged: Path, digits: Path) -> None:
    (guesses,) = load(averaged).predict(files_of(digits)[:1], top=99)
    assert sorted(guess.name for guess in guesses) == list("0123456789")
    assert sum(guess.probability for guess in guesses) == pytest.approx(1)
    assert [guess.probability for guess in guesses] == sorted((g[1] for g in guesses), reverse=True)
    assert isinstance(guesses[0], Guess)
    assert load(averaged).predict([]) == []


def test_an_image_that_cannot_be_read_is_named(
    averaged: Path, digits: Path, tmp_path: Path
) -> None:
    classifier, good = load(averaged), files_of(digits)[0]
    (tmp_path / "text.png").write_text("no image")
    with raises("image.unreadable", name=tmp_path / "text.png"):
        classifier.predict([good, tmp_path / "text.png"])
    with raises("image.unreadable", name=tmp_path / "gone.png"):
        classifier.predict([tmp_path / "gone.png"])
    with raises("image.unreadable", name="image 2"):
        classifier.predict([good.read_bytes(), b"no image"])


def test_scores_that_are_not_finite_are_no_guess(finished: Path, digits: Path) -> None:
    classifier = load(finished)
    with torch.no_grad():
        next(classifier.model.parameters()).fill_(torch.nan)
    said = classifier.predict_index(open_index(str(digits / "val")))
    assert set(said.bad.values()) == {"the model gives it scores that are not finite"}
    assert len(said.bad) == 364
    assert (said.classes == -1).all()
    assert not said.counts.any()


def test_a_bad_image_counts_for_no_class(averaged: Path, digits: Path, tmp_path: Path) -> None:
    for file in files_of(digits)[::100]:
        shutil.copy(file, tmp_path)
    (tmp_path / "bad.png").write_text("no image")
    (images,) = open_images([str(tmp_path)], tmp_path, lambda *_: None)
    said = load(averaged).predict_index(images.index)
    assert [*said.bad.values()] == ["not an image"]
    assert said.counts.sum() == len(files_of(digits)[::100])


# --- settings ---


def test_recipe_keys_can_be_others(averaged: Path, digits: Path) -> None:
    classifier = load(averaged, overrides={"data.eval_size": "24"})
    assert classifier.preprocess(files_of(digits)[:2]).shape == (2, 3, 24, 24)
    with raises("recipe.unknown-key", key="data.eval_siz"):
        load(averaged, overrides={"data.eval_siz": "24"})
    for key, value in (("run.seed", "1"), ("model.freeze", "*"), ("data.order", "resample")):
        with raises("recipe.key-without-effect", key=key):
            load(averaged, overrides={key: value})
    sizes = {"data.eval_size": "24", "data.image_size": "32"}
    with raises("recipe.size-without-effect", eval_size=24):
        load(averaged, overrides=sizes)


def test_nothing_of_the_program_is_changed(
    digits: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(3)  # load() gave torch a thread for each core
    try:
        load(finished).predict(files_of(digits)[:1])
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.allow_tf32
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(before)


def test_what_only_training_needs_is_left_out(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    recipe = tmp_path / "run" / "recipe.toml"
    text = recipe.read_text().replace('decode = "cpu"', 'decode = "gpu"')
    text = text.replace("grad_checkpointing = false", "grad_checkpointing = true")
    recipe.write_text(text.replace("[data]", f'[data]\nstage = "{tmp_path / "disk"}"'))
    classifier: Classifier = load(tmp_path / "run")
    assert not classifier.model.grad_checkpointing
    content = io.BytesIO()
    Image.new("L", (9, 9)).save(content, "PNG")
    assert len(classifier.predict([content.getvalue()])) == 1
    assert not (tmp_path / "disk").exists()
