"""What has been found, as tables and as a chart."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.loaders.catalogue import ALONE, FULL, SMALL

BASE = "Trainyard, WebDataset"  # of whole loaders: the same JPEGs that peers read
Found = Mapping[str, Any]


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"{self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def brief(self) -> "Table":
        """For a terminal: the first columns, medians without their spreads."""
        rows = [[row[0], *(cell.split(" (")[0] for cell in row[1:6])] for row in self.rows]
        return Table(self.title, self.columns[:6], rows)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def with_spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def decoder_tables(found: Found, yardstick: str) -> list[Table]:
    tables = []
    columns = ["decoder", "images/s", "ratio", "dB", "5%", "least"]
    for title, contenders in found.items():
        base = median(contenders[yardstick]["images_per_second"])
        rows = []
        for name in by_rate(contenders, "images_per_second"):
            about = contenders[name]
            rates = about["images_per_second"]
            quality = [about["median_db"], about["low_db"], about["least_db"]]
            cells = ["equal" if value > 98 else f"{value:.1f}" for value in quality]
            rows.append([name, with_spread(rates), f"{median(rates) / base:.2f}", *cells])
        tables.append(Table(f"Decoders alone, one core: {title}", columns, rows))
    return tables


def by_rate(contenders: Found, key: str) -> list[str]:
    """The names, fastest first; without those that have no figures."""
    measured = [name for name, about in contenders.items() if about[key]]
    return sorted(measured, key=lambda name: -median(contenders[name][key]))


def loader_tables(found: Found) -> list[Table]:
    columns = ["loader", "1 core", "2 cores", "2/1", "ours/it"]
    columns += [
        "first s",
        "import s",
        "MB, no file's",
        "of it torch",
        "MB, mapped",
        "kB an image",
    ]
    tables = []
    for group in (FULL, SMALL):
        contenders = found.get(group, {})
        base = contenders.get(BASE, {}).get("1")
        rows = [_loader_row(name, contenders[name], base) for name in by_rate(contenders, "1")]
        if rows:
            title = f"Whole loaders, images/s: {group}; ours: {BASE}"
            tables.append(Table(title, columns, rows))
    return tables


def _loader_row(name: str, about: Found, base: Sequence[float] | None) -> list[str]:
    one, two = about["1"], about["2"]
    return [
        name,
        with_spread(one),
        with_spread(two),
        f"{median(two) / median(one):.2f}" if two else "",
        f"{median(base) / median(one):.2f}" if base else "",
        f"{median(about['first_batch_s']):.2f}",
        f"{median(about['import_s']):.1f}",
        f"{median(about['anonymous_mb']):,.0f}",
        f"{median(about['torch_mb']):,.0f}",
        f"{median(about['mapped_mb']):,.0f}",
        f"{about['bytes_an_image'] / 1e3:,.0f}",
    ]


def share_table(loaders: Found) -> Table:
    """How much of its decoder's rate a whole loader has, on one core, in the same rounds."""
    rows = []
    for group, alone in ALONE.items():
        for name, about in loaders.get(alone, {}).items():
            decoder, loader = about["1"], loaders.get(group, {}).get(name, {}).get("1")
            if decoder and loader:
                share = f"{median(loader) / median(decoder):.0%}"
                rows.append([name, group, with_spread(decoder), with_spread(loader), share])
    columns = ["loader", "data", "decoder alone", "whole loader", "share"]
    return Table("Whole loaders beside their decoder alone, one core", columns, rows)


def draw(path: Path, loaders: Found, title: str) -> None:
    """Bars of images a second, one chart for each kind of data."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 8})
    groups = [group for group in (FULL, SMALL) if by_rate(loaders.get(group, {}), "1")]
    heights = [len(by_rate(loaders[group], "1")) for group in groups]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(8, 1 + 0.22 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, group in zip(axes[:, 0], groups, strict=True):
        names = by_rate(loaders[group], "1")[::-1]
        for cores, offset, colour in (("2", -0.2, "#c9d6e8"), ("1", 0.2, None)):
            rates = [loaders[group][name][cores] for name in names]
            ours = [colour or ("#1f5fa8" if "Trainyard" in name else "#8a8f98") for name in names]
            places = [row + offset for row in range(len(names))]
            bars = [median(rate) if rate else 0 for rate in rates]
            axis.barh(places, bars, 0.38, color=ours)
        axis.set_yticks(range(len(names)), names)
        axis.set_title(f"{group}: images/s on one core (dark) and on two (light)", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
