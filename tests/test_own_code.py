"""Models and augmentations of the user, imported from the working directory alone."""

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.command_line import SHORT, Capture, newest, run
from tests.data.batches import batch_of_images
from tests.docs.pages import DOCS, blocks
from tests.errors import raises
from tests.runs import recipe
from tests.spawn import spawn, train_joined
from tests.steps import make_step
from trainyard.config import load_recipe
from trainyard.data.augment.extra import Extra, check_extra
from trainyard.data.batch import Batch, Keys
from trainyard.model.build import build_model
from trainyard.model.config import ModelConfig
from trainyard.own_code import announce, find
from trainyard.run.build import averager_class
from trainyard.world import World

NAME = "nets_of_a_test"  # no other test may import it
OWN = ("--model.name", f"{NAME}:small", "--augment.extra", f"{NAME}:noise")
WRONG = """
import random
import numpy
import torch
from torch import nn
number = 5
def nothing(num_classes): return 3
def maps(num_classes): return nn.Conv2d(3, 4, 3)
def fails(num_classes): raise ValueError("oh no")
def blind(): return nn.Identity()
def halves(images, labels, generator): return images[:, :, ::2]
def by_numpy(images, labels, generator): return images + numpy.random.rand()
def by_python(images, labels, generator): return images + random.random()
def forgets(images, labels, generator): images.add_(1)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the programs of docs/own-code.md as a module."""
    page = [b.text for b in blocks(DOCS / "own-code.md") if b.language == "python" and b.is_run]
    (tmp_path / f"{NAME}.py").write_text("\n".join(page) + WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    announce.cache_clear()
    return tmp_path


def test_a_run_and_what_follows_it(here: Path, digits: Path, capsys: Capture) -> None:
    """Its file is named before it is imported; the export builds the model with its options."""
    options = ("--data", digits, *OWN, "--model.options", "{width = 8}", *SHORT, "--json")
    assert run("train", "debug", "--run", "whole", *options) == 0
    told = capsys.readouterr().err.splitlines()
    keys = ("augment.extra = 'nets_of_a_test:noise'", "model.name = 'nets_of_a_test:small'")
    assert told == [f"trainyard: {key} imports {here / NAME}.py" for key in keys]
    assert run("evaluate", "whole", "--json") == 0
    said = capsys.readouterr().out.splitlines()
    assert json.loads(said[-1])["samples"] == 364
    assert run("predict", "whole", digits / "val" / "3", "--json") == 0
    assert run("export", "whole", "m.safetensors") == 0
    assert load_file("m.safetensors")["0.weight"].shape[0] == 8
    assert f"from {NAME} import small" in Path("m.safetensors.md").read_text()
    assert run("export", "whole", "--hub", "hub") == 2


def test_a_run_that_goes_on_gets_the_same_noise(here: Path, digits: Path) -> None:
    """By NumPy's global generator; that of the program which trains goes on where it was."""
    own = ("--model.name", f"{NAME}:small", "--augment.extra", f"{NAME}:by_numpy")
    options = ("--data", digits, *own, *SHORT, "--json", "--run.save_every", "1 steps")
    for folder, resumed in (("whole", "auto"), ("rest", "whole/checkpoints/step-00000001")):
        before = states()  # the first run imports libraries that draw a number
        assert run("train", "debug", "--run", folder, "--run.resume", resumed, *options) == 0
    one, other = (load_file(newest(Path(f)) / "model.safetensors") for f in ("whole", "rest"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    after = states()
    assert [name for name, state in before.items() if after[name] != state] == []


def states() -> dict[str, object]:
    """The states of the global generators."""
    _, keys, position, *_ = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (np.asarray(keys).tobytes(), position),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


@pytest.mark.parametrize(
    ("name", "code"),
    [
        (f"{NAME}:smal", "not-found"),
        (f"{NAME}:number", "not-callable"),
        (f"{NAME}:nothing", "wrong-type"),
        (f"{NAME}:maps", "wrong-scores"),
        (f"{NAME}:fails", "failed"),
        (f"{NAME}:blind", "failed"),
        (f"{NAME}:", "malformed-name"),
        ("torch.hub:load", "module-not-found"),
        ("timm:create_model", "module-hidden"),
    ],
)
def test_mistakes_in_a_model(name: str, code: str, here: Path) -> None:
    (here / "timm.py").touch()
    with raises(f"function.{code}"):
        build_model(ModelConfig(name=name), num_classes=5, image_size=32)


def test_options_are_the_parameters(here: Path) -> None:
    wide = ModelConfig(name=f"{NAME}:small", options={"width": 24})
    model = build_model(wide, num_classes=5, image_size=32)
    assert model.get_parameter("5.weight").shape == (5, 24)
    for wrong, word in (
        (ModelConfig(name=f"{NAME}:small", options={"widht": 24}), "widht"),
        (ModelConfig(name=f"{NAME}:small", drop_path=0.1), "drop_path_rate"),
    ):
        with raises("function.failed") as caught:
            build_model(wrong, num_classes=5, image_size=32)
        assert word in str(caught.value.fields["reason"])


def train_averaged(world: World, here: Path, data: Path, folder: str, keys: dict[str, str]) -> None:
    os.chdir(here)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        train_joined(recipe(data, keys), here / folder, world)


@pytest.mark.slow
def test_an_averager(here: Path, digits: Path) -> None:
    """It is periodic averaging with the mean after every second step, and goes on exactly."""
    short = {"run.length": "7 steps", "run.save_every": "3 steps", "run.eval_every": "0 steps"}
    short |= {"optim.name": "sgd", "optim.lr": "0.01"}  # adamw makes much of the last bits
    own = short | {"average.name": f"{NAME}:EverySecond"}
    periodic = short | {"average.name": "periodic", "average.every": "2"}
    rest = own | {"run.resume": "whole/checkpoints/step-00000003"}
    runs = {"whole": own, "rest": rest, "periodic": periodic}
    for folder, keys in runs.items():
        spawn(train_averaged, 2, here, digits, folder, keys)
    weights = {folder: load_file(newest(here / folder) / "model.safetensors") for folder in runs}
    for name, tensor in weights["whole"].items():
        assert torch.equal(weights["rest"][name], tensor)
        torch.testing.assert_close(weights["periodic"][name], tensor)


def test_mistakes_in_an_averager(here: Path) -> None:
    for name, code in (("small", "function.not-averager"), ("nobody", "function.not-found")):
        with raises(code, key="average.name"):
            averager_class(f"{NAME}:{name}")


@pytest.mark.parametrize(
    ("name", "code"),
    [("halves", "function.wrong-images"), ("forgets", "function.wrong-type")],
)
def test_mistakes_in_an_augmentation(name: str, code: str, here: Path) -> None:
    with raises(code):
        check_extra(f"{NAME}:{name}", shape=(3, 8, 8), num_classes=5, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["noise", "by_numpy", "by_python"])
def test_the_noise_is_of_seed_position_and_rank(name: str, here: Path) -> None:
    def noise(seed: int, position: int, rank: int) -> torch.Tensor:
        ids, ones = torch.arange(2), torch.ones(2)
        batch = Batch(
            ids=ids,
            epochs=ids,
            labels=ids,
            weights=ones,
            images_BCHW=torch.zeros(2, 3, 4, 4),
            mixed_labels=ids,
            lam=ones,
        )
        keys = Keys(np.arange(2), np.arange(2), position)
        return Extra(f"{NAME}:{name}", seed=seed, rank=rank)(batch, keys).images_BCHW

    assert torch.equal(noise(0, 64, 1), noise(0, 64, 1))
    for other in ((1, 64, 1), (0, 128, 1), (0, 64, 0)):
        assert not torch.equal(noise(0, 64, 1), noise(*other))


def test_a_model_draws_from_any_generator_by_the_step_and_the_rank() -> None:
    class Noisy(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
            return images.flatten(1)[:, :5] * weight

    weight, drawn = nn.Parameter(torch.ones(5)), list[tuple[float, ...]]()
    model = Noisy()
    model.register_parameter("weight", weight)
    batch = batch_of_images(torch.rand(4, 3, 4, 4), torch.arange(4))
    for step, rank in ((3, 0), (3, 0), (4, 0), (3, 1)):
        passes = replace(make_step(model).passes, world=World(rank=rank, size=2))
        passes(batch, step, micro=None, divisor=lambda: torch.tensor(4.0), scale=torch.ones(()))
    first, again, *others = drawn
    assert first == again
    assert all(of not in other for of in first for other in others)


def test_code_in_a_run_directory_is_never_imported(here: Path) -> None:
    foreign = here / "foreign"
    foreign.mkdir()
    (foreign / "evil.py").write_text("raise SystemExit")
    (foreign / "recipe.toml").write_text("")
    (foreign / "checkpoints").mkdir()
    with raises("function.in-run-directory"):
        find("model.name", "foreign.evil:net")


def test_a_page_s_recipes_name_its_programs(here: Path) -> None:
    recipes = [b.text for b in blocks(DOCS / "own-code.md") if b.language == "toml"]
    (here / "recipe.toml").write_text("\n".join(recipes).replace("nets:", f"{NAME}:"))
    config = load_recipe("recipe.toml")
    assert build_model(config.model, num_classes=5, image_size=8)[0].out_channels == 128  # type: ignore[index]
    assert config.augment.extra == f"{NAME}:noise"
