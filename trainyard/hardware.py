"""Specifications of GPUs from their data sheets, and rental prices."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.errors import InputError
from trainyard.hints import did_you_mean

_VENDORS = ("NVIDIA ", "AMD ", "Tesla ", "GeForce ")
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


class Accelerator(NamedTuple):
    name: str  # as torch.cuda.get_device_name() has it, without the vendor
    peak: dict[str, float]  # dense FLOP/s by precision; without unsupported ones
    memory: float  # bytes
    bandwidth: float  # of that memory, bytes per second
    price_per_hour: float | None  # USD, of the year `prices_of()`; None if it is not for rent
    link: float  # bytes per second, each way, to the other GPUs of a node


def accelerators() -> dict[str, Accelerator]:
    """All known GPUs by short names: "a100-sxm-80gb", "h100-sxm"."""
    return {key: _accelerator(row) for key, row in _rows().items()}


def find_accelerator(name: str) -> Accelerator | None:
    """The GPU by its torch.cuda.get_device_name(); None if unknown, or a part of one (MIG)."""
    bare = _bare(name)
    rows = (row for row in _rows().values() if bare in (each.lower() for each in row["names"]))
    return next(map(_accelerator, rows), None)


def prices_of() -> int:
    """The year of the prices."""
    year: int = _table()["prices_of"]
    return year


def named_accelerator(key: str) -> Accelerator:
    """The GPU of a short name. InputError with the nearest names if there is none."""
    if key not in (known := accelerators()):
        hint = did_you_mean(key, known) or f"; known are {', '.join(known)}"
        raise InputError(
            "estimate.unknown-gpu", "{name!r} is not a known GPU{hint}", name=key, hint=hint
        )
    return known[key]


def _accelerator(row: dict[str, Any]) -> Accelerator:
    return Accelerator(
        name=row["names"][0],
        peak={precision: 1e12 * row[precision] for precision in _PRECISIONS if precision in row},
        memory=1e9 * row["memory"],
        bandwidth=1e9 * row["bandwidth"],
        price_per_hour=row.get("price"),
        link=1e9 * row.get("link", 24),
    )


def _bare(name: str) -> str:
    for vendor in _VENDORS:
        name = name.removeprefix(vendor)
    return name.strip().lower()


def _rows() -> dict[str, dict[str, Any]]:
    return {key: row for key, row in _table().items() if isinstance(row, dict)}


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "hardware.toml").read_text(encoding="utf-8"))
