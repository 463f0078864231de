"""`Section`: the base class of all recipe sections."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from trainyard.errors import RecipeError


class Section(BaseModel):
    """A frozen group of recipe keys; unknown keys and wrong types are refused.

    The docstring under each field is its documentation on the command line.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    NEEDS: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Keys that have an effect only where one of some others is set: each with these others."""
    TAKEN_BY: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Keys that not every `name` of the section takes, and the names that do."""

    @classmethod
    def keys_of_others(cls, name: str) -> set[str]:
        """Keys that the section does not take with this `name`."""
        return {key for key, names in cls.TAKEN_BY.items() if name not in names}

    @field_validator("*")
    @classmethod
    def _is_taken(cls, value: Any, others: ValidationInfo) -> Any:
        key, name = str(others.field_name), others.data.get("name")
        is_given = key in cls.TAKEN_BY and value != cls.model_fields[key].default
        if is_given and name is not None and key in cls.keys_of_others(name):
            wanted = " or ".join(cls.TAKEN_BY[key])
            raise ValueError(f"is for name = {wanted}, not {name}: leave it out")
        return value

    def conflicts(self, recipe: Any) -> Iterator[RecipeError]:
        """Errors of keys of this section that cannot go with others of the whole recipe."""
        yield from ()


def refused(
    settings: Mapping[str, bool], other: str, hint: str = "change one of them"
) -> Iterator[RecipeError]:
    """Errors of the settings that are made, as they cannot go with `other`."""
    for setting, is_made in settings.items():
        if is_made:
            yield RecipeError(
                "recipe.keys-conflict",
                "{setting} cannot go with {other}: {hint}",
                setting=setting,
                other=other,
                hint=hint,
            )
