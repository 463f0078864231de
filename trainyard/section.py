"""`Section`: the base class of all recipe sections."""

from pydantic import BaseModel, ConfigDict


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
