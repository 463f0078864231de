"""Each wrong input ends with exit code 2 and one message that names it and says what to do."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, complaint, newest
from tests.training.test_checkpoint import flip_a_bit, truncate

# --- wrong words ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train digit", ["'digit'", "did you mean 'digits'?"]),
        ("train zzzz", ["'zzzz'", "there are ", "digits"]),
        ("train resnet-50", ["did you mean 'resnet50-a1', 'resnet50-a2'", "'resnet50-16ep'"]),
        ("train convnext_tiny", ["did you mean 'convnext-tiny'?"]),
        ("train digitz.toml", ["digitz.toml: no such recipe file; did you mean 'digits'?"]),
        ("train resnet101", ["there are cifar10-94"]),
        ("train debug --optim.name adamww", ["did you mean 'adamw'?"]),
        ("train debug --average.name all-reduce", ["did you mean 'allreduce'?"]),
        ("train debug --run.epochs 3", ["'run.epochs'; did you mean 'run.length'?"]),
        ("train ./none.toml", ["./none.toml: no such recipe file"]),
        ("train debug --optim.lrr 1", ["'optim.lrr'", "did you mean 'optim.lr'?"]),
        ("train debug --batch.momentum=1", ["'batch.momentum'", "did you mean 'optim.momentum'?"]),
        ("train debug --opitm.lr 1", ["unknown recipe section 'opitm'", "did you mean 'optim'?"]),
        ("train debug --lr 1", ["'--lr'", "did you mean --optim.lr 1?"]),
        ("train debug --lr=1", ["'--lr=1'", "did you mean --optim.lr 1?"]),
        ("train debug --optim.lr", ["--optim.lr needs a value"]),
        ("train debug --optim.lr high", ['optim.lr = "high"', "a valid number"]),
        ("train debug --optim.lr 0", ["optim.lr = 0", "greater than 0"]),
        ("train debug --optim.lr inf", ["optim.lr", "finite"]),
        ("train debug --optim.nesterov 1", ["optim.nesterov = 1", "boolean"]),
        ("train debug --optim.nesterov true --optim.momentum 0", ["nesterov", "optim.momentum"]),
        ("train debug --optim.betas 0.9,1", ["optim.betas = 1", "less than 1"]),
        ("train debug --batch.size 64x", ['batch.size = "64x"', "valid integer"]),
        ("train debug --batch.size 1.5", ["batch.size = 1.5", "valid integer"]),
        ("train debug --batch.size true", ["batch.size = true", "valid integer"]),
        ("train debug --batch.size 0", ["batch.size = 0", "greater than or equal to 1"]),
        ("train debug --batch.micro 0", ["batch.micro = 0", "'auto' or", "equal to 1"]),
        ("train debug --batch.precision fp8", ['"fp8"', "'bf16' or 'fp16'"]),
        ("train debug --run.length '5 years'", ['"5 years"', "5 epochs"]),
        ("train debug --run.length '0 steps'", ['"0 steps"', "at least one step"]),
        ("train debug --run.length 50%", ['"50%"', "cannot be a percentage"]),
        ("train debug --augment.scale 1,0.5", ["augment.scale = [1, 0.5]", "smaller number first"]),
        ("train debug --augment.scale 0.5", ["augment.scale = [0.5]: expected a list of 2 values"]),
        ("train debug --augment.scale [1,2,3]", ["a list of 2 values, [0.08, 1.0] say"]),
        ("train debug --augment.color_jitter 1", ["color_jitter = [1]: write three strengths"]),
        ("train debug --data.std 0,1,1", ["data.std", "greater than 0"]),
        ("train debug --nonsense", ["'--nonsense'", "see trainyard train --help"]),
        ("train debug extra", ["'extra'", "see trainyard train --help"]),
        ("train", ["RECIPE", "see trainyard train --help"]),
        ("train --data tests", ["RECIPE, such as photos or finetune"]),
        ("train photos", ["data.train is not set: pass --data LOCATION"]),
        ("train photos --data.train no/x --data.val no/y", ["no/x: no such file"]),
        ("train finetune --model.checkpoint ''", ['model.checkpoint = "": write none']),
        ("evaluate tests", ["if it is data: trainyard evaluate RUN --data tests"]),
        ("", ["COMMAND", "see trainyard --help"]),
        ("trian debug", ["COMMAND cannot be 'trian'; did you mean 'train'?"]),
        ("zzz", ["COMMAND cannot be 'zzz'; choose from train, launch"]),
        ("prepare digits", ["did you mean 'data prepare'?"]),
        ("slurm debug", ["did you mean 'launch slurm'?"]),
        ("digits", ["did you mean 'train digits' or 'data prepare digits'?"]),
        ("data prepar digits", ["ACTION cannot be 'prepar'; did you mean 'prepare'?"]),
        ("data pack a b --format webdatset", ["--format", "did you mean 'webdataset'?"]),
        ("launch", ["LAUNCHER"]),
        ("launch moon debug", ["'moon'", "local"]),
        ("launch local debug --ranks 0", ["--ranks", "'0' is not a whole number above 0"]),
        ("launch local debug --ranks two", ["--ranks", "'two' is not a whole number above 0"]),
        ("launch local debug --batch.size 0", ["batch.size = 0"]),
        ("evaluate", ["RUN_OR_CHECKPOINT"]),
        ("evaluate x --optim.lr 1", ["optim.lr changes nothing about an evaluation", "batch"]),
        ("evaluate x --per-class 0", ["--per-class", "'0' is not a whole number above 0"]),
        ("evaluate x --per-class ²", ["--per-class", "'²' is not a whole number above 0"]),
        ("data stage x --to y --gb many", ["--gb", "'many' is not a number"]),
        ("evaluate x --predictions p.txt", ["--predictions p.txt", "ends in .csv"]),
        ("data show x --optim.lr 1", ["data takes no recipe keys such as optim.lr"]),
        ("recipes digit", ["'digit'", "did you mean 'digits'?"]),
        ("data prepare cifar", ["DATASET", "did you mean 'cifar10' or 'cifar100'?"]),
        ("data show", ["LOCATION"]),
    ],
)
def test_wrong_words(arguments: str, words: list[str], capsys: Capture) -> None:
    said = complaint(capsys, *shlex.split(arguments))
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("train debug --epochs 3", "--run.length '3 epochs'"),
        ("train --epochs 3 debug", "--run.length '3 epochs'"),
        ("train debug --batch-size 64", "--batch.size 64 (of all ranks together)"),
        ("train debug -b 64", "--batch.size 64 (of all ranks together)"),
        ("train debug --learning-rate 1e-3", "--optim.lr 1e-3"),
        ("train debug --workers=8", "--data.threads 8"),
        ("train debug --opt lamb", "--optim.name lamb"),
        ("train debug --amp", "--batch.precision bf16"),
        ("train debug --data-path /a/b", "--data /a/b"),
        ("train debug --datas x", "--data x"),
        ("train debug --optim-lr 1", "--optim.lr 1"),
        ("train debug --quite", "--quiet"),
        ("train debug --gpus 4", "trainyard launch local RECIPE --ranks 4"),
        ("launch local debug --gpus 4", "--ranks 4"),
        ("launch local debug --nproc 4", "--ranks 4"),
        ("train debug optim.lr=1", "--optim.lr=1"),
        ("train debug tests", "--data tests"),
        ("evaluate x --batch-size 64", "--batch.size 64 (of all ranks together)"),
        ("predict x y --workers 8", "--data.threads 8"),
        ("launch slurm debug --node 2", "--nodes 2"),
        ("recipes --key", "--keys"),
        ("data show x --spilt val", "--split val"),
    ],
)
def test_wrong_options(arguments: str, hint: str, capsys: Capture) -> None:
    assert f"; did you mean {hint}?\n" in complaint(capsys, *shlex.split(arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        "evaluate x --lr 1",  # no key of an evaluation
        "data show x --epochs 3",  # takes no keys
        "recipes --device cuda",  # uses none
        "train debug --qqq",
    ],
)
def test_no_hint_is_better_than_a_wrong_one(arguments: str, capsys: Capture) -> None:
    said = complaint(capsys, *shlex.split(arguments))
    assert said.endswith(" --help\n")
    assert "did you mean" not in said


def test_hints_at_keys_are_keys_of_the_command(finished: Path, capsys: Capture) -> None:
    said = complaint(capsys, "evaluate", finished, "--data.lr", "1")
    assert "unknown recipe key 'data.lr'; `trainyard recipes --keys` lists all" in said


def test_a_device_is_found_by_itself(capsys: Capture) -> None:
    assert "CUDA_VISIBLE_DEVICES" in complaint(capsys, "train", "debug", "--device", "cuda:1")


def test_data_or_a_run_in_place_of_a_recipe(
    finished: Path, digits: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("train", "launch local", "launch slurm", "doctor"):
        said = complaint(capsys, *command.split(), digits)
        assert f"did you mean trainyard {command} RECIPE --data {digits}?" in said
    said = complaint(capsys, "train", "http://host:8765")
    assert "did you mean trainyard train RECIPE --data http://host:8765?" in said
    said = complaint(capsys, "train", finished)
    assert f"did you mean trainyard train {finished}/recipe.toml --run {finished}?" in said
    assert f"{digits}: is a folder; a recipe is" in complaint(capsys, "estimate", digits)
    (tmp_path / "debug").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "no such file or folder" in complaint(capsys, "train", "debug", "--data", "none")


def test_a_run_that_is_not_the_first_argument(
    finished: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    said = complaint(capsys, "predict", digits, finished)
    assert f"did you mean trainyard predict {finished} {digits}?" in said
    said = complaint(capsys, "export", tmp_path / "a.onnx", finished)
    assert f"did you mean trainyard export {finished} {tmp_path}/a.onnx?" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[optim\n", ["mine.toml: not TOML", "line 1"]),
        ("lr = 3\n", ["'lr' stands outside a section", "did you mean 'optim.lr'?"]),
        ("[optimizer]\nlr = 3\n", ["section 'optimizer'", "did you mean 'optim'?"]),
        ("[optim]\nmomentun = 0.9\n", ["'optim.momentun'", "did you mean 'optim.momentum'?"]),
        ('[batch]\nsize = "64"\n', ['batch.size = "64"', "valid integer"]),
        ("[run]\nlength = 2020-02-02\n", ["numbers, text and lists only"]),
        ("augment = 3\n", ["augment = 3"]),
        ('extends = "mine.toml"\n', ["mine.toml: extends itself"]),
        ('extends = "digit"\n', ["mine.toml: extends", "'digit'", "did you mean 'digits'?"]),
        ('extends = "./none.toml"\n', ["mine.toml: extends", "./none.toml: no such recipe file"]),
    ],
)
def test_wrong_recipes(toml: str, words: list[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine.toml").write_text(toml)
    said = complaint(capsys, "train", tmp_path / "mine.toml")
    assert [word for word in words if word not in said] == [], said


def test_a_recipe_that_is_no_text(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xff\xd8\xff\xe0")
    assert "mine.toml: not TOML" in complaint(capsys, "train", tmp_path / "mine.toml")


# --- wrong models ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model.name resnet5", ["model.name", "'resnet5'", "did you mean 'resnet50'"]),
        ("--model.name qqqqqqqq", ["'qqqqqqqq'", "timm.list_models()"]),
        (
            "--model.name vgg11 --model.drop_path 0.1",
            ["vgg11 does not take model.drop_path"],
        ),
        ("--data.eval_size 33", ["test_vit", "the last 1 of 33 pixels", "32 or 48"]),
        ("--data.image_size 8", ["test_vit", "choose 16 for data.image_size"]),
        ("--model.options {foo=1}", ["model.options: test_vit does not take 'foo'"]),
        ("--model.options {img_size=32}", ["model.options: img_size", "say data.image_size"]),
        ("--model.freeze \"['blocks']\"", ["model.freeze", "'blocks'", "did you mean 'blocks.*'?"]),
        ("--model.checkpoint none.pth", ["model.checkpoint = 'none.pth'", "no such run"]),
    ],
)
def test_wrong_models(
    arguments: str, words: list[str], digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "run"
    where = ("--data", digits, "--run", folder)
    said = complaint(capsys, "train", "debug", *where, *shlex.split(arguments))
    assert [word for word in words if word not in said] == [], said
    assert not folder.exists()  # the corrected recipe may have it


LONG_NAME = "x" * 256
LONG_PATH = "/".join(["y" * 99] * 50)
LOOP = "loop"  # a link to itself


@pytest.mark.parametrize("name", [LONG_NAME, LONG_PATH, LOOP], ids=["name", "path", "loop"])
@pytest.mark.parametrize("command", ["train debug --data {0} --run", "report", "evaluate"])
def test_a_path_that_no_file_can_have(
    command: str,
    name: str,
    digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / LOOP).symlink_to(LOOP)
    assert name in complaint(capsys, *command.format(digits).split(), name)


def test_a_run_directory_without_room_for_the_paths_in_it(
    digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    """It can be made, and the first checkpoint, after 10 minutes, cannot."""
    folder = tmp_path / LONG_PATH[: 4_060 - len(str(tmp_path))]
    said = complaint(capsys, "train", "debug", "--data", digits, "--run", folder)
    assert "cannot be a run directory (File name too long)" in said
    assert [*tmp_path.iterdir()] == []


# --- wrong data ---


def copy_of(digits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits, tmp_path / "data"))


def missing(digits: Path, tmp_path: Path) -> tuple[Path, str]:
    return tmp_path / "nowhere", "nowhere: no such file or folder"


def empty(digits: Path, tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty", "empty: has no train and no val data; the same command"


def without_val(digits: Path, tmp_path: Path) -> tuple[Path, str]:
    shutil.rmtree(copy_of(digits, tmp_path) / "val")
    return tmp_path / "data", "data: has no val data; the same command with --data.val_share 0.1"


def without_classes(digits: Path, tmp_path: Path) -> tuple[Path, str]:
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
    return tmp_path / "data", "data: train and val are splits by name, and no class"


def without_images(digits: Path, tmp_path: Path) -> tuple[Path, str]:
    for split in ("train", "val"):
        (tmp_path / "data" / split / "cat").mkdir(parents=True)
    return tmp_path / "data", "data/train: no images found in it"


def with_another_val_class(digits: Path, tmp_path: Path) -> tuple[Path, str]:
    val = copy_of(digits, tmp_path) / "val"
    (val / "9").rename(val / "nine")
    return tmp_path / "data", "'nine' is new, '9' is missing"


WRONG_DATA = (
    *(missing, empty, without_val, without_classes, without_images),
    with_another_val_class,
)


@pytest.mark.parametrize("make", WRONG_DATA)
def test_wrong_data(
    make: Callable[[Path, Path], tuple[Path, str]], digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    data, words = make(digits, tmp_path)
    folder = tmp_path / "run"
    said = complaint(capsys, "train", "debug", "--data", data, "--run", folder)
    assert words in said
    assert not folder.exists()


def test_an_empty_location_is_none(capsys: Capture, tmp_path: Path) -> None:
    """As from `--data $UNSET`: not to be taken for the recipe's own data."""
    said = complaint(capsys, "train", "debug", "--data", "", "--run", tmp_path / "run")
    assert "an empty location" in said


def test_data_that_no_option_named(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine.toml").write_text('[model]\nname = "test_vit"\n')
    said = complaint(capsys, "train", tmp_path / "mine.toml", "--run", tmp_path / "run")
    assert "data.train is not set: pass --data LOCATION" in said


def test_evaluating_on_data_of_other_classes(
    finished: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    data, words = with_another_val_class(digits, tmp_path)
    assert words in complaint(capsys, "evaluate", finished, "--data", data)
    where = f"--data.val={data / 'val'}"  # in place of the run's own, which had all classes
    assert words in complaint(capsys, "evaluate", finished, where)


def test_evaluating_as_the_checkpoint_cannot(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    nothing = tmp_path / "none.json"
    assert f"{nothing}: cannot be" in complaint(capsys, "evaluate", finished, "--labels", nothing)
    nowhere = tmp_path / "none" / "p.csv"
    said = complaint(capsys, "evaluate", finished, "--json", "--predictions", nowhere)
    assert "p.csv: cannot be written" in said


@pytest.mark.parametrize("action", ["index", "show"])
def test_data_commands_on_nothing(action: str, tmp_path: Path, capsys: Capture) -> None:
    said = complaint(capsys, "data", action, tmp_path / "none")
    assert "none: no such file or folder" in said
    said = complaint(capsys, "data", action, tmp_path)
    assert "no images found; expected one folder per class" in said


def test_digits_into_a_folder_of_something_else(tmp_path: Path, capsys: Capture) -> None:
    said = complaint(capsys, "data", "prepare", "digits", tmp_path)
    assert "holds 0 and 0 digits instead of 1433 and 364; remove the folder" in said


def test_a_wrong_recipe_is_named_and_a_wrong_option_is_not(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[optim]\nlrr = 1\n")
    for options in ((), ("--optim.lr", "1"), ("--batch.size", "8")):
        said = complaint(capsys, "train", path, *options)
        assert said.startswith(f"trainyard: {path}: unknown recipe key 'optim.lrr'")
    path.write_text("[optim]\nlr = 1\n")
    for option in ("--optim.lrr", "--opitm.lr"):
        assert str(path) not in complaint(capsys, "train", path, option, "1")


def test_wrong_paths_are_reported_before_torch_is_loaded(finished: Path, tmp_path: Path) -> None:
    """A wrong name took 8 to 12 seconds."""
    nowhere, run = str(tmp_path / "nowhere"), str(finished)
    commands = [
        ["predict", nowhere, "x.png"],
        ["predict", run, nowhere],
        ["evaluate", nowhere],
        ["evaluate", run, "--data", nowhere],
        ["export", nowhere, "x.onnx"],
        ["report", nowhere],
        ["estimate", "photos", "--run", nowhere],
        ["train", "photos"],
        ["train", "photos", "--data", nowhere],
        ["train", "photos", "--data.train", nowhere, "--data.val", nowhere],
    ]
    program = (
        "import sys\nfrom trainyard.command_line import main\n"
        f"codes = [main(words) for words in {commands!r}]\n"
        "assert set(codes) == {2}, codes\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


# --- wrong run directories and checkpoints ---


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "copy", symlinks=True))


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_refused(
    name: str,
    damage: Callable[[Path], None],
    copied: Path,
    digits: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    damage(newest(copied) / name)
    train = ("train", "debug", *SHORT, "--data", digits, "--run")
    for arguments in (
        ("evaluate", copied),
        (*train, copied),
        (*train, tmp_path / "new", "--run.resume", newest(copied)),
    ):
        said = complaint(capsys, *arguments)
        assert name.partition(".")[0] in said
        assert "step-00000002" in said
        assert "taking the one before it" not in said  # there is none


def test_an_ending_that_contradicts_the_format_is_refused(
    finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The file of another format was overwritten, with a card that loads it wrongly."""
    path = tmp_path / "a.onnx"
    said = complaint(capsys, "export", finished, path, "--format", "safetensors")
    assert f"{path}: ends in .onnx, and --format is safetensors" in said


def test_the_folder_of_runs_is_no_run(finished: Path, capsys: Capture) -> None:
    said = complaint(capsys, "report", finished.parent)
    assert f"did you mean {finished.parent}/*?" in said


def test_checkpoints_that_are_none(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    nothing = "neither a run directory nor a checkpoint"
    assert nothing in complaint(capsys, "evaluate", tmp_path)
    assert nothing in complaint(capsys, "evaluate", tmp_path / "none")
    (tmp_path / "checkpoints").mkdir()
    assert "has no checkpoint yet" in complaint(capsys, "evaluate", tmp_path)
    where = ("--data", digits, "--run", tmp_path / "new")
    said = complaint(capsys, "train", "debug", *where, "--run.resume", tmp_path / "none")
    assert "none" in said
    assert "no such checkpoint" in said


def test_a_run_directory_of_another_recipe(finished: Path, digits: Path, capsys: Capture) -> None:
    train = ("train", "debug", "--data", digits, "--run", finished, *SHORT)
    said = complaint(capsys, *train, "--optim.lr", "0.5", "--augment.flip", "0.25")
    assert f"{finished} holds a run of another recipe" in said
    assert "optim.lr: 0.004 -> 0.5" in said
    assert "augment.flip: 0.0 -> 0.25" in said
    assert said.endswith("choose another directory with --run\n")
    said = complaint(capsys, *train, "--run.length", "4 steps")
    assert f"to train on from its end, add --run.resume {finished}\n" in said


def test_a_run_directory_of_other_data(
    finished: Path, digits: Path, tmp_path: Path, capsys: Capture
) -> None:
    data = copy_of(digits, tmp_path)
    next((data / "val" / "5").iterdir()).unlink()
    said = complaint(capsys, "train", "debug", "--data", data, "--run", finished, *SHORT)
    assert f"the val data differs from the data that the run in {finished} started with" in said


def test_a_run_directory_without_its_data_s_fingerprint(
    copied: Path, digits: Path, capsys: Capture
) -> None:
    (copied / "environment.json").unlink()
    said = complaint(capsys, "train", "debug", "--data", digits, "--run", copied, *SHORT)
    assert "environment.json cannot be read" in said


def test_a_damaged_recipe_in_a_run_directory(copied: Path, digits: Path, capsys: Capture) -> None:
    truncate(copied / "recipe.toml")
    said = complaint(capsys, "train", "debug", "--data", digits, "--run", copied, *SHORT)
    assert str(copied) in said


def test_a_run_directory_that_cannot_be_one(digits: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/run")):
        said = complaint(capsys, "train", "debug", "--data", digits, "--run", folder, *SHORT)
        assert f"{folder} cannot be a run directory" in said
        assert "choose another with --run" in said


def test_a_run_directory_that_is_read_only(
    digits: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run as root, whom no mode keeps from writing.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    said = complaint(capsys, "train", "debug", "--data", digits, "--run", tmp_path, *SHORT)
    assert f"{tmp_path} cannot be a run directory (it is not writable)" in said
