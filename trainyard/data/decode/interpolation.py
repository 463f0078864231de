"""The filters that resize images."""

from typing import Literal

Interpolation = Literal["bilinear", "bicubic"]
"""Both are antialiased."""
