"""The commands: what they print when all is well."""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command_line import SHORT, Capture, run, shown
from tests.docs.pages import options_of_training, subparsers
from tests.errors import check, refused
from trainyard import command_line, hints
from trainyard.command_line import COMMANDS, _parser, main, split_overrides
from trainyard.config import all_keys, builtin_recipes, load_recipe
from trainyard.hints import with_our_names


def test_a_command_is_a_module_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of other commands are not loaded for it."""
    loaded: list[str] = []

    def noted(name: str) -> object:
        loaded.append(name)
        return import_module(name)

    toy = SimpleNamespace(add=lambda parser: parser.set_defaults(run_command=lambda options: 75))
    monkeypatch.setitem(sys.modules, "trainyard.cli.toy", toy)
    monkeypatch.setitem(COMMANDS, "toy", "play")
    monkeypatch.setattr(command_line, "import_module", noted)
    assert run("toy") == 75
    assert loaded == ["trainyard.cli.toy"]


def test_overrides_are_taken_out_of_the_words() -> None:
    words = ["train", "debug", "--optim.lr", "1", "--run", "x", "--run.length=2 steps", "--json"]
    rest, overrides = split_overrides(words)
    assert rest == ["train", "debug", "--run", "x", "--json"]
    assert overrides == {"optim.lr": "1", "run.length": "2 steps"}


def test_an_override_may_be_negative_or_empty() -> None:
    assert split_overrides(["--optim.lr", "-1", "--data.val="])[1] == {
        "optim.lr": "-1",
        "data.val": "",
    }


def test_a_bare_switch_is_true_and_leaves_the_next_option() -> None:
    words = ["--watch.wandb", "--json", "--optim.nesterov", "--watch.tensorboard", "false"]
    rest, overrides = split_overrides(words)
    assert rest == ["--json"]
    values = {"watch.wandb": "true", "optim.nesterov": "true", "watch.tensorboard": "false"}
    assert overrides == values
    assert split_overrides(["--watch.wandb"])[1] == {"watch.wandb": "true"}


ALIASES = """
--epochs 5 | --run.length '5 epochs'
--lr=0.1 | --optim.lr 0.1
--batch-size 64 | --batch.size 64
--batch_size 64 | --batch.size 64
--workers 2 | --data.threads 2
--seed 3 | --run.seed 3
--model resnet18 | --model.name resnet18
--pretrained | --model.checkpoint timm
--pretrained=False | --model.checkpoint none
--pretrained true | --model.checkpoint timm
--pretrained=a.safetensors | --model.checkpoint a.safetensors
--resume=false | --run.resume never
--resume | --run.resume auto
--resume runs/a | --run.resume runs/a
--output 'runs/a b' | --run 'runs/a b'
--out runs/a | --run runs/a
"""
SAID = {"--batch.size": " (of all ranks together)", "--data.threads": " (of each rank)"}
SAID |= {"--run.resume auto": " (the same command goes on with its run by itself)"}


@pytest.mark.parametrize("line", ALIASES.strip().splitlines())
@pytest.mark.parametrize("command", ["train debug", "launch local debug"])
def test_usual_words_are_aliases(command: str, line: str) -> None:
    theirs, _, ours = line.partition(" | ")
    words, remarks = with_our_names(shlex.split(f"{command} {theirs} --json"))
    name, value = shlex.split(ours)
    assert words == [*command.split(), f"{name}={value}", "--json"]
    assert remarks == [f"{theirs} is {ours}{SAID.get(name) or SAID.get(ours, '')}"]
    assert with_our_names(shlex.split(f"evaluate x {theirs}"))[1] == []


def test_a_switch_leaves_the_recipe() -> None:
    words, _ = with_our_names(["train", "--pretrained", "debug"])
    assert words == ["train", "--model.checkpoint=timm", "debug"]
    words, _ = with_our_names(["sweep", "debug", "--pretrained", "true,no"])
    assert words == ["sweep", "debug", "--model.checkpoint=timm,none"]


def test_a_run_to_resume_stands_for_the_recipe(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    for option in ("--resume", "--run.resume"):
        command = ("launch", "local", "--ranks", "2", option, finished, "--dry-run")
        assert run(*command) == 0
        assert f"train {finished}/recipe.toml --run {finished}" in capsys.readouterr().out
    error = refused("train", "--resume", tmp_path)
    check(error, "option.missing", names="RECIPE")


def test_no_alias_is_an_option_of_ours() -> None:
    ours = {option.strip("-").replace("-", "_") for option in options_of_training()}
    assert hints.ALIASES.keys() & ours == set()


def test_aliases_in_a_sweep_and_in_a_launch(capsys: Capture) -> None:
    sweep = ("sweep", "debug", "--epochs", "5,10", "--output", "all", "--dry-run")
    launch = ("launch", "local", "debug", "--epochs", "5", "--ranks", "2", "--dry-run")
    for command, lines in ((sweep, 2), (launch, 1)):
        assert main([*command]) == 0
        said = capsys.readouterr()
        assert "'--run.length=5 epochs'" in said.out
        assert said.err.count("\n") == lines
        assert "trainyard: --epochs 5" in said.err
    assert main([*launch, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


JSON = {
    "train debug --data {data} --run {run} " + " ".join(map(repr, SHORT)): {
        *("run", "step", "stopped", "last", "best"),
    },
    "evaluate {run}": {"samples", "top1", "top5", "loss", "data", "flip", "scales", "classes"},
    "evaluate {run} --data {data}/val": {"samples", "top1", "data"},
    "predict {run} {data}/val/3": {"checkpoint", "step", "weights", "images"},
    "report {run} --out {new}.html": {"report", "bytes", "runs"},
    "export {run} {new}.safetensors": {"exports"},
    "estimate digits --device t4 --samples 1433": {"device", "runs"},
    "data show {data}": {"train", "val"},
    "data show {data}/val": {"format", "samples", "bytes", "classes", "per_class"},
    "data index {data}/val": {"data"},
    "recipes": {"recipe"},
    "recipes --keys": {"key", "meaning"},
}


@pytest.mark.parametrize("command", JSON, ids=lambda command: command.split(" {")[0])
def test_json_has_these_keys(
    command: str, finished: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    places = {"run": finished, "data": digits, "new": tmp_path / "new"}
    words = [word.format_map(places) for word in shlex.split(command)]
    found = json.loads(shown(capsys, *words, "--json"))
    first = found[0] if isinstance(found, list) else found
    assert first.keys() >= JSON[command]


@pytest.mark.parametrize(
    "command", ["", "train", "launch local", "evaluate", "recipes", "data show", "report"]
)
def test_every_command_explains_itself(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: trainyard {command}".rstrip() in said
    assert ("recipes --keys WORD" in said) == (command in ("train", "launch local"))


@pytest.mark.parametrize("words", ["", "help", "help train"])
def test_help_is_a_command_and_what_nothing_stands_for(words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0
    assert f"usage: trainyard {words[5:]}".rstrip() in capsys.readouterr().out


def test_train_prints_where_the_run_is(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    train = ("train", "debug", "--data", digits, "--run", tmp_path / "run", *SHORT)
    *_, result, report = shown(capsys, *train).splitlines()
    assert result.endswith(f" {tmp_path / 'run'}")
    assert report.endswith(f" {tmp_path / 'run' / 'report.html'}")
    # The same command again has nothing left to do, and writes no event.
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert len(shown(capsys, *train).splitlines()) == 2
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_data_show(digits: Path, capsys: Capture) -> None:
    both = json.loads(shown(capsys, "data", "show", digits, "--json"))
    assert list(both) == ["train", "val"]
    val = json.loads(shown(capsys, "data", "show", digits / "val", "--json"))
    assert val == both["val"]
    assert val["format"] == "folder"
    assert val["samples"] == 364
    assert val["bytes"] == sum(path.stat().st_size for path in digits.glob("val/*/*.png"))
    assert val["classes"] == [str(digit) for digit in range(10)]
    counts = {path.name: len(list(path.iterdir())) for path in digits.glob("val/?")}
    assert val["per_class"] == counts
    table = shown(capsys, "data", "show", digits)
    assert "1,433" in table
    assert "364" in table


def test_class_names_are_shown_as_they_are(tmp_path: Path, capsys: Capture, digits: Path) -> None:
    image = next(digits.glob("train/0/*.png"))
    for name in ("[bold]", "[/nothing]"):
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        shutil.copy(image, folder)
    table = shown(capsys, "data", "show", tmp_path)
    assert "[bold]" in table
    assert "[-nothing]" in table


def test_data_prepare(tmp_path: Path, capsys: Capture) -> None:
    for _ in range(2):  # what is there is left as it is
        said = shown(capsys, "data", "prepare", "digits", tmp_path / "digits")
        assert {"1,433", "364"} <= set(said.split())


def test_recipes(capsys: Capture, tmp_path: Path) -> None:
    table = shown(capsys, "recipes")
    rows = json.loads(shown(capsys, "recipes", "--json"))
    assert [row["recipe"] for row in rows] == list(builtin_recipes())
    for name in builtin_recipes():
        assert name in table
        # A printed recipe is a recipe.
        (tmp_path / "printed.toml").write_text(shown(capsys, "recipes", name))
        assert load_recipe(str(tmp_path / "printed.toml")) == load_recipe(name)
        tree = json.loads(shown(capsys, "recipes", name, "--json"))
        assert tree["model"]["name"] == load_recipe(name).model.name


def test_recipe_keys(capsys: Capture) -> None:
    table = shown(capsys, "recipes", "--keys")
    rows = json.loads(shown(capsys, "recipes", "--keys", "--json"))
    assert "\\n" not in table
    assert [row["key"] for row in rows] == list(all_keys())
    assert all(row["key"] in table and row["meaning"] for row in rows)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("seed", {"run.seed", "data.val_seed"}),  # in names
        ("Label", {"augment.label_smoothing", "loss.name"}),  # in meanings
        ("batch-size", {"batch.size"}),  # of other trainers
        ("epochs", {"run.length"}),
    ],
)
def test_keys_are_found_by_a_word(word: str, found: set[str], capsys: Capture) -> None:
    rows = json.loads(shown(capsys, "recipes", "--json", "--keys", word))
    assert {row["key"] for row in rows} >= found
    assert len(rows) < 20


def test_no_key_is_found() -> None:
    check(refused("recipes", "--keys", "momentm"), "recipe.unknown-key", key="momentm")


def test_a_run_is_launched_in_place_of_a_recipe(finished: Path, capsys: Capture) -> None:
    """Kubernetes too reads the recipe from the run directory, which pods share."""
    more = ("--run.length", "4 steps", "--dry-run")
    own = ["train", f"{finished}/recipe.toml", "--run", str(finished), "--run.length=4 steps"]
    for given in ((), ("--run", finished)):
        line = shown(capsys, "launch", "local", finished, "--ranks", "2", *given, *more)
        assert shlex.split(line)[-5:] == own
    pods = ("--nodes", "1", "--image", "i", "--volume", f"runs:{finished.parent}")
    text = shown(capsys, "launch", "kubernetes", finished, *pods, *more)
    assert f'"{finished}/recipe.toml"' in text
    assert "ConfigMap" not in text


def test_launch_dry_run(capsys: Capture, digits: Path, tmp_path: Path) -> None:
    options = ("--ranks", "3", "--run", tmp_path / "a run", "--dry-run", "--run.length", "2 steps")
    line = shown(capsys, "launch", "local", "debug", "--data", digits, *options)
    ranks, times, *command = shlex.split(line)
    assert (ranks, times) == ("3", "x")
    assert command[:4] == [sys.executable, "-P", "-m", "trainyard"]
    assert command[4:] == [
        *("train", "debug", "--run", str(tmp_path / "a run"), "--data", str(digits)),
        "--run.length=2 steps",
    ]
    assert not (tmp_path / "a run").exists()


def test_long_helps_are_in_groups() -> None:
    """A help of more than ten options has titles, as that of `launch slurm` with 27."""
    queue: list[argparse.ArgumentParser] = [_parser()]
    while queue:
        parser = queue.pop()
        queue += subparsers(parser).values()
        for group in parser._action_groups:
            is_untitled = group.title in ("positional arguments", "options")
            hidden = parser.prog.endswith(" agent")
            assert len(group._group_actions) <= 10 or not is_untitled or hidden, parser.prog


@pytest.mark.parametrize("command", [[], ["estimate"], ["launch"]], ids=" ".join)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    """This is what keeps `--help` under half a second."""
    code = (
        "import sys; from trainyard.command_line import main\n"
        f"try: main({[*command, '--help']})\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'rich', 'timm', 'PIL'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.startswith(" ".join(["usage: trainyard", *command]))
    assert result.stdout.endswith("\n[]\n")
