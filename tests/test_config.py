"""Recipes: read, inherited, overridden, checked strictly, compared, written back."""

import json
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from timm.optim import get_optimizer_class

from tests.errors import check as check_error
from tests.errors import raises
from trainyard.compare import PRACTICAL, differences
from trainyard.config import (
    RunConfig,
    all_keys,
    builtin_recipes,
    check,
    keys_set,
    load_recipe,
    override,
    to_toml,
    tree_as_toml,
)
from trainyard.errors import TrainyardError
from trainyard.image_size import height_width
from trainyard.optim.config import NAMES, OptimConfig
from trainyard.run.model import build_run_model

BUILTIN = sorted(builtin_recipes())


RecipeWriter = Callable[[str, str], str]


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeWriter:
    """Writes TOML files side by side and gives their paths."""

    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


# --- values ---


def test_an_empty_recipe_is_all_defaults(recipe: RecipeWriter) -> None:
    assert load_recipe(recipe("empty.toml", "")) == RunConfig()


def test_toml_values(recipe: RecipeWriter) -> None:
    config = load_recipe(
        recipe(
            "mine.toml",
            "[optim]\nlr = 1\n[augment]\nscale = [0.8, 0.9]\n[data]\nmean = [0, 0.5, 1]\n",
        )
    )
    assert config.optim.lr == 1.0
    assert config.augment.scale == (0.8, 0.9)
    assert config.data.mean == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("data.image_size", "[128, 256]", (128, 256)),
        ("data.image_size", "128,256", (128, 256)),
        ("data.eval_size", "[128, 128]", 128),  # a square has one form
        ("optim.lr", "1e-3", 0.001),
        ("optim.lr", "2", 2.0),
        ("optim.betas", "0.8,0.9", (0.8, 0.9)),
        ("optim.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("optim.compile", "true", True),
        ("optim.name", "adamw", "adamw"),
        ("schedule.name", '"linear"', "linear"),
        ("batch.micro", "auto", "auto"),
        ("batch.micro", "8", 8),
        ("batch.size", "1_024", 1024),
        ("run.length", "3 epochs", "3 epochs"),
        ("run.resume", "auto", "auto"),
        # A key that takes text takes it as it stands, whatever it looks like.
        ("data.train", "shards/{000..012}.tar", "shards/{000..012}.tar"),
        ("data.train", "1", "1"),
        ("data.train", "true", "true"),
        ("data.train", 'a "quoted" folder', 'a "quoted" folder'),
        ("data.train", "[ab]*/{0..9}.tar", "[ab]*/{0..9}.tar"),
        ("data.train", "a,b", "a,b"),
        # Unless it is a list of texts.
        ("data.train", "['a','b,c']", ("a", "b,c")),
        ("data.val", '["a"]', ("a",)),
        ("data.weights", "2,0.5", (2.0, 0.5)),
        ("data.weights", "[3]", (3.0,)),
        ("model.name", "123", "123"),
        ("run.resume", "7", "7"),
    ],
)
def test_overrides(key: str, text: str, value: object) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load_recipe("debug", {key: text}), section), name) == value


def test_none_leaves_an_optional_key_unset(tmp_path: Path) -> None:
    """There was no way to switch off what an extended recipe sets."""
    assert load_recipe("finetune").optim.clip_norm == 1.0
    assert load_recipe("finetune", {"optim.clip_norm": "none"}).optim.clip_norm is None
    path = tmp_path / "own.toml"
    path.write_text('extends = "finetune"\n[optim]\nclip_norm = "none"\n')
    assert load_recipe(str(path)).optim.clip_norm is None
    for key, field in all_keys().items():
        if type(None) in get_args(field.annotation):
            assert field.default is None, f"{key}: unset is not its default"
            section, name = key.split(".")
            config = load_recipe("debug", {key: "none"})
            assert getattr(getattr(config, section), name) is None
    with raises("recipe.empty-value", key="model.checkpoint"):
        load_recipe("finetune", {"model.checkpoint": ""})


def test_an_override_beats_the_recipe_and_leaves_the_rest() -> None:
    changed = load_recipe("debug", {"optim.lr": "1"})
    assert differences(load_recipe("debug"), changed) == ["optim.lr: 0.004 -> 1.0"]


def test_statistics_that_a_recipe_of_grey_images_sets_are_kept() -> None:
    own = check({"data": {"channels": 1, "mean": [0.3], "std": [0.2]}}).data
    assert (own.mean, own.std) == ((0.3,), (0.2,))


@pytest.mark.parametrize(
    ("before", "after", "used"),
    [
        ({"val_fold": "2/5"}, {"val_share": 0.2}, ("val_share", 0.2)),
        ({"val_share": 0.1}, {"val_fold": "2/5"}, ("val_fold", "2/5")),
        ({"val": "a"}, {"val_fold": "2/5"}, ("val_fold", "2/5")),
        ({"val": "a"}, {"val_share": 0.2}, ("val_share", 0.2)),
        ({"val_fold": "2/5"}, {"val": "b"}, ("val", "b")),
        ({"val": "a"}, {"val": "b", "val_fold": "2/5"}, ("val", "b")),
        ({"val": "a"}, {"val_share": "none"}, ("val", "a")),
        ({"val": "a", "val_fold": "2/5"}, {"val": "none"}, ("val_fold", "2/5")),
    ],
)
def test_the_validation_data_that_is_set_last_is_used(
    before: dict[str, Any], after: dict[str, Any], used: tuple[str, object], tmp_path: Path
) -> None:
    """An option --data.val_share was passed over beside a recipe's fold, a fold beside its val."""
    for name, keys, base in (("base", before, "debug"), ("own", after, "base.toml")):
        (tmp_path / f"{name}.toml").write_text(
            f"extends = {base!r}\n" + tree_as_toml({"data": keys})
        )
    by_option = {f"data.{key}": value for key, value in after.items()}
    for config in (
        load_recipe(str(tmp_path / "own.toml")),
        load_recipe(str(tmp_path / "base.toml"), by_option),
    ):
        key = next(key for key in ("val", "val_fold", "val_share") if getattr(config.data, key))
        assert (key, getattr(config.data, key)) == used


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch.size", "64"),
        ("batch.size", True),
        ("batch.size", 64.0),
        ("batch.size", None),
        ("batch.micro", True),
        ("optim.lr", "0.1"),
        ("optim.lr", True),
        ("optim.lr", float("nan")),
        ("optim.lr", float("inf")),
        ("optim.nesterov", 1),
        ("optim.nesterov", "true"),
        ("optim.betas", [0.9]),
        ("optim.betas", [0.9, 0.9, 0.9]),
        ("optim.betas", 0.9),
        ("optim.name", "Adamw"),
        ("model.name", 50),
        ("model.drop_path", 1),
        ("run.length", 90),
        ("run.seed", -1),
        ("run.seed", 2**31),
        ("run.keep", 0),
        ("data.std", [1, 1, 0]),
        ("data.max_bad", 1.5),
        ("augment.scale", [0.5, 0.1]),
        ("augment.ratio", [0, 1]),
    ],
)
def test_what_is_not_exactly_right_is_refused(key: str, value: object) -> None:
    section, name = key.split(".")
    with raises("recipe.invalid-value", key=key):
        check({section: {name: value}})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("optim.lr", "high"),
        ("optim.lr", "0"),
        ("optim.lr", "none"),  # no optional key
        ("optim.name", "adamww"),
        ("optim.betas", "0.9,1"),
        ("batch.size", "64x"),
        ("batch.micro", "0"),
        ("batch.precision", "fp8"),
        ("run.length", "5 years"),
        ("run.length", "0 steps"),
        ("run.length", "50%"),
        ("augment.scale", "0.5"),
        ("augment.color_jitter", "1"),
    ],
)
def test_a_text_that_is_no_value_is_refused(key: str, text: str) -> None:
    with raises("recipe.invalid-value", key=key):
        load_recipe("debug", {key: text})


@pytest.mark.parametrize(
    ("key", "average"),
    [
        ("average.topology", {"topology": "ring"}),
        ("average.compress", {"name": "sharded", "compress": "bf16"}),
        ("average.compress", {"name": "gossip", "compress": "fp16"}),
        ("average.every", {"name": "sharded", "every": 4}),
    ],
)
def test_keys_of_another_averager_are_refused(key: str, average: dict[str, Any]) -> None:
    with raises("recipe.invalid-value", key=key):
        check({"average": average})


def test_keys_that_need_another_are_refused() -> None:
    with raises("recipe.invalid-value", key="optim.nesterov"):
        check({"optim": {"nesterov": True, "momentum": 0.0}})


# --- extends ---


def test_extends_a_builtin_recipe_key_by_key(recipe: RecipeWriter) -> None:
    config = load_recipe(recipe("mine.toml", 'extends = "debug"\n[optim]\nlr = 0.5\n'))
    assert differences(load_recipe("debug"), config) == ["optim.lr: 0.004 -> 0.5"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path, end: str) -> None:
    """Editors of Windows write one."""
    lines = ('extends = "debug"', "[optim]", "lr = 0.5", "")
    path = tmp_path / "mine.toml"
    path.write_bytes(end.join(lines).encode("utf-8-sig"))
    assert load_recipe(str(path)).optim.lr == 0.5


@pytest.mark.parametrize(
    ("encoding", "hint"), [("utf-16", "UTF-16"), ("latin-1", "not UTF-8")], ids=str
)
def test_a_recipe_in_another_encoding(tmp_path: Path, encoding: str, hint: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes("# é\n".encode(encoding))
    with raises("recipe.not-toml", path=path) as caught:
        load_recipe(str(path))
    assert hint in str(caught.value.fields["reason"])


def test_an_old_key_is_read_by_its_new_name(recipe: RecipeWriter) -> None:
    """Recipes of older versions hold it; a file that extends one, or an option, must still win."""
    path = recipe("old.toml", "[run]\nmax_silence = 60\n")
    assert load_recipe(path).run.hang_timeout == 60
    assert load_recipe(path, {"run.max_silence": "70"}).run.hang_timeout == 70
    child = recipe("new.toml", 'extends = "old.toml"\n[run]\nhang_timeout = 80\n')
    assert load_recipe(child).run.hang_timeout == 80
    both = recipe("both.toml", "[run]\nmax_silence = 60\nhang_timeout = 90\n")
    with raises("recipe.key-under-two-names", old_key="run.max_silence", key="run.hang_timeout"):
        load_recipe(both)


def test_a_key_that_is_gone_is_dropped_from_the_recipes_of_older_runs(
    recipe: RecipeWriter,
) -> None:
    assert load_recipe(recipe("old.toml", "[watch]\ntrackio = false\n")) == RunConfig()
    with raises("recipe.invalid-file"):
        load_recipe(recipe("old.toml", "[watch]\ntrackio = true\n"))


def test_extends_a_file_beside_it(recipe: RecipeWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe("base.toml", 'extends = "digits"\n[optim]\nlr = 0.5\neps = 0.5\n')
    child = recipe("child.toml", 'extends = "base.toml"\n[optim]\nlr = 0.25\n')
    monkeypatch.chdir("/")
    config = load_recipe(child)
    assert (config.optim.lr, config.optim.eps) == (0.25, 0.5)
    assert config.model.name == load_recipe("digits").model.name


def test_a_file_may_extend_the_builtin_recipe_of_its_name(recipe: RecipeWriter) -> None:
    path = recipe("debug.toml", 'extends = "debug"\n[optim]\nlr = 0.5\n')
    assert load_recipe(path).optim.lr == 0.5


def test_recipes_that_extend_each_other(recipe: RecipeWriter) -> None:
    recipe("a.toml", 'extends = "b.toml"\n')
    with raises("recipe.extends-itself", name="a.toml"):
        load_recipe(recipe("b.toml", 'extends = "a.toml"\n'))


def test_a_file_does_not_hide_the_builtin_recipe_of_its_name(
    recipe: RecipeWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe("digits", "[optim]\nlr = 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits").optim.lr != 0.5
    assert load_recipe("./digits").optim.lr == 0.5


# --- writing and comparing ---


@pytest.mark.parametrize("name", BUILTIN)
def test_a_builtin_recipe_survives_writing(name: str, recipe: RecipeWriter) -> None:
    config = load_recipe(name)
    assert load_recipe(recipe("written.toml", to_toml(config))) == config


def test_odd_values_survive_writing(recipe: RecipeWriter) -> None:
    overrides = {
        "data.train": 'C:\\a "b"/\u00fc \U0001f436\x7f {0..9}\t#.tar',
        "optim.lr": "1e-300",
        "optim.eps": "1e-8",
        "optim.clip_norm": "1",
        "batch.micro": "7",
        "model.drop_path": "0.1",
    }
    config = load_recipe("debug", overrides)
    assert load_recipe(recipe("written.toml", to_toml(config))) == config


def test_a_name_that_is_not_utf_8_is_named_alone() -> None:
    with raises("recipe.not-unicode", key="data.train", value="a\udcff"):
        load_recipe("debug", {"data.train": "a\udcff"})


def test_another_schedule_drops_the_steps_of_a_config() -> None:
    steps = load_recipe("debug", {"schedule.name": "step", "schedule.milestones": '["1 epoch"]'})
    assert override(steps, {"schedule.name": "cosine"}).schedule.milestones == ()
    assert load_recipe("convnext-tiny", {"schedule.name": "constant"}).schedule.min_lr == 0


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("model.ema_warmup", "true", {"model.ema_decay": "0.9"}),
        ("augment.mix_mode", "pair", {"augment.cutmix": "1"}),
        ("augment.erasing_mode", "rand", {"augment.erasing": "0.5"}),
        ("schedule.warmup_from", "0.5", {"schedule.warmup": "1 epoch"}),
        ("data.stage_gb", "10", {"data.stage": "disk"}),
    ],
)
def test_a_key_that_changes_nothing_is_refused(
    key: str, value: str, needed: dict[str, str], recipe: RecipeWriter
) -> None:
    """By an option and in a file, where it was passed over."""
    bare = recipe("bare.toml", "")
    with raises("recipe.needs-another-key", key=key):
        load_recipe(bare, {key: value})
    section, _, name = key.partition(".")
    whole = load_recipe(bare, needed | {key: value})
    alone = {section: {name: keys_set(whole)[section][name]}}
    with raises("recipe.invalid-file") as refused:
        load_recipe(recipe("alone.toml", tree_as_toml(alone)))
    error = refused.value.fields["error"]
    assert isinstance(error, TrainyardError)
    check_error(error, "recipe.needs-another-key", key=key)
    usual = all_keys()[key].default
    load_recipe(bare, {key: "none" if usual is None else json.dumps(usual).strip('"')})
    # Without the key that it needs, that of the recipe below has no effect either, and goes.
    own = recipe("own.toml", to_toml(whole))
    assert load_recipe(own) == whole
    defaults = ((other, all_keys()[other].default) for other in needed)
    unset = {other: "none" if usual is None else str(usual) for other, usual in defaults}
    assert load_recipe(own, unset) == RunConfig()


OF_OPTIMIZERS = [
    ("adamw", "momentum", 0.5),
    ("adamw", "nesterov", False),
    ("adamw", "trust_clip", True),
    ("sgd", "betas", [0.5, 0.6]),
    ("lion", "eps", 1e-6),
    ("lars", "bias_correction", False),
    ("lamb", "trust_coefficient", 0.1),
    ("accum_adam", "schedule_free_r", 2.0),
    ("schedule_free_sgd", "accum_iter", 8),
    ("schedule_free_sgd", "eps", 1e-6),
    ("adopt", "momentum", 0.5),
    ("rmsprop", "betas", [0.5, 0.6]),
]


@pytest.mark.parametrize(("name", "key", "value"), OF_OPTIMIZERS)
def test_keys_of_another_optimizer_are_refused(
    name: str, key: str, value: object, recipe: RecipeWriter
) -> None:
    """They were passed over. A recipe that changes the optimizer drops those of the one below."""
    constant = {"schedule": {"name": "constant"}}
    both = constant | {"optim": {"name": name, key: value}}
    with raises("recipe.invalid-value", key=f"optim.{key}"):
        check(both)
    with raises("recipe.invalid-file"):
        load_recipe(recipe("both.toml", tree_as_toml(both)))
    taken = {"momentum": "sgd", "nesterov": "sgd", "betas": "adam", "eps": "adam"}
    taken |= {"trust_clip": "lars", "bias_correction": "lamb", "trust_coefficient": "lars"}
    taken |= {"schedule_free_r": "schedule_free_sgd", "accum_iter": "accum_adam"}
    base = constant | {"optim": {"name": taken[key], key: value}}
    path = recipe("base.toml", tree_as_toml(base))
    assert load_recipe(path) != load_recipe(path, {"optim.name": name})
    other = recipe("other.toml", f'extends = "base.toml"\n[optim]\nname = "{name}"\n')
    expected = check(constant | {"optim": {"name": name}})
    assert load_recipe(path, {"optim.name": name}) == load_recipe(other) == expected


def test_every_key_of_an_optimizer_is_taken_by_timm() -> None:
    for name in set(NAMES) - {*("accum_adam", "accum_adamw")}:
        if not name.startswith("schedule_free"):
            taken = signature(get_optimizer_class(name, bind_defaults=False)).parameters
            in_timm = {"trust_coefficient": "trust_coeff"}
            keys = [*OptimConfig.TAKEN_BY.keys() - {"accum_iter", "schedule_free_r"}]
            assert OptimConfig.keys_of_others(name) & {*keys} == {
                key for key in keys if in_timm.get(key, key) not in taken
            }


def test_keys_without_effect_of_an_older_run_are_dropped(recipe: RecipeWriter) -> None:
    """Its release took them, and the run is still to be evaluated and resumed."""
    tree: dict[str, Any] = {"optim": {"name": "adamw", "momentum": 0.5}, "model": {"ema_cpu": True}}
    path = recipe("recipe.toml", tree_as_toml(tree))
    with raises("recipe.invalid-file"):
        load_recipe(path)
    recipe("environment.json", "{}")
    assert load_recipe(path) == check({"optim": {"name": "adamw"}})


# Where a key takes neither its other choices, nor a small number, nor a short time.
OTHER_VALUES = {
    "average.name": "gossip",
    "batch.virtual_ranks": "8",
    "model.name": "resnet18",
    "loss.teacher_model": "resnet18",
    "model.options": "{class_token = false}",
    "model.class_names": '{"cat" = "tom"}',
    "model.freeze": '["blocks.*"]',
    "data.val_fold": "2/5",
    "data.weights": "2,0.5",
    "data.image_size": "48",
    "data.eval_size": "[48, 64]",
    "data.range": "[0, 4095]",
    "data.background": "[0, 0, 0]",
    "data.max_pixels": "1000000",
    "data.mean": "0.1,0.2,0.3",
    "data.std": "0.1,0.2,0.3",
    "data.bands": "3,2,1",
    "augment.scale": "0.125,0.875",
    "augment.ratio": "0.125,0.875",
    "augment.randaugment": "rand-m9-mstd0.5-inc1",
    "augment.color_jitter": "0.1,0.2,0.3",
    "optim.name": "adan",
    "optim.betas": "0.125,0.875",
    "optim.nesterov": "true",
    "optim.trust_clip": "true",
    "optim.bias_correction": "false",
    "optim.decay_scale": '["head.*: 2"]',
    "optim.lr_scale": '["head.*: 2"]',
    "schedule.decay": "7 steps",
    "schedule.milestones": '["7 steps"]',
    "schedule.image_size": '["7 steps: 64"]',
    "schedule.batch_size": '["7 steps: 64"]',
    "average.compress": "bf16",
    "average.batch_norm": "sync",
    "average.accumulate": "parts",
    "average.topology": "ring",
    "average.overlap": "false",
    "loss.class_weights": "balanced",
    "watch.profile": "7:9",
}


# Keys that are of no use without another, by that one and its value.
NEEDED = {
    ("augment.flip", "0.5"): ("augment.flip_mode",),
    ("model.checkpoint", "a.pth"): (
        *("model.checkpoint_key", "model.checkpoint_prefix", "model.class_names"),
        *("model.linear_probe", "model.freeze_statistics"),
    ),
    ("model.ema_decay", "0.9"): ("model.ema_warmup", "model.ema_cpu"),
    ("optim.name", "sgd"): ("optim.momentum", "optim.nesterov"),
    ("optim.name", "lamb"): ("optim.trust_clip", "optim.bias_correction"),
    ("optim.name", "lars"): ("optim.trust_coefficient",),
    ("optim.name", "accum_adam"): ("optim.accum_iter",),
    ("optim.name", "schedule_free_sgd"): ("optim.schedule_free_r",),
    ("schedule.name", "constant"): ("optim.schedule_free_r",),
    ("schedule.warmup", "9 steps"): (
        *("schedule.warmup_from", "schedule.warmup_ends", "schedule.warmup_prefix"),
    ),
    ("augment.erasing", "0.5"): ("augment.erasing_mode",),
    ("augment.cutmix", "0.5"): ("augment.mix_mode", "augment.mix_prob", "augment.switch_prob"),
    ("augment.mixup", "0.5"): ("augment.switch_prob",),
    ("data.stage", "disk"): ("data.stage_gb",),
    ("data.val_share", "0.1"): ("data.val_seed", "data.group"),
    ("data.order", "join"): ("data.samples",),
    ("data.mean", str([0.485, 0.456, 0.406])): ("data.channels",),
    ("data.std", str([0.229, 0.224, 0.225])): ("data.channels",),
    ("loss.name", "focal"): ("loss.focal_gamma",),
    ("loss.name", "bce"): ("loss.bce_threshold", "loss.bce_sum"),
    ("loss.teacher", "old"): (
        *("loss.teacher_model", "loss.distillation"),
        *("loss.distillation_share", "loss.temperature"),
    ),
    ("average.name", "gossip"): (*("average.topology", "average.overlap"),),
    ("average.name", "periodic"): ("average.every", "average.outer_lr", "average.outer_momentum"),
    ("average.name", "sharded"): ("average.accumulate",),
    ("schedule.name", "step"): ("schedule.milestones", "schedule.gamma"),
    ("schedule.milestones", '["6 steps"]'): ("schedule.milestones", "schedule.gamma"),
    ("watch.mlflow", "true"): ("watch.artifacts",),
}


def another_value(key: str, field: Any, value: Any) -> str:
    """A value other than `value` that a key takes, as text."""
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    choices = get_args(field.annotation)
    if get_origin(field.annotation) is Literal:
        return str(next(choice for choice in choices if choice != value))
    if isinstance(value, bool):
        return str(not value).lower()
    if key == "schedule.warmup" or key.endswith(("_every", "run.length")):
        return "7 steps"
    is_whole = field.annotation is int or int in choices or key == "batch.micro"
    return "7" if is_whole else "0.125"


def test_every_key_that_matters_is_compared() -> None:
    """Each key, changed alone, is named; only those in PRACTICAL are not."""
    for key, field in all_keys().items():
        with_others = {other: value for (other, value), keys in NEEDED.items() if key in keys}
        before = load_recipe("debug", with_others)
        section, _, name = key.partition(".")
        text = another_value(key, field, getattr(getattr(before, section), name))
        changed = load_recipe("debug", with_others | {key: text})
        named = [line.partition(":")[0] for line in differences(before, changed)]
        statistics = ["data.mean", "data.std"] if key == "data.channels" else []  # they follow it
        assert named == ([] if key in PRACTICAL else [key, *statistics])


def test_what_may_change_when_a_run_goes_on() -> None:
    """Where the data lies, what is bearable, and how often to speak: nothing that learns."""
    data = {"data.train", "data.val", "data.max_bad", "data.threads", "batch.micro"}
    data |= {"data.corrections"}
    stage = {"data.stage", "data.stage_gb"}
    run = {"run.keep", "run.log_every", "run.save_every", "run.resume"}
    run |= {"run.hang_timeout", "run.max_save"}
    how = {"model.compile", "model.grad_checkpointing", "optim.compile", "average.accumulate"}
    watch = {key for key in all_keys() if key.startswith("watch.")}
    assert data | stage | run | how | watch == PRACTICAL


def test_every_key_is_explained() -> None:
    assert {key for key, field in all_keys().items() if not field.description} == set()


# --- built-in recipes ---


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILTIN)
def test_a_builtin_recipe_builds_its_model(name: str) -> None:
    """On the meta device: shapes without data, so that large models take no time."""
    config = load_recipe(name)
    size = height_width(config.data.eval_size or config.data.image_size)
    with torch.device("meta"), torch.no_grad():
        model = build_run_model(config, 10).eval()
        assert model(torch.zeros(1, config.data.channels, *size)).shape == (1, 10)
