"""`Section`: the base class of all recipe sections."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

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
