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
    watts: float  # of the board, at its power limit
    price_per_hour: float | None  # USD, of the year `prices_of()`; None if it is not for rent
    link: str  # inside a node: a key of trainyard.estimate.network.LINKS


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


def read_prices(path: Path) -> dict[str, float]:
    """USD per GPU and hour by short names, from a TOML file of lines like `h100-sxm = 2.99`.

    InputError names the wrong line.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: prices cannot be read: {error}") from None
    for key, price in table.items():
        if key not in _rows():
            raise InputError(f"{path}: {explain_unknown(key)}")
        if isinstance(price, bool) or not isinstance(price, int | float) or not price >= 0:
            raise InputError(f"{path}: {key} = {price!r} is no price in USD per GPU and hour")
    return {key: float(price) for key, price in table.items()}


def explain_unknown(key: str) -> str:
    """The message about an unknown GPU name, with the nearest names."""
    known = list(_rows())
    hint = did_you_mean(key, known) or f"; known are {', '.join(known)}"
    return f"{key!r} is not a known GPU{hint}"


def _accelerator(row: dict[str, Any]) -> Accelerator:
    return Accelerator(
        name=row["names"][0],
        peak={precision: 1e12 * row[precision] for precision in _PRECISIONS if precision in row},
        memory=1e9 * row["memory"],
        bandwidth=1e9 * row["bandwidth"],
        watts=row["watts"],
        price_per_hour=row.get("price"),
        link=row.get("link", "pcie4"),
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
