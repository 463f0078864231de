"""Each wrong input ends with exit code 2 and one message that names it and says what to do."""

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import SHORT, Capture, complaint, newest
from tests.errors import check, refused
from tests.training.test_checkpoint import flip_a_bit, truncate
from trainyard.errors import TrainyardError

# --- wrong words ---

UNKNOWN = "option.unknown"
NAMES = "option.unknown-choice"
KEY = "recipe.unknown-key"

# A command, the code of its error, its fields, and the words that it suggests.
WRONG_WORDS: list[tuple[str, str, dict[str, str], list[str]]] = [
    ("train digit", "recipe.unknown-name", {"name": "digit"}, ["digits"]),
    ("recipes digit", "recipe.unknown-name", {"name": "digit"}, ["digits"]),
    ("train resnet101", "recipe.unknown-name", {"name": "resnet101"}, []),
    ("train digitz.toml", "recipe.no-such-file", {"path": "digitz.toml"}, ["digits"]),
    ("train ./none.toml", "recipe.no-such-file", {"path": "./none.toml"}, []),
    ("train debug --optim.lrr 1", KEY, {"key": "optim.lrr"}, ["optim.lr"]),
    ("train debug --run.epochs 3", KEY, {"key": "run.epochs"}, ["run.length"]),
    ("train debug --run.dir x", KEY, {"key": "run.dir"}, ["--run"]),
    ("train debug --model.name resnt50", "model.unknown-name", {"name": "resnt50"}, ["resnet50"]),
    ("train debug --batch.momentum=1", KEY, {"key": "batch.momentum"}, ["optim.momentum"]),
    ("train debug --opitm.lr 1", "recipe.unknown-section", {"section": "opitm"}, ["optim"]),
    ("train debug --optim.lr", "option.needs-value", {"option": "--optim.lr"}, []),
    ("train debug --optim.lr --json", "option.needs-value", {"option": "--optim.lr"}, []),
    ("train debug --output", UNKNOWN, {"option": "--output"}, []),
    ("train --resume runs/a", "option.missing", {"names": "RECIPE"}, []),
    ("train debug --optim.lr 0", "recipe.invalid-value", {"key": "optim.lr", "value": "0"}, []),
    (
        "train debug --average.name all-reduce",
        *("recipe.invalid-value", {"key": "average.name"}, ["allreduce"]),
    ),
    ("launch local debug --batch.size 0", "recipe.invalid-value", {"key": "batch.size"}, []),
    ("train finetune --model.checkpoint ''", "recipe.empty-value", {}, []),
    ("train photos", "recipe.data-not-set", {"key": "data.train"}, []),
    ("train photos --data.train no/x --data.val no/y", "data.not-found", {"path": "no/x"}, []),
    ("train debug --data ''", "data.empty-location", {}, []),  # as from `--data $UNSET`
    ("evaluate tests", "checkpoint.wrong-path", {"path": "tests"}, []),
    ("evaluate x --out p.txt", "option.wrong-suffix", {"suffix": ".csv"}, []),
    ("data stage x --to y --optim.lr 1", "option.takes-no-recipe-keys", {"key": "optim.lr"}, []),
    ("data show x --optim.lr 1", "option.needs-augmented", {"key": "optim.lr"}, []),
    ("train --data tests", "option.missing", {"names": "RECIPE"}, []),
    ("trian debug", NAMES, {"option": "COMMAND", "value": "trian"}, ["train"]),
    ("prepare digits", NAMES, {"option": "COMMAND"}, ["data prepare"]),
    ("digits", NAMES, {"option": "COMMAND"}, ["train digits", "data prepare digits"]),
    ("zzz", NAMES, {"option": "COMMAND"}, []),
    ("fit debug", NAMES, {"option": "COMMAND"}, ["train"]),
    ("validate runs/a", NAMES, {"option": "COMMAND"}, ["evaluate"]),
    ("data prepar digits", NAMES, {"option": "ACTION"}, ["prepare"]),
    ("data prepare cifar", NAMES, {"option": "DATASET"}, ["cifar10", "cifar100"]),
    ("data pack a b --format webdatset", NAMES, {"option": "--format"}, ["webdataset"]),
    ("launch moon debug", NAMES, {"option": "LAUNCHER", "value": "moon"}, []),
    ("launch local debug --ranks 0", "option.invalid", {"option": "--ranks"}, []),
    ("evaluate x --per-class ²", "option.invalid", {"option": "--per-class"}, []),
    ("data stage x --to y --gb many", "option.invalid", {"option": "--gb"}, []),
    ("train debug --quiet --plain", "option.invalid", {"option": "--plain"}, []),
    ("bench loader tests --batch 0", "option.invalid", {"option": "--batch"}, []),
    ("train debug --nonsense", UNKNOWN, {"option": "--nonsense"}, []),
    ("train debug extra", UNKNOWN, {"option": "extra"}, []),
    ("data show x --epochs 3", UNKNOWN, {"option": "--epochs"}, []),  # no key of a sheet
    ("data stage x --to y --epochs 3", UNKNOWN, {"option": "--epochs"}, []),  # takes no keys
    ("evaluate x --lr 1", UNKNOWN, {"option": "--lr"}, []),  # no key of an evaluation
    ("recipes --device cuda", UNKNOWN, {"option": "--device"}, []),
]


@pytest.mark.parametrize(("arguments", "code", "fields", "meant"), WRONG_WORDS)
def test_wrong_words(arguments: str, code: str, fields: dict[str, str], meant: list[str]) -> None:
    error = refused(*shlex.split(arguments))
    check(error, code, **fields)
    assert suggested(error) == meant


def suggested(error: TrainyardError) -> list[str]:
    """The names that an error asks whether they were meant."""
    hint = str(error.fields.get("hint", ""))
    return re.findall(r"'([^']+)'", hint) if "did you mean" in hint else []


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("train debug --num-epochs 3", "--run.length '3 epochs'"),
        ("recipes debug --lr=1", "--optim.lr 1"),
        ("recipes debug --epochs 3", "--run.length '3 epochs'"),
        ("train debug -b 64", "--batch.size 64 (of all ranks together)"),
        ("train debug -j 8", "--data.threads 8 (of each rank)"),
        ("train debug --amp", "--batch.precision bf16"),
        ("train debug --data-path /a/b", "--data /a/b"),
        ("train debug --quite", "--quiet"),
        ("train debug --devices 4", "--gpus 4"),
        ("train 'my recipe' --nproc 4", "trainyard launch local 'my recipe' --ranks 4"),
        ("launch local debug --devices 4", "--gpus 4"),
        ("launch local debug --nproc 4", "--ranks 4"),
        ("train debug optim.lr=1", "--optim.lr=1"),
        ("train debug tests", "--data tests"),
        ("predict x y --workers 8", "--data.threads 8 (of each rank)"),
        ("launch slurm debug --node 2", "--nodes 2"),
        ("data show x --spilt val", "--split val"),
        ("data show x --sheet a.png", "--out a.png"),
        ("evaluate x --predictions p.csv", "--out p.csv"),
        ("evaluate x --tables 'my tables'", "--out 'my tables'"),
        ("predict x y --csv p.csv", "--out p.csv"),
        ("predict x y --cam=maps", "--out maps"),
        ("predict x y --embeddings e.npz", "--out e.npz"),
        ("predict x y --output-dir out", "--out out"),
        ("runs --csv a.csv", "--out a.csv"),
        ("export x --out 'my m.onnx'", "trainyard export x 'my m.onnx'"),
        ("export x --output", "trainyard export x FILE"),
        ("estimate digits --run runs/a", "--measured runs/a"),
        ("launch kubernetes debug --image i --memory 8Gi", "--mem 8Gi"),
        ("launch kubernetes debug --image i --cpu 8", "--cpus 8, of each rank"),
        ("data verify x --workers 3", "--processes 3"),
        ("predict x y --threshold 0.5", "--unknown-below 0.5"),
        ("evaluate x --img-size 288", "--data.eval_size 288"),
        ("estimate digits --gpu a100", "--device a100"),
    ],
)
def test_wrong_options(arguments: str, meant: str) -> None:
    check(refused(*shlex.split(arguments)), UNKNOWN, hint=f"; did you mean {meant}?")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("train photos --data My Photos --json", "train photos --data 'My Photos' --json"),
        ("train photos --data.train My Photos", "train photos --data.train 'My Photos'"),
        ("data show My Photos", "data show 'My Photos'"),
        ("data pack My Photos out --format folder", "data pack 'My Photos' out --format folder"),
        ("predict runs/a My Photos other.png", "predict runs/a 'My Photos' other.png"),
        ("export runs/a My Photos/of the sea/a.onnx", None),  # there is no such file yet
        ("predict runs/a My Photos/of the sea", "predict runs/a 'My Photos/of the sea'"),
        ("train photos --data Photos", None),
    ],
)
def test_a_path_with_spaces_that_has_no_quotes(
    arguments: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its words was named as wrong by itself."""
    (tmp_path / "My Photos" / "of the sea").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    error = refused(*arguments.split())
    assert (error.code == "option.unquoted") == (meant is not None)
    if meant:
        check(error, "option.unquoted", command=f"trainyard {meant}")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("train 'My Photos' photos --plain", "train photos --plain --data 'My Photos'"),
        ("train photos.csv finetune", "train finetune --data photos.csv"),
        ("launch local http://host:80 mine.toml", "launch local mine.toml --data http://host:80"),
        ("sweep photos.csv digits --optim.lr 1,2", "sweep digits --optim.lr 1,2 --data photos.csv"),
        ("train 'My Photos' --data photos", "train photos --data 'My Photos'"),
    ],
)
def test_data_before_the_recipe(
    arguments: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "My Photos").mkdir()
    (tmp_path / "photos.csv").touch()
    monkeypatch.chdir(tmp_path)
    error = refused(*shlex.split(arguments))
    if error.code == UNKNOWN:
        check(error, UNKNOWN, hint=f"; did you mean trainyard {meant}?")
    else:
        check(error, "recipe.is-data", command=f"trainyard {meant}")


def test_suspects_are_no_predictions() -> None:
    """`--out s.csv` would have written those."""
    error = refused("evaluate", "x", "--suspects", "s.csv")
    check(error, UNKNOWN, option="--suspects")
    assert "trainyard suspects x" in str(error.fields["hint"])


@pytest.mark.parametrize("option", ["--gpus", "--ranks", "--device", "--nproc"])
def test_a_sweep_takes_gpus_by_itself(option: str) -> None:
    error = refused("sweep", "debug", "--optim.lr", "1,2", option, "2")
    assert "CUDA_VISIBLE_DEVICES" in str(error.fields["hint"])


def test_an_error_is_one_line_on_stderr(capsys: Capture) -> None:
    """And with --json the same line is in it."""
    for options in ((), ("--json",)):
        assert complaint(capsys, "train", "digit", *options).count("\n") == 1


def test_data_or_a_run_in_place_of_a_recipe(
    finished: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["train"], ["launch", "local"], ["launch", "slurm"], ["doctor"]):
        command = shlex.join(["trainyard", *words, "RECIPE", "--data", str(digits)])
        check(refused(*words, digits), "recipe.is-data", command=command)
    check(refused("train", "http://host:8765"), "recipe.is-data", location="http://host:8765")
    for words in (["doctor"], ["sweep"]):
        with_keys = ("--optim.lr", "1,2") if words == ["sweep"] else ()
        own = f"{finished}/recipe.toml"
        check(
            refused(*words, finished, *with_keys),
            "recipe.is-run",
            path=shlex.quote(str(finished)),
            recipe=own,
        )
    for words in (["train"], ["launch", "local"]):
        check(refused(*words, finished, "--run", tmp_path / "new"), "recipe.is-run", recipe=own)
    check(refused("estimate", digits), "recipe.is-folder", path=digits)
    (tmp_path / "debug").mkdir()
    monkeypatch.chdir(tmp_path)
    check(refused("train", "debug", "--data", "none"), "data.not-found", path="none")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.lr", "1"),
        ("model.checkpoint", "better.pth"),  # whose weights one took for those of the result
        ("model.ema_decay", "0.99"),
        ("model.freeze", "blocks.*"),
        ("data.order", "resample"),
        ("augment.scale", "[1, 1]"),
    ],
)
def test_a_key_without_effect_after_the_training(
    key: str, value: str, finished: Path, tmp_path: Path
) -> None:
    for words in (["evaluate"], ["export", tmp_path / "m.pt2"], ["predict", tmp_path / "a.png"]):
        error = refused(words[0], finished, *words[1:], f"--{key}", value)
        check(error, "recipe.key-without-effect", key=key)


def test_keys_of_an_evaluation_that_would_not_be_read(finished: Path, digits: Path) -> None:
    """An evaluation on other data passed over where the run's should come from."""
    for name, value in (("val", digits), ("val_share", "0.5"), ("val_seed", "1")):
        error = refused("evaluate", finished, "--data", digits, f"--data.{name}", value)
        check(error, "recipe.key-beside-data", key=f"data.{name}")
    sizes = ("--data.eval_size", "24", "--data.image_size", "32")
    check(refused("evaluate", finished, *sizes), "recipe.size-without-effect", eval_size=24)


def test_a_run_that_is_not_the_first_argument(finished: Path, digits: Path, tmp_path: Path) -> None:
    swapped = f"; did you mean trainyard predict {shlex.join([str(finished), str(digits)])}?"
    check(refused("predict", digits, finished), "checkpoint.wrong-path", hint=swapped)
    file = tmp_path / "a.onnx"
    swapped = f"; did you mean trainyard export {shlex.join([str(finished), str(file)])}?"
    check(refused("export", file, finished), "checkpoint.wrong-path", hint=swapped)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("toml", "code", "cause"),
    [
        ("[optim\n", "recipe.not-toml", None),
        ("lr = 3\n", "recipe.invalid-file", "recipe.key-outside-section"),
        ("[optimizer]\nlr = 3\n", "recipe.invalid-file", "recipe.unknown-section"),
        ("[optim]\nmomentun = 0.9\n", "recipe.invalid-file", "recipe.unknown-key"),
        ('[batch]\nsize = "64"\n', "recipe.invalid-file", "recipe.invalid-value"),
        ("[run]\nlength = 2020-02-02\n", "recipe.invalid-file", "recipe.not-plain-values"),
        ("augment = 3\n", "recipe.invalid-file", "recipe.invalid-value"),
        ('extends = "mine.toml"\n', "recipe.extends-itself", None),
        ('extends = "digit"\n', "recipe.base-not-found", "recipe.unknown-name"),
        ('extends = "./none.toml"\n', "recipe.base-not-found", "recipe.no-such-file"),
        ("\xff", "recipe.not-toml", None),
    ],
)
def test_wrong_recipes(toml: str, code: str, cause: str | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(toml.encode("latin-1"))
    error = refused("train", path)
    check(error, code, path=path)
    inner = error.fields.get("error")
    assert (inner.code if isinstance(inner, TrainyardError) else None) == cause


# --- wrong models ---


@pytest.mark.parametrize(
    ("arguments", "code", "fields"),
    [
        ("--model.name resnet5", "model.unknown-name", {"name": "resnet5"}),
        (
            "--model.name vgg11 --model.drop_path 0.1",
            *("model.key-not-taken", {"name": "vgg11", "key": "model.drop_path"}),
        ),
        (
            "--data.eval_size 33",
            *("model.patches-leave-pixels", {"left": "1", "side": "33", "sizes": "32 or 48"}),
        ),
        ("--data.image_size 8", "model.patches-leave-pixels", {"side": "8", "sizes": "16"}),
        ("--model.options {foo=1}", "model.unknown-option", {"argument": "foo"}),
        ("--model.options {img_size=32}", "model.option-elsewhere", {"name": "img_size"}),
        ("--model.freeze \"['blocks']\"", "recipe.pattern-unmatched", {"pattern": "blocks"}),
        ("--model.checkpoint none.pth", "weights.not-found", {"value": "none.pth"}),
    ],
)
def test_wrong_models(
    arguments: str, code: str, fields: dict[str, str], digits: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    where = ("--data", digits, "--run", folder)
    check(refused("train", "debug", *where, *shlex.split(arguments)), code, **fields)
    assert not folder.exists()  # the corrected recipe may have it


LONG_NAME = "x" * 256
LONG_PATH = "/".join(["y" * 99] * 50)
LOOP = "loop"  # a link to itself


@pytest.mark.parametrize("name", [LONG_NAME, LONG_PATH, LOOP], ids=["name", "path", "loop"])
@pytest.mark.parametrize("command", ["train debug --data {0} --run", "report", "evaluate"])
def test_a_path_that_no_file_can_have(
    command: str, name: str, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / LOOP).symlink_to(LOOP)
    words = shlex.split(command.format(shlex.quote(str(digits))))
    assert name in str(refused(*words, name))


def test_a_run_directory_without_room_for_the_paths_in_it(digits: Path, tmp_path: Path) -> None:
    """It can be made, and the first checkpoint, after 10 minutes, cannot."""
    folder = tmp_path / LONG_PATH[: 4_060 - len(str(tmp_path))]
    error = refused("train", "debug", "--data", digits, "--run", folder)
    check(error, "run.directory-unusable", reason=os.strerror(errno.ENAMETOOLONG))
    assert [*tmp_path.iterdir()] == []


# --- wrong data ---


def copy_of(digits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits, tmp_path / "data"))


def missing(digits: Path, tmp_path: Path) -> Path:
    return tmp_path / "nowhere"


def empty(digits: Path, tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def without_val(digits: Path, tmp_path: Path) -> Path:
    data = copy_of(digits, tmp_path)
    shutil.rmtree(data / "val")
    return data


def without_classes(digits: Path, tmp_path: Path) -> Path:
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
    return tmp_path / "data"


def without_images(digits: Path, tmp_path: Path) -> Path:
    for split in ("train", "val"):
        (tmp_path / "data" / split / "cat").mkdir(parents=True)
    return tmp_path / "data"


def with_another_val_class(digits: Path, tmp_path: Path) -> Path:
    data = copy_of(digits, tmp_path)
    (data / "val" / "9").rename(data / "val" / "nine")
    return data


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (missing, "data.not-found"),
        (empty, "data.missing-split"),
        (without_val, "data.missing-split"),
        (without_classes, "data.splits-as-classes"),
        (without_images, "data.all-left-out"),
        (with_another_val_class, "data.unknown-classes"),
    ],
)
def test_wrong_data(
    make: Callable[[Path, Path], Path], code: str, digits: Path, tmp_path: Path
) -> None:
    data, folder = make(digits, tmp_path), tmp_path / "run"
    check(refused("train", "debug", "--data", data, "--run", folder), code)
    assert not folder.exists()


def test_evaluating_on_data_of_other_classes(finished: Path, digits: Path, tmp_path: Path) -> None:
    data = with_another_val_class(digits, tmp_path)
    check(refused("evaluate", finished, "--data", data), "data.unknown-classes")
    where = f"--data.val={data / 'val'}"  # in place of the run's own, which had all classes
    check(refused("evaluate", finished, where), "data.unknown-classes")


def test_evaluating_as_the_checkpoint_cannot(finished: Path, tmp_path: Path) -> None:
    nothing, nowhere = tmp_path / "none.json", tmp_path / "none" / "p.csv"
    check(refused("evaluate", finished, "--labels", nothing), "file.unreadable", path=nothing)
    error = refused("evaluate", finished, "--out", nowhere)
    check(error, "option.file-unwritable", path=nowhere)


@pytest.mark.parametrize("action", ["index", "show"])
def test_data_commands_on_nothing(action: str, tmp_path: Path) -> None:
    check(refused("data", action, tmp_path / "none"), "data.not-found", path=tmp_path / "none")
    check(refused("data", action, tmp_path), "data.no-images", location=tmp_path)


def test_digits_into_a_folder_of_something_else(tmp_path: Path) -> None:
    error = refused("data", "prepare", "digits", tmp_path)
    check(error, "prepare.wrong-digit-count", path=tmp_path, num_train=0, num_val=0)


def test_a_wrong_recipe_is_named_and_a_wrong_option_is_not(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[optim]\nlrr = 1\n")
    for options in ((), ("--optim.lr", "1"), ("--batch.size", "8")):
        check(refused("train", path, *options), "recipe.invalid-file", path=path)
    path.write_text("[optim]\nlr = 1\n")
    check(refused("train", path, "--optim.lrr", "1"), KEY, key="optim.lrr")
    check(refused("train", path, "--opitm.lr", "1"), "recipe.unknown-section", section="opitm")


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
        ["estimate", "photos", "--measured", nowhere],
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


@pytest.fixture
def train(digits: Path) -> tuple[object, ...]:
    """The command of the finished run, but for its directory."""
    return ("train", "debug", *SHORT, "--data", digits, "--run")


@pytest.mark.parametrize(
    ("name", "damage", "code"),
    [
        ("model.safetensors", flip_a_bit, "checkpoint.file-altered"),
        ("training.pt", truncate, "checkpoint.file-altered"),
        ("training.pt", Path.unlink, "checkpoint.file-missing"),
        ("manifest.json", truncate, "checkpoint.file-unreadable"),
        ("manifest.json", Path.unlink, "checkpoint.file-missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    name: str,
    damage: Callable[[Path], None],
    code: str,
    copied: Path,
    train: tuple[object, ...],
    tmp_path: Path,
) -> None:
    checkpoint = newest(copied)
    damage(checkpoint / name)
    check(refused("evaluate", copied), code, path=checkpoint)
    check(refused(*train, tmp_path / "new", "--run.resume", checkpoint), code, path=checkpoint)
    assert name.partition(".")[0] in str(refused(*train, copied))  # there is none before it


def test_an_ending_that_contradicts_the_format_is_refused(finished: Path, tmp_path: Path) -> None:
    """The file of another format was overwritten, with a card that loads it wrongly."""
    error = refused("export", finished, tmp_path / "a.onnx", "--format", "safetensors")
    check(error, "export.format-differs-from-suffix", suffix="onnx", value="safetensors")


def test_checkpoints_that_are_none(
    finished: Path, train: tuple[object, ...], tmp_path: Path
) -> None:
    error = refused("report", finished.parent)
    check(error, "run.not-a-run-directory", path=finished.parent)
    assert f"{shlex.quote(str(finished.parent))}/*" in str(error.fields["hint"])
    check(refused("evaluate", tmp_path / "none"), "checkpoint.wrong-path", path=tmp_path / "none")
    (tmp_path / "checkpoints").mkdir()
    check(refused("evaluate", tmp_path), "checkpoint.none-yet", path=tmp_path)
    error = refused(*train, tmp_path / "new", "--run.resume", tmp_path / "none")
    check(error, "checkpoint.not-found", path=tmp_path / "none")


def test_a_run_directory_of_another_recipe(finished: Path, train: tuple[object, ...]) -> None:
    error = refused(*train, finished, "--optim.lr", "0.5", "--augment.flip", "0.25")
    check(error, "run.recipe-differs", path=finished, hint="")
    changes = {"optim.lr: 0.004 -> 0.5", "augment.flip: 0.0 -> 0.25"}
    assert set(str(error.fields["changes"]).split("; ")) == changes
    many = [("--optim.lr", "0.5"), ("--augment.flip", "0.25"), ("--run.seed", "7")]
    many += [("--batch.size", "7"), ("--data.repeats", "2")]
    error = refused(*train, finished, *(word for pair in many for word in pair))
    assert str(error.fields["changes"]).endswith("; and 1 other key")
    error = refused(*train, finished, "--run.length", "4 steps")
    check(error, "run.recipe-differs", path=finished)
    both = refused(*train, finished, "--run.length", "4 steps", "--run.patience", "2")
    assert str(both.fields["hint"]).endswith("--run.length '4 steps' --run.patience 2")
    more = shlex.join(["trainyard", "train", str(finished), "--run.length", "4 steps"])
    assert str(error.fields["hint"]).endswith(more)


def test_what_torch_is_not_needed_for_is_refused_before_a_run_starts(
    finished: Path, train: tuple[object, ...], digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took 20 seconds of loading."""
    monkeypatch.setattr("trainyard.run.trainer.train", pytest.fail)
    monkeypatch.setattr("trainyard.model.catalogue.is_hub_unknown", lambda _: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere")
    monkeypatch.setenv("TORCH_HOME", "/nowhere")
    check(refused(*train, finished, "--optim.lr", "0.5"), "run.recipe-differs")
    check(refused("train", "finetune", "--data", digits), "weights.not-downloaded")


def test_an_export_in_place_of_a_run() -> None:
    error = refused("predict", "a/mine.onnx", "photos")
    check(error, "checkpoint.wrong-path", path="a/mine.onnx")
    assert "a/mine.onnx.md" in str(error.fields["hint"])


def test_a_file_that_is_unpacked_beside_it(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos.zip").write_bytes(b"PK")
    error = refused("train", "photos", "--data", tmp_path / "photos.zip")
    check(error, "data.unknown-format", hint=f"; did you mean {tmp_path / 'photos'}?")


def test_a_run_directory_of_other_data(finished: Path, digits: Path, tmp_path: Path) -> None:
    data = copy_of(digits, tmp_path)
    next((data / "val" / "5").iterdir()).unlink()
    error = refused("train", "debug", "--data", data, "--run", finished, *SHORT)
    check(error, "run.data-differs", split="val", path=finished)


def test_a_run_directory_that_lacks_a_part(copied: Path, train: tuple[object, ...]) -> None:
    (copied / "environment.json").unlink()
    check(refused(*train, copied), "run.environment-unreadable", path=copied / "environment.json")
    truncate(copied / "recipe.toml")
    assert str(copied) in str(refused(*train, copied))


def test_a_run_directory_that_cannot_be_one(
    train: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/run")):
        check(refused(*train, folder), "run.directory-unusable", path=folder)
    # The tests may run as root, whom no mode keeps from writing.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check(refused(*train, tmp_path), "run.directory-unusable", path=tmp_path)
