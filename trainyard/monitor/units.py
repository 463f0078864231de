"""Formatting of quantities with units."""


def in_seconds(seconds: float) -> str:
    """3,600 s, 2.35 s, 40.5 ms, 0.25 ms."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def in_bytes(num_bytes: float) -> str:
    """A decimal size: 1.28 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def in_bits(bytes_per_second: float) -> str:
    """11.8 Gb/s, 94 Mb/s."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mb/s"


def in_millions(count: int) -> str:
    """28.59 M; 7,210 below a million."""
    return f"{count / 1e6:,.4g} M" if count >= 1e6 else f"{count:,}"
