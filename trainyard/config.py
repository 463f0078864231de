"""Recipes: read from TOML, overridden from the command line, checked strictly, written back.

`RunConfig` holds the configs of all components. Values arrive as text or TOML and are checked in
one place, so a mistake in a file gives the same message as one in an option.
"""

import codecs
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainyard.averaging.config import AverageConfig
from trainyard.course import Duration, Interval, Length, amount_of
from trainyard.data.augment.config import AugmentConfig
from trainyard.data.config import DataConfig, Locations
from trainyard.errors import RecipeError
from trainyard.files import RunDirectory
from trainyard.hints import (
    as_question,
    did_you_mean,
    from_other_trainer,
    ignoring_punctuation,
    instead_of,
    misspelt,
)
from trainyard.model.config import ModelConfig
from trainyard.monitor.config import WatchConfig
from trainyard.optim.config import (
    OptimConfig,
    ScheduleConfig,
)
from trainyard.section import Section, refused
from trainyard.training.config import LossConfig

_RENAMED = {"run.max_silence": "run.hang_timeout"}  # old names of keys, which are still read
_DROPPED_KEYS = {
    "watch.trackio": False
}  # keys in the recipe of every older run, which are dropped there
_VALIDATION = ("val", "val_fold", "val_share")  # keys of [data]: the first one that is set is used
DIVISION = ("val_share", "val_fold", "val_seed", "group")
"""Keys of [data] that divide data without val data."""
_SHAPES = ("tuple_type", "missing", "too_long")  # pydantic's errors about the length of a list


class BatchConfig(Section):
    size: int = Field(256, ge=1)
    """Global batch: samples per update, over all replicas together."""
    micro: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Samples per forward and backward pass of a device. "auto": as many as fit into its memory,
    found by trial before the first step, and before the first of each batch or image size."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of the forward and backward pass; weights and updates stay fp32."""
    virtual_ranks: int | None = Field(None, ge=1)
    """Train as on this many ranks, a power of two, on whatever number of ranks divides it: the
    weights are the same bits. Each rank works for its virtual ranks one after the other."""

    @field_validator("virtual_ranks")
    @classmethod
    def _is_a_tree(cls, virtual_ranks: int | None) -> int | None:
        if virtual_ranks is not None and virtual_ranks & (virtual_ranks - 1):
            raise ValueError("must be a power of two: gradients are added in a binary tree")
        return virtual_ranks

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        """Virtual ranks exclude other keys."""
        if self.virtual_ranks is None:
            return
        average, mode, bn_samples = recipe.average, recipe.model.compile, recipe.run.bn_samples
        settings = {
            f"average.name = {average.name!r}": average.name != "allreduce",
            f"average.compress = {average.compress!r}": average.compress is not None,
            "average.batch_norm = 'sync'": average.batch_norm == "sync",
            "data.order = 'join'": recipe.data.order == "join",
            f"run.bn_samples = {bn_samples}": bn_samples > 0,
            f"model.compile = {mode!r}": mode in ("reduce-overhead", "max-autotune"),
        }
        yield from refused(settings, "batch.virtual_ranks")


class LengthConfig(Section):
    length: Length = "90 epochs"
    """Length of the training."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the order, the crops and the initial weights."""
    eval_every: Duration = "1 epoch"
    """Interval of evaluations; the last step is always evaluated. "0 steps": only the last."""
    best_by: Literal["top1", "balanced_accuracy", "macro_f1", "map", "micro_f1"] = "top1"
    """Value of an evaluation that decides the best checkpoint, the higher of the weights and their
    moving average; the last of equal ones is best. balanced_accuracy: mean accuracy of the classes;
    macro_f1: mean F1 of the classes. With lists of labels: map, the mean average precision;
    micro_f1 or macro_f1."""
    patience: int | None = Field(None, ge=1)
    """End the run after this many evaluations in a row without a better value of best_by. Rates
    follow `length` all the same."""
    save_every: Interval = "10 minutes"
    """Time or steps between checkpoints, besides the best and the last: a killed run loses at most
    this much. "0 steps": never."""
    bn_samples: int = Field(0, ge=0)
    """Training images to re-estimate batch norm statistics from before each evaluation after step
    0, for schedule-free optimizers: they evaluate other weights than they train."""
    keep: int = Field(3, ge=1)
    """Number of checkpoints to keep, besides the best."""
    log_every: Duration = "50 steps"
    """Time between reports of the training loss."""
    max_skipped: int = Field(20, ge=1)
    """Largest number of updates in a row that are skipped because a gradient is not finite. After
    them the weights roll back to the last checkpoint, while the data continues. Checked every
    tenth step."""
    max_roll_backs: int = Field(3, ge=0)
    """Largest number of rollbacks before the run ends."""
    resume: str = "auto"
    """auto: resume if the run directory has a checkpoint; never; or a checkpoint to start from,
    or a run, of which it is the latest."""
    hang_timeout: int = Field(900, ge=0)
    """Seconds without progress after which a rank counts as hung and the run ends; four times as
    long before the first step. 0: no limit."""
    max_save: int = Field(3600, ge=0)
    """Seconds to write a checkpoint, or to read one back, after which a rank counts as hung. 0: no
    limit."""

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        """Patience without evaluations; statistics of averages that are in host memory."""
        if self.patience is not None:
            amount = amount_of(self.eval_every)
            never = amount is not None and not amount[0]
            setting = f"run.eval_every = {self.eval_every!r}"
            yield from refused({setting: never}, f"run.patience = {self.patience}")
        if self.bn_samples:
            on_host = {"model.ema_cpu = true": recipe.model.ema_cpu}
            yield from refused(
                on_host, f"run.bn_samples = {self.bn_samples}", "leave one of them out"
            )


class RunConfig(Section):
    """A whole recipe."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    batch: BatchConfig = BatchConfig()
    average: AverageConfig = AverageConfig()
    run: LengthConfig = LengthConfig()
    watch: WatchConfig = WatchConfig()


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with Trainyard, by name."""
    folder = Path(__file__).parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def load_recipe(recipe: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The recipe of a built-in name or a TOML file, with "section.key" overrides.

    A text is parsed as on the command line; other values, such as a list of texts, are used as is.
    """
    path, overrides = find_recipe(recipe), overrides or {}
    tree = _load_tree(path, seen=())
    try:
        return _overridden(tree, overrides)
    except RecipeError as error:
        described = " ".join(str(text) for name, text in error.fields.items() if name != "hint")
        named = re.findall(r"\w+\.\w+", described)
        is_overridden = any(
            key in named or key.partition(".")[0] not in RunConfig.model_fields for key in overrides
        )
        if is_overridden or recipe in builtin_recipes():
            raise
        raise RecipeError(
            "recipe.invalid-file", "{path}: {error}", path=path, error=error
        ) from None


def override(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """A recipe with some values replaced, as in `load_recipe`."""
    return _overridden(keys_set(config), overrides)


def keys_set(config: RunConfig) -> dict[str, Any]:
    """The keys that a recipe sets, by section, without those that keep their defaults."""
    return config.model_dump(mode="json", exclude_none=True, exclude_unset=True)


def on_data(
    config: RunConfig,
    locations: Sequence[str],
    overrides: Collection[str] = (),
    *,
    may_share: bool = False,
) -> RunConfig:
    """A recipe with the train and val data of a data set, or of several merged ones.

    With `may_share` there need be no val data; a recipe that divides the train data needs none.

    `overrides`: the keys that the user set beside the recipe. DataError if one of the splits is
    missing; RecipeError for a location of the user's, which would not be read, or a division of his
    beside val data.
    """
    refuse_beside_data(overrides, ("train", "val"))
    from trainyard.data.index.merge import merged_splits

    splits = merged_splits(locations, may_share=may_share or config.data.val_part is not None)
    of_division = {f"data.{name}" for name in DIVISION}
    divisions = [key for key in overrides if key in of_division]
    if splits["val"] is not None and divisions:
        raise RecipeError(
            "recipe.val-share-beside-val-data",
            key=divisions[0],
            value=getattr(config.data, divisions[0].partition(".")[2]),
            locations=" and ".join(locations),
            val=splits["val"],
        )
    return override(config, {f"data.{split}": location for split, location in splits.items()})


def refuse_beside_data(keys: Collection[str], names: Collection[str]) -> None:
    """RecipeError for one of these keys of [data] that --data makes pointless."""
    for name in names:
        if (key := f"data.{name}") in keys:
            raise RecipeError(
                "recipe.key-beside-data",
                "{key}: would not be read, as --data names the data: leave one of them out",
                key=key,
            )


def _overridden(tree: dict[str, Any], overrides: Mapping[str, Any]) -> RunConfig:
    changes = {}
    for key, value in overrides.items():
        key = _RENAMED.get(key, key)
        if not key.partition(".")[2]:
            raise _unknown(key, value)
        changes[key] = _value(key, value) if isinstance(value, str) else value
    return check(_changed(tree, changes))


def _changed(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with changes, and without keys of its own that these make pointless."""
    changed = {s: {**values} if isinstance(values, dict) else values for s, values in tree.items()}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed.setdefault(section, {})
        _keys_of(changed, section)[name] = value
    pointless = _without_effect(changed) - _without_effect(tree) | _superseded(tree, changes)
    _drop(changed, pointless - changes.keys())
    return changed


def _keys_of(tree: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The keys of a section; none where it is no section, for which `check` raises."""
    values = tree.get(section)
    return values if isinstance(values, dict) else {}


def _drop(tree: dict[str, Any], keys: Collection[str]) -> None:
    for section, _, name in (key.partition(".") for key in keys):
        _keys_of(tree, section).pop(name, None)


def find_recipe(recipe: str) -> Path:
    """The file of a built-in recipe or of a path."""
    builtin = builtin_recipes()
    if recipe in builtin:
        return builtin[recipe]
    path = Path(recipe)
    if path.is_file():
        return path
    if path.is_dir():
        raise RecipeError(
            "recipe.is-folder",
            "{path}: is a folder; a recipe is a built-in name or a TOML file",
            path=recipe,
        )
    hint = did_you_mean(path.stem, builtin, limit=len(builtin))
    if path.suffix == ".toml" or path.parent != Path("."):
        raise RecipeError(
            "recipe.no-such-file", "{path}: no such recipe file{hint}", path=recipe, hint=hint
        )
    hint = hint or f"; there are {', '.join(builtin)}"
    raise RecipeError(
        "recipe.unknown-name",
        "{name!r} is neither a built-in recipe nor a file{hint}",
        name=recipe,
        hint=hint,
    )


def check(tree: dict[str, Any]) -> RunConfig:
    """A checked RunConfig from nested plain values; RecipeError names the first wrong key.

    The text "none" leaves an optional key unset, whatever an extended recipe says.
    """
    tree = _without_none(tree)
    try:
        # As JSON, for which pydantic's strict mode lets an array become a tuple, but no more.
        config = RunConfig.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        _check_unicode(tree)
        raise _first_fault(error) from None
    except TypeError as error:  # for example a TOML date
        raise RecipeError(
            "recipe.not-plain-values",
            "a recipe holds numbers, text and lists only: {reason}",
            reason=str(error),
        ) from None
    for key, others in _unmet_needs(config.model_dump()).items():
        raise RecipeError(
            "recipe.needs-another-key",
            "{key} changes nothing without {others}: set that too, or leave it out",
            key=key,
            others=others,
        )
    for section in RunConfig.model_fields:
        for conflict in getattr(config, section).conflicts(config):
            raise conflict
    return config


def _check_unicode(tree: dict[str, Any]) -> None:
    """RecipeError for a text with bytes of a file name that are not UTF-8."""
    for section in tree:
        for name, value in _keys_of(tree, section).items():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                key = f"{section}.{name}"
                raise RecipeError(
                    "recipe.not-unicode",
                    "{key} = {value!r}: is not UTF-8, so no recipe can hold it: rename it",
                    key=key,
                    value=value,
                ) from None


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree without optional keys that are "none". RecipeError for one that is empty."""
    optional = {key for key, field in all_keys().items() if field.default is None}
    tree = dict(tree)
    for section, values in tree.items():
        if not isinstance(values, dict):
            continue
        optionals = {
            name: value for name, value in values.items() if f"{section}.{name}" in optional
        }
        for name, value in optionals.items():
            if value == "":
                raise RecipeError(
                    "recipe.empty-value",
                    '{key} = "": write none to leave it unset',
                    key=f"{section}.{name}",
                )
        unset = [name for name, value in optionals.items() if value == "none"]
        tree[section] = {name: value for name, value in values.items() if name not in unset}
    return tree


def _unmet_needs(tree: Mapping[str, Any]) -> dict[str, str]:
    """Keys of a recipe that change nothing, and the ones that they need."""
    fields = all_keys()

    def is_set(key: str) -> bool:
        section, _, name = key.partition(".")
        default = fields[key].get_default(call_default_factory=True)
        return _keys_of(tree, section).get(name) not in (None, "none", default)

    unmet = {}
    for section, part in RunConfig.model_fields.items():
        for needs in part.default.NEEDS:
            key, *others = (f"{section}.{name}" for name in needs)
            if is_set(key) and not any(map(is_set, others)):
                unmet[key] = " or ".join(others)
    return unmet


def _without_effect(tree: Mapping[str, Any]) -> set[str]:
    """Keys that change nothing beside the others of a recipe, or that `check` refuses there."""
    unused = {*_unmet_needs(tree)}
    for section in ("optim", "schedule"):
        part, name = RunConfig.model_fields[section].default, _keys_of(tree, section).get("name")
        keys = part.keys_of_others(name if isinstance(name, str) else part.name)
        unused |= {f"{section}.{key}" for key in keys}
    return unused


def to_toml(config: RunConfig) -> str:
    """A recipe as TOML with every key, so that it can be run again as it is."""
    return tree_as_toml(config.model_dump(mode="json", exclude_none=True))


def tree_as_toml(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of plain values as TOML."""
    lines = []
    for section, values in tree.items():
        lines += [f"[{section}]", *(f"{key} = {_toml(v)}" for key, v in values.items()), ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_toml(key)} = {_toml(v)}' for key, v in value.items())}}}"
    # JSON's numbers, strings, booleans and arrays are TOML's too, but for surrogates and DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def all_keys() -> dict[str, Any]:
    """Every "section.key" with its pydantic field."""
    return {
        f"{section}.{key}": field
        for section, part in RunConfig.model_fields.items()
        for key, field in part.annotation.model_fields.items()  # type: ignore[union-attr]
    }


def is_list(key: str) -> bool:
    """True for a key whose values are lists alone."""
    field = all_keys().get(key)
    return field is not None and get_origin(field.annotation) is tuple


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # without a byte order mark
    except UnicodeDecodeError as error:
        is_wide = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        reason = "it is UTF-16: save it as UTF-8" if is_wide else f"it is not UTF-8: {error}"
    except (ValueError, RecursionError) as error:  # also of a number of thousands of digits
        reason = str(error)
    raise RecipeError("recipe.not-toml", path=path, reason=reason)


def _load_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The keys of a recipe file, over those of the recipe that it extends."""
    if path in seen:
        raise RecipeError(
            "recipe.extends-itself",
            "{path}: extends itself by way of {name}",
            path=path,
            name=seen[-1].name,
        )
    tree = _parsed(path)
    _rename(tree, path)
    for key, value in _DROPPED_KEYS.items():
        section, _, name = key.partition(".")
        if (values := _keys_of(tree, section)).get(name) is value:
            del values[name]
    parent = tree.pop("extends", None)
    if path == RunDirectory(path.parent).recipe and RunDirectory(path.parent).environment.exists():
        _drop(tree, _without_effect(tree))  # an older release took them
    if parent is None:
        return tree
    beside = path.parent / str(parent)
    try:
        base_path = beside if beside.is_file() else find_recipe(str(parent))
    except RecipeError as error:
        raise RecipeError(
            "recipe.base-not-found", "{path}: extends = {error}", path=path, error=error
        ) from None
    base = _load_tree(base_path, (*seen, path))
    base |= {name: value for name, value in tree.items() if not isinstance(value, dict)}
    changes = {f"{s}.{key}": value for s in tree for key, value in _keys_of(tree, s).items()}
    return _changed(base, changes)


def _superseded(tree: dict[str, Any], changes: Mapping[str, Any]) -> set[str]:
    """Keys of [data] that mean something else, or have precedence, beside changes.

    New validation data drops what has precedence over it, and a new value what belongs to the other
    one: data.crop_pct is of a data.fit, data.mean and data.std are of data.channels.
    """
    data, fields = _keys_of(tree, "data"), DataConfig.model_fields
    wanted = [key for key in _VALIDATION if changes.get(f"data.{key}") not in (None, "none")]
    before = _VALIDATION[: _VALIDATION.index(wanted[0])] if wanted else ()
    dropped = {f"data.{key}" for key in before}
    for key, others in (("fit", {"data.crop_pct"}), ("channels", {"data.mean", "data.std"})):
        if changes.get(f"data.{key}") not in (None, data.get(key, fields[key].default)):
            dropped |= others
    return dropped


def _rename(tree: dict[str, Any], path: Path) -> None:
    """Moves the values of old keys to their new names. RecipeError if a file has both names."""
    for old, new in _RENAMED.items():
        section, _, name = old.partition(".")
        values, new_name = _keys_of(tree, section), new.partition(".")[2]
        if name not in values:
            continue
        if new_name in values:
            raise RecipeError(
                "recipe.key-under-two-names",
                "{path}: {old_key} is the old name of {key}: remove {old_key}",
                path=path,
                old_key=old,
                key=new,
            )
        values[new_name] = values.pop(name)


def _value(key: str, text: str) -> Any:
    """An option's text as a TOML value if it is one; text keys take the text unchanged."""
    field = all_keys().get(key)
    annotation = None if field is None else field.annotation
    if annotation in (str, str | None):
        return text
    is_location = annotation == Locations | None
    for attempt in (text, f"[{text}]")[: 1 if is_location else 2]:
        try:
            value = tomllib.loads(f"value = {attempt}")["value"]
        except (ValueError, RecursionError):
            continue
        if not is_location or isinstance(value, list):
            is_single = get_origin(annotation) is tuple and not isinstance(value, list)
            return [value] if is_single else value
    return [text] if get_origin(annotation) is tuple else text  # a single pattern or stage


def _first_fault(error: ValidationError) -> RecipeError:
    first = error.errors()[0]
    # Union members add a step to the location: section and key are enough.
    location = first["loc"][:2]
    key = ".".join(map(str, location))
    if first["type"] == "extra_forbidden":
        return _unknown(key, first["input"])
    others = [other for other in error.errors() if other["loc"][:2] == location]
    reason = " or ".join(dict.fromkeys(_reason(other, key) for other in others))
    expected = [of["ctx"]["expected"] for of in others if of["type"] == "literal_error"]
    choices = re.findall("'([^']*)'", " ".join(expected))  # none if it allows others
    hint = did_you_mean(first["input"], choices) if isinstance(first["input"], str) else ""
    value = json.dumps(first["input"])
    return RecipeError(
        "recipe.invalid-value",
        "{key} = {value}: {reason}{hint}",
        key=key,
        value=value,
        reason=reason,
        hint=hint,
    )


def _unknown(key: str, value: Any) -> RecipeError:
    if "." in key:
        return unknown_key(key, all_keys())
    if isinstance(value, dict):
        hint = did_you_mean(key, RunConfig.model_fields) or _meant(
            f"{key}.{next(iter(value), '')}", all_keys()
        )
        return RecipeError(
            "recipe.unknown-section",
            "unknown recipe section {section!r}{hint}",
            section=key,
            hint=hint,
        )
    return RecipeError(
        "recipe.key-outside-section",
        "recipe key {key!r} stands outside a section{hint}",
        key=key,
        hint=_meant(key, all_keys()),
    )


def unknown_key(key: str, keys: Collection[str]) -> RecipeError:
    """The error for a key that is none of `keys`."""
    return RecipeError(
        "recipe.unknown-key", "unknown recipe key {key!r}{hint}", key=key, hint=_meant(key, keys)
    )


def _meant(key: str, keys: Collection[str]) -> str:
    """A hint at the intended key, also for names that other trainers use."""
    target, _ = from_other_trainer(key.rpartition(".")[2])
    if target in keys and not ignoring_punctuation(key, keys):
        return did_you_mean(target, keys)
    meant = ignoring_punctuation(key, keys) or misspelt(key, keys)
    if not meant and target.isidentifier():  # an option of train's
        meant = [f"--{target}"]
    return (
        as_question([repr(name) for name in meant[:3]])
        or instead_of(key.rpartition(".")[2])
        or "; `trainyard recipes --keys` lists all"
    )


def _reason(error: ErrorDetails, key: str) -> str:
    if error["type"] == "literal_error":
        return f"expected {error['ctx']['expected']}"
    if error["type"] in _SHAPES:
        return f"expected {_list_of(all_keys()[key])}"
    message = error["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _list_of(field: FieldInfo) -> str:
    """A description of a key's list: "a list of 2 values, [0.08, 1.0] say"."""
    parts = get_args(field.annotation)
    if get_origin(field.annotation) is not tuple or Ellipsis in parts:
        return "a list"
    return f"a list of {len(parts)} values, {json.dumps(field.default)} say"
