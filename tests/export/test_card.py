"""The card of an export: what the Hub reads of it, and the way back to the model."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from tests.command_line import newest
from tests.docs.pages import check_command
from trainyard.classifier import load
from trainyard.config import RunConfig, load_recipe, to_toml
from trainyard.export.card import card
from trainyard.export.check import Measured
from trainyard.export.description import Description, describe
from trainyard.files import sha256
from trainyard.printable import printable

pytestmark = pytest.mark.slow

SAME = Measured(0.0, 0.0, 0)
OTHER = {"data.eval_size": "48"}


@pytest.mark.parametrize("trained", ["convolutions", "transformer"])
def test_the_hub_reads_the_results(trained: str, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(trained)
    about = describe(load(run), "apache-2.0")
    told: Any = ModelCard(card(about, "hub", "hf-hub:acme/digits", SAME)).data
    assert told.library_name == "timm" and told.pipeline_tag == "image-classification"
    assert told.license == "apache-2.0" and told.get("datasets") is None
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (own,) = [
        line
        for line in map(json.loads, lines)
        if line["kind"] == "val" and line["step"] == about.step
    ]
    prefix = "ema_" if about.weights == "ema" else ""
    metrics = {one.metric_name: one.metric_value for one in told.eval_results}
    assert metrics == {
        "Top-1 accuracy": pytest.approx(own[f"{prefix}top1"], abs=1e-6),
        "Balanced accuracy": pytest.approx(own[f"{prefix}balanced_accuracy"], abs=1e-6),
        "Macro F1": pytest.approx(own[f"{prefix}macro_f1"], abs=1e-6),
        "Loss": pytest.approx(own[f"{prefix}loss"], abs=1e-6),
    }
    assert {one.task_type for one in told.eval_results} == {"image-classification"}
    assert {one.dataset_name for one in told.eval_results} == {about.val}


def test_the_recipe_and_the_commands_train_it_again(transformer: Path, tmp_path: Path) -> None:
    text = card(describe(load(transformer)), "onnx", "m.onnx", SAME)
    (recipe,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "recipe.toml").write_text(recipe)
    again = load_recipe(str(tmp_path / "recipe.toml"))
    assert plainly(again) == plainly(load_recipe(str(transformer / "recipe.toml")))
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    train, evaluate = commands.splitlines()
    for command in (train, evaluate):
        check_command(command)


def test_the_recipe_is_that_of_the_training(transformer: Path, tmp_path: Path) -> None:
    """With the keys that a loaded model does without, and without those of this export."""
    training = {
        "model.freeze": "['patch_embed']",
        "model.grad_checkpointing": "true",
        "data.decode": "gpu",
        "data.stage": str(tmp_path / "disk"),
    }
    recipe = load_recipe(str(transformer / "recipe.toml"), training)
    shutil.copytree(transformer, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "recipe.toml").write_text(to_toml(recipe))
    text = card(describe(load(tmp_path / "run", overrides=OTHER)), "onnx", "m.onnx", SAME)
    (told,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "told.toml").write_text(told)
    assert plainly(load_recipe(str(tmp_path / "told.toml"))) == plainly(recipe)
    assert "stage" not in told


def plainly(config: RunConfig) -> dict[str, object]:
    """A recipe without the keys that concern a machine."""
    tree: dict[str, object] = config.model_dump(
        exclude={"watch": True, "data": {"train", "val", "threads", "stage"}}
    )
    return tree


@pytest.mark.parametrize(
    ("key", "value"),
    [("data.eval_size", "48"), ("data.crop_pct", "0.5"), ("batch.precision", "bf16")],
)
def test_other_settings_were_not_evaluated(key: str, value: str, transformer: Path) -> None:
    about = describe(load(transformer, overrides={key: value}))
    text = card(about, "onnx", "m.onnx", SAME)
    assert "model-index" not in text
    assert about.metadata()["evaluation"] == "{}"


@pytest.mark.parametrize(
    "change", [{"samples": None}, {"samples": "y"}, {"loss": None}, {"loss": "x"}, {"top1": None}]
)
def test_an_evaluation_that_is_not_ours(
    change: dict[str, Any], transformer: Path, tmp_path: Path
) -> None:
    """A value of another kind in the checkpoint of somebody else was a traceback."""
    run = Path(shutil.copytree(transformer, tmp_path / "run", symlinks=True))
    path = newest(run) / "progress.json"
    progress = json.loads(path.read_text())
    progress["last"] |= change
    path.write_text(json.dumps(progress))
    manifest = json.loads(path.with_name("manifest.json").read_text())
    manifest[path.name] = sha256(path)
    path.with_name("manifest.json").write_text(json.dumps(manifest))
    assert "| accuracy |" in card(describe(load(run)), "onnx", "m.onnx", SAME)


def test_the_accuracy_is_that_on_the_data_of_the_run(transformer: Path, tmp_path: Path) -> None:
    """Other data are what this export is compared on; decoding and staging change nothing."""
    overrides = {"data.val": str(tmp_path), "data.decode": "gpu", "data.stage": str(tmp_path)}
    about, other = (describe(load(transformer, overrides=o)) for o in (None, overrides))
    assert about == other and about.evaluation


def test_data_of_the_hub_and_models_of_ones_own(transformer: Path) -> None:
    about = dataclasses.replace(
        describe(load(transformer)),
        architecture="nets:mine",
        train="hf://datasets/acme/photos@v1/train-*.parquet",
        val="hf://datasets/acme/photos",
        evaluation={},
    )
    front = yaml.safe_load(card(about, "onnx", "m.onnx", SAME).split("---\n")[1])
    assert front == {
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "trainyard"],
        "datasets": ["acme/photos"],
    }


def test_locations_are_published_one_by_one_without_paths_and_commands(convolutions: Path) -> None:
    """Of `/d/imagenet` and `/d/extra` the card said "d/extra"; others it published in full."""
    classifier = load(convolutions)
    data = {
        "train": ("/d/imagenet/train", "/home/alice/extra", "photos", "../alice/more#train"),
        "val": ("pipe:cat /home/alice/v.tar | pv", "/home/alice/all.csv#root=/home/alice/x#val"),
    }
    recipe = classifier.recipe.model_dump(exclude_unset=True)
    recipe["data"] = recipe["data"] | data
    recipe["model"] = recipe["model"] | {
        "checkpoint": "/home/alice/w/a.pt",
        "options": {"table": "/home/alice/w/b.txt"},
    }
    recipe["run"] = recipe["run"] | {"resume": "/home/alice/runs/a/checkpoints/latest"}
    about = describe(dataclasses.replace(classifier, recipe=RunConfig.model_validate(recipe)))
    text = card(about, "onnx", "m.onnx", SAME)
    train = "imagenet/train and alice/extra and photos and alice/more#train"
    assert f"| trained on | `{train}` |" in text
    assert "| evaluated on | `a pipe and alice/all.csv#val` |" in text
    assert "/home" not in text and "cat " not in text.partition("## Use")[0]


HOSTILE = (
    *("a`<img src=x onerror=alert(1)>`", "``b", " `", "`", "", "<script>", "[a](javascript:b)"),
    *("b\n# heading", "c\r\n\n<b>", "|d|", "*e*", "&lt;", "\\`f", "\\"),
)


@pytest.mark.quick
def test_names_stay_in_their_code_spans() -> None:
    """In the card as Markdown shows it."""
    blank: dict[str, Any] = {field.name: "" for field in dataclasses.fields(Description)}
    about = dataclasses.replace(
        Description(**blank),
        architecture="nets:mine",
        model_args={"a": "`<i>`"},
        classes=HOSTILE,
        image_size=32,
        fit="crop",
        crop_pct=1.0,
        mean=(0.5,),
        std=(0.5,),
        parameters=1,
        step=1,
        temperature=1.0,
        evaluation={},
        train="a|`<b>`\nc",
        val="<i>|`",
        license=None,
        recipe={},
        versions={"trainyard": "1"},
    )
    text = card(about, "html", "`<a>`", SAME)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inner = [part for token in tokens for part in token.children or ()]
    assert not [part for part in (*tokens, *inner) if part.type.startswith("html")]
    spans = [part.content for part in inner if part.type == "code_inline"]
    shown = [printable(name) or " " * 3 for name in HOSTILE]
    assert "\n".join(shown) in "\n".join(spans)
    assert "pip install" not in text  # of a name that anybody may take on an index
    for name in ("nets:mine", '{"a": "`<i>`"}', "a|`<b>`\\nc", "<i>|`", "`<a>`"):
        assert name in spans
