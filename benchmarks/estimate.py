"""What `trainyard estimate` predicts, beside what others have published and what was measured here.

python -m benchmarks.estimate [--measured results/DATE-HARDWARE-averaging.json] [--hardware NAME]

Every comparison says which of its cells were used to set the model, and for the others by how much
it is wrong. --measured takes a file that benchmarks/averaging.py has saved.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.saving import save
from trainyard.averaging.config import AverageConfig
from trainyard.estimate.network import (
    LINKS,
    Buckets,
    Jitter,
    Link,
    Network,
    build_buckets,
    describe,
    scaled,
    step_time,
)

ALL_REDUCE = AverageConfig()
ONE_PEER = AverageConfig(name="gossip")
AER = AverageConfig(name="gossip", topology="alternating-exponential-ring")


class Cell(NamedTuple):
    where: str
    average: str
    published: float  # milliseconds of a step
    predicted: float
    is_set: bool = False  # by this cell, so that it says nothing

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


class Case(NamedTuple):
    average: AverageConfig
    buckets: Buckets
    network: Network
    ranks: int

    def step_ms(self, compute: float) -> float:
        average, buckets, network, ranks = self
        return 1000 * step_time(average, buckets, network, ranks=ranks, compute=compute).total

    def compute_for(self, milliseconds: float) -> float:
        """The seconds of compute with which a step takes so long."""
        low, high = 0.0, milliseconds / 1000
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.step_ms(middle) < milliseconds else (low, middle)
        return low


def line(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Slope and start of a line through two points."""
    slope = (one[1] - other[1]) / (one[0] - other[0])
    return slope, one[1] - slope * one[0]


# --- system C: Transformer-base, 25 thousand tokens a step in all, by Decent-DP's authors ---

TOKENS = 25_000
# A vocabulary of 37,000; the matrices of encoder and decoder. The embedding's gradient is the last.
_ENCODER = [512 * 512] * 4 + [512 * 2048] * 2
_DECODER = [512 * 512] * 8 + [512 * 2048] * 2
TRANSFORMER = build_buckets([37_000 * 512, *_ENCODER * 6, *_DECODER * 6])

NETWORKS = {
    "T4": Network(8, LINKS["pcie3"], LINKS["100gb-ib"]),
    # Of these only "InfiniBand" is known. One-peer exchanges at the published pace need 168 Gbit/s.
    "A100": Network(4, LINKS["nvlink3"], LINKS["200gb-ib"]),
    "A40": Network(4, LINKS["pcie4"], LINKS["25gbe"]),
}
PUBLISHED = {  # GPUs: all-reduce, alternating exponential ring, one-peer exponential
    "T4": {16: (372.5, 312.3, 314.8), 32: (225.5, 178.8, 178.8), 64: (167.3, 122.2, 123.1)},
    "A100": {8: (73.0, 61.7, 63.4), 16: (54.8, 45.8, 46.8), 32: (51.5, 43.7, 44.7)},
    "A40": {8: (166.1, 122.0, 122.8), 16: (195.5, 78.9, 97.4), 32: (188.5, 67.9, 110.8)},
}


def system_c() -> list[Cell]:
    """Compute per token and per step are set by the ring's cells on the two fewest GPUs."""
    cells = []
    for name, network in NETWORKS.items():
        fewest = sorted(PUBLISHED[name])[:2]
        points = []
        for ranks in fewest:
            case = Case(AER, TRANSFORMER, network, ranks)
            points.append((TOKENS / ranks, case.compute_for(PUBLISHED[name][ranks][1])))
        per_token, fixed = line(*points)
        for ranks, row in PUBLISHED[name].items():
            for average, milliseconds in zip((ALL_REDUCE, AER, ONE_PEER), row, strict=True):
                case = Case(average, TRANSFORMER, network, ranks)
                predicted = case.step_ms(fixed + per_token * TOKENS / ranks)
                is_set = average is AER and ranks in fewest
                where = f"{ranks} {name}"
                cells.append(Cell(where, describe(average), milliseconds, predicted, is_set))
    return cells


# --- MLPerf: ResNet-50 on H100, gradients in half precision ---

IMAGENET = 1_281_167
H100 = Network(8, LINKS["nvlink4"], LINKS["8x400gb-ib"])
MLPERF = {  # GPUs: minutes, epochs, global batch
    8: (13.16, 35, 3_200),
    64: (2.48, 35, 3_200),
    3_584: (0.183, 77, 57_344),
}


def mlperf() -> list[Cell]:
    """Compute per image and per step are set by 8 and 64 GPUs."""
    buckets = scaled(model_buckets("resnet50"), 1 / 2)
    cases = {gpus: Case(ALL_REDUCE, buckets, H100, gpus) for gpus in MLPERF}
    images = {gpus: batch / gpus for gpus, (_, _, batch) in MLPERF.items()}
    published = {
        gpus: 60_000 * minutes / (epochs * IMAGENET / batch)
        for gpus, (minutes, epochs, batch) in MLPERF.items()
    }
    points = [(images[gpus], cases[gpus].compute_for(published[gpus])) for gpus in (8, 64)]
    per_image, fixed = line(*points)
    return [
        Cell(
            f"{gpus} H100",
            describe(ALL_REDUCE),
            published[gpus],
            case.step_ms(fixed + per_image * images[gpus]),
            is_set=gpus in (8, 64),
        )
        for gpus, case in cases.items()
    ]


# --- ResNet-50 on V100, in float32: SGP's abstract, and BlueFog's README ---

V100_IMAGES_PER_S = 360.0  # taken to be; neither says


def v100() -> list[Cell]:
    """Nothing is set by a cell; steps are from the hours, and from the scaling efficiency."""
    buckets = model_buckets("resnet50")
    sgp = Network(8, LINKS["nvlink2"], LINKS["10gbe"])
    bluefog = Network(8, LINKS["nvlink2"], LINKS["25gbe"])
    steps = 90 * IMAGENET / 8192
    of_32, of_64 = 32 / V100_IMAGES_PER_S, 64 / V100_IMAGES_PER_S
    rows = [
        ("256 V100, 10 GbE (SGP)", ALL_REDUCE, 5 * 3.6e6 / steps, sgp, 256, of_32),
        ("256 V100, 10 GbE (SGP)", AER, 1.6 * 3.6e6 / steps, sgp, 256, of_32),
        ("128 V100, 25 GbE (BlueFog)", ALL_REDUCE, 1000 * of_64 / 0.66, bluefog, 128, of_64),
        ("128 V100, 25 GbE (BlueFog)", ONE_PEER, 1000 * of_64 / 0.95, bluefog, 128, of_64),
        ("128 V100, 25 GbE (BlueFog)", AER, 1000 * of_64 / 0.95, bluefog, 128, of_64),
    ]
    return [
        Cell(
            where,
            describe(average),
            milliseconds,
            Case(average, buckets, network, ranks).step_ms(compute),
        )
        for where, average, milliseconds, network, ranks, compute in rows
    ]


def model_buckets(name: str) -> Buckets:
    import timm
    import torch

    with torch.device("meta"):
        return build_buckets([weight.numel() for weight in timm.create_model(name).parameters()])


# --- emulated networks: what benchmarks/averaging.py measured ---

UNLIMITED = 0.5e9  # bytes per second of a host, about, as there
MEASURED = {
    "DDP alone": ALL_REDUCE,
    "our all-reduce": ALL_REDUCE,
    "decent-dp": ONE_PEER,
    "our gossip": ONE_PEER,
    "DDP alone, bf16": AverageConfig(compress="bf16"),
    "our gossip, bf16": AverageConfig(
        name="gossip", topology="one-peer-exponential", compress="bf16"
    ),
    "our periodic": AverageConfig(name="periodic", every=16),
}


def emulated(measured: dict[str, Any]) -> list[Cell]:
    """Of each model, compute is set by DDP without limits; the rest follows from the limits."""
    cells = []
    for model, networks in measured["found"].items():
        buckets, hosts = model_buckets(model), measured["hosts"]
        if "0:0" not in networks:
            raise SystemExit(f"{model}: was not measured without limits (network 0:0)")
        alone = Case(ALL_REDUCE, buckets, host_network("0:0"), hosts)
        compute = alone.compute_for(measured_ms(networks["0:0"]["DDP alone"]))
        for network, contenders in networks.items():
            for name, values in contenders.items():
                case = Case(MEASURED[name], buckets, host_network(network), hosts)
                predicted = case.step_ms(compute)
                is_set = (network, name) == ("0:0", "DDP alone")
                cells.append(
                    Cell(f"{model}, {network}", name, measured_ms(values), predicted, is_set)
                )
    return cells


def host_network(text: str) -> Network:
    """MBIT:MS of benchmarks/averaging.py; gloo has a ring, and hosts of an emulation no jitter."""
    mbit, _, delay = text.partition(":")
    bandwidth = min(float(mbit) * 1e6 / 8 or UNLIMITED, UNLIMITED)
    link = Link(float(delay) / 1000 + 1e-4, bandwidth)
    return Network(1, link, link, Jitter(sigma=0.0), ("ring",))


def measured_ms(values: dict[str, list[float]]) -> float:
    return 1000 * statistics.median(values["seconds"])


# --- tables ---


def mean_error(cells: list[Cell]) -> float:
    """The mean size of the errors of the cells that were not used."""
    return statistics.mean(abs(cell.error) for cell in cells if not cell.is_set)


def table(cells: list[Cell]) -> str:
    lines = ["| where | average | published, ms | predicted, ms | error |", "|---|---|---|---|---|"]
    for cell in cells:
        error = "set by it" if cell.is_set else f"{cell.error:+.0%}"
        lines.append(
            f"| {cell.where} | {cell.average} | {cell.published:,.1f} | {cell.predicted:,.1f} "
            f"| {error} |"
        )
    return "\n".join(lines)


ABOUT = {
    "system C": """
Transformer-base, 25,000 tokens a step in all, as Decent-DP's authors published it (arXiv
2410.11998 and its code). Of each cluster, two numbers are set, the time of a token and the fixed
time of a step, by the alternating exponential ring on the two fewest GPUs: its exchange hides
behind compute. Links are those of the presets; compute times vary by 5%, which is assumed. No
all-reduce was used to set anything. Of the A100's network only InfiniBand is said: 200 Gbit/s
were chosen, since one-peer exchanges in the published time need 168 at least, so its one-peer
cells are no test of the network (with 100 Gbit/s they are 8, 37 and 43% too slow, and all-reduce
1, 18 and 16% off). The A40 with one peer are a miss that stays (without them the errors are 6% in
the mean): 32 GPUs in the published time send 7.2 GB/s out of each node, 2.3 times what 25 GbE
carries, while all-reduce on the same machines takes what 25 GbE gives it. So the model has the
network right for one of the two, or messages or ports are not what they are said to be. T4 and
A100 become slower than predicted as their share of the batch becomes small: small kernels take
more than a time in proportion.
""",
    "MLPerf": """
ResNet-50 to 75.9%: 13.16 minutes on 8 H100 (v4.0, Dell), 2.48 on 64 (v4.0, Oracle), both with
batches of 3,200 in 35 epochs, and 11.0 seconds on 3,584 (v3.0, NVIDIA; 57,344 in 77). Gradients
are taken to travel in half precision. The times have the evaluation in them; batch and epochs of
the first are those of the same software on H200. One predicted cell proves little.
""",
    "V100": """
ResNet-50 in float32, 360 images per second and GPU, which is assumed. Stochastic Gradient Push
(arXiv 1811.10792): 32 nodes of 8, 90 epochs in more than 5 hours by all-reduce and in 1.6 by
gossip between nodes; steps of 8,192 images are assumed. BlueFog (its README): 66% and more than
95% of ideal on 128 GPUs with batches of 64. Nothing is set by a cell. The line rate of Ethernet
is what fails here: that all-reduce on 10 GbE got an eighth of it. A rate measured between two
nodes (`--bandwidth`) is worth more than a name. That gossip wins, and by about how much (2.2
times; published 3.1), stands. Which of the two topologies BlueFog's figure is for is not said.
""",
    "emulated": """
Four hosts, of what benchmarks/averaging.py measured. Of each model, compute is set by DDP without
limits, and a host is taken to send 4 Gbit/s where there is no limit; gloo's ring.
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, help="what benchmarks/averaging.py saved")
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-estimate.json and .md")
    options = parser.parse_args()
    found = {"system C": system_c(), "MLPerf": mlperf(), "V100": v100()}
    if options.measured:
        found["emulated"] = emulated(json.loads(options.measured.read_text()))
    parts = ["# Predicted times of steps"]
    for name, cells in found.items():
        parts += [f"## {name}", ABOUT[name].replace("\n", " ").strip(), table(cells)]
        parts += [f"Mean size of the errors: {mean_error(cells):.0%}."]
    print(*parts, sep="\n\n")
    if options.hardware:
        rows = {
            name: [cell._asdict() | {"error": cell.error} for cell in cells]
            for name, cells in found.items()
        }
        save(f"{options.hardware}-estimate", rows, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
