"""Steps of data-parallel training on several hosts of an emulated network, by how replicas agree.

python -m benchmarks.averaging [--models resnet50 vit_base_patch16_224] [--networks 0:0 100:5 ...]
    [--seconds 8] [--rounds 2] [--hosts 4] [--straggler 1] [--contenders NAME ...]
    [--hardware NAME]
python -m benchmarks.averaging --quick

A network is MBIT:MS: what each host sends, in Mbit/s (0: no limit), and how late it arrives, one
way; see tests/services/network.py, and be root. Contenders:

- DDP alone: torch's DistributedDataParallel in a bare loop
- our all-reduce: Trainyard's step with `average.name = "allreduce"`
- our virtual ranks: with `batch.virtual_ranks`, as many as hosts, for the same bits on fewer
- decent-dp: the package of that name, one-peer exponential topology, in a bare loop
- our gossip: Trainyard's step, the same topology
- on slow networks also: DDP alone with torch's bf16 hook, our gossip with bf16 messages, and our
  periodic, an exchange every 16 steps
- by --contenders alone: what benchmarks/convergence.py compares besides

All have the same optimizer (SGD with momentum, fused) and the same model, which has the parameters
of a real one, by shape and order, but next to no arithmetic: each of its modules that has any
parameters sleeps in the forward and in the backward pass, 0.25 s in all, as a host does whose
accelerator computes, and then gives its parameters p the gradient p - rank, of a quadratic. So the
mean of the replicas' weights after any number of steps is known, and is checked for each contender;
and so is that they are closer to each other than they would be without averaging.

A round takes the contenders in turns, in an order that rotates. Each is built in processes of its
own, warmed up without limits and then timed on the round's networks: as many steps as fit into
--seconds, an even number of them. A round's figure is their mean, over the hosts too: where an
exchange overlaps with the next step, long steps follow short ones. Networks on which a step takes
longer than SLOW_S come after the others, with half as many rounds. Megabytes are what a host sends
in a step.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from benchmarks.contenders import (
    COMPUTE_S,
    CONTENDERS,
    OPTIONAL,
    OVERLAPPED,
    PERIODS,
    SLOW_ONLY,
    Shaped,
    Step,
    expected_error,
    real_model,
)
from benchmarks.saving import listed, save
from tests.services.network import Link, Network, bytes_sent, network

WARM_UP = 3  # DDP makes its buckets anew, decent-dp begins with the second step
SLOW_S = 5.0
UNLIMITED_MBIT = 4000.0  # about
FAST = Link()
DEFAULT = [name for name in CONTENDERS if name not in OPTIONAL]
NETWORKS = ("0:0", "0:5", "1000:0", "1000:5", "100:0", "100:5")


# --- a rank, on a host of its own ---


def tell(**message: Any) -> None:
    """The first of the ranks speaks for all, by its standard output."""
    if dist.get_rank() == 0:
        print(json.dumps(message), flush=True)


def relink(link: Link) -> None:
    """Ask for other links, and wait for them."""
    dist.barrier()
    tell(link=[link.mbit, link.delay_ms])
    if dist.get_rank() == 0:
        sys.stdin.readline()
    dist.barrier()


def run_rank(name: str, options: argparse.Namespace) -> None:
    """Measure one contender on all of --networks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    slower = options.straggler if rank == options.hosts - 1 else 1.0
    model = Shaped(options.models[0], rank, COMPUTE_S * slower)
    num_bytes = sum(p.nbytes for p in model.parameters())
    steps = Steps(CONTENDERS[name](model), PERIODS.get(name, 1))
    steps.take(WARM_UP)
    for text in options.networks:
        until_quiet()
        sent, taken = bytes_sent(), steps.taken
        relink(link_of(text))
        ideal_s = ideal_seconds(text, num_bytes, options.hosts)
        if name in OVERLAPPED or ideal_s < SLOW_S:
            steps.take(1)  # what is under way in overlap is then under this network's limits
        times = 2 * max(1, int(options.seconds / ideal_s / steps.period / 2))
        seconds, busy = steps.timed(times)
        relink(FAST)
        until_quiet()
        megabytes = (bytes_sent() - sent) / 1e6 / (steps.taken - taken)
        whole = torch.tensor([seconds, megabytes, busy], dtype=torch.float64)
        dist.all_reduce(whole)
        figures = zip(
            ("seconds", "megabytes", "cpu_seconds"), (whole / options.hosts).tolist(), strict=True
        )
        tell(network=text, figures=dict(figures))
    check(name, model, steps.taken)


class Steps:
    """Of a contender, so many at a time: a period's, if it has periods."""

    def __init__(self, step: Step, period: int) -> None:
        self._step, self.period = step, period
        self.taken = 0

    def take(self, times: int) -> None:
        for _ in range(times * self.period):
            self._step()
        self.taken += times * self.period

    def timed(self, times: int) -> tuple[float, float]:
        """Seconds of a step, and of its processor time, in the mean."""
        dist.barrier()
        busy, begun = time.process_time(), time.perf_counter()
        self.take(times)
        seconds, busy = time.perf_counter() - begun, time.process_time() - busy
        return seconds / times / self.period, busy / times / self.period


def until_quiet() -> None:
    """Nothing more is under way from this host."""
    sent = -1
    while sent != (sent := bytes_sent()):
        time.sleep(0.2)


def check(name: str, model: nn.Module, steps: int) -> None:
    """AssertionError if weights are not where this many steps with averaging bring them."""
    own = torch.stack([p.detach().double().mean() for p in model.parameters()])
    mean = own.clone()
    dist.all_reduce(mean)
    hosts = dist.get_world_size()
    mean /= hosts
    middle = (hosts - 1) / 2  # of the ranks, which are the minima of their losses
    error = expected_error(steps)
    wanted = middle + (-1 - middle) * error
    tolerance = 1e-2 if name in SLOW_ONLY else 1e-4  # of fewer bits, and of float32
    off = float((mean - wanted).abs().max())
    assert off < tolerance, f"{name}: weights are {off} from the {wanted} after {steps} steps"
    apart, alone = float((own - mean).abs().max()), middle * (1 - error)
    assert apart < 0.5 * alone, (
        f"{name}: apart by {apart}, where {alone} is apart without averaging"
    )


# --- the rounds ---


def link_of(text: str) -> Link:
    mbit, _, milliseconds = text.partition(":")
    return Link(float(mbit) or None, float(milliseconds))


def ideal_seconds(text: str, num_bytes: int, hosts: int) -> float:
    """About what an all-reduce takes by a ring, and the computing."""
    sent = 2 * (hosts - 1) / hosts * num_bytes
    return COMPUTE_S + sent * 8e-6 / (link_of(text).mbit or UNLIMITED_MBIT)


class Pass(NamedTuple):
    """Networks that are measured in the same rounds."""

    networks: list[str]
    rounds: int
    contenders: list[str]


def passes(model: str, options: argparse.Namespace) -> list[Pass]:
    num_bytes = sum(4 * p.numel() for p in real_model(model).parameters())
    is_slow = {
        text: ideal_seconds(text, num_bytes, options.hosts) > SLOW_S for text in options.networks
    }
    names = [name for name in CONTENDERS if name in (options.contenders or DEFAULT)]
    left_out = () if options.contenders else SLOW_ONLY
    fast, slow = ([text for text in is_slow if is_slow[text] is wanted] for wanted in (False, True))
    both = [
        Pass(fast, options.rounds, [name for name in names if name not in left_out]),
        Pass(slow, max(1, options.rounds // 2), names),
    ]
    return [each for each in both if each.networks]


Found = dict[str, dict[str, dict[str, list[float]]]]  # by network, contender, and figure


def run_model(model: str, options: argparse.Namespace, emulated: Network) -> Found:
    found: Found = {text: {} for text in options.networks}
    for networks, rounds, contenders in passes(model, options):
        for number in range(rounds * len(contenders)):
            turn, place = divmod(number, len(contenders))
            name = contenders[(turn + place) % len(contenders)]
            for text, figures in run_ranks(model, name, networks, options, emulated):
                print(model, name, text, figures, file=sys.stderr)
                values = found[text].setdefault(name, {})
                for figure, value in figures.items():
                    values.setdefault(figure, []).append(value)
    return found


def run_ranks(
    model: str,
    name: str,
    networks: Sequence[str],
    options: argparse.Namespace,
    emulated: Network,
) -> Iterator[tuple[str, dict[str, float]]]:
    """What a contender's ranks measure on each network. SystemExit with their words if one fails.

    Processes of its own, because not all of them give back what memory they had.
    """
    command = [sys.executable, "-m", "benchmarks.averaging", "--rank", name, "--models", model]
    command += ["--seconds", f"{options.seconds}", "--straggler", f"{options.straggler}"]
    command += ["--hosts", f"{options.hosts}"]
    command += ["--networks", *networks]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryFile("w+") as said:
        ranks: list[Any] = [
            host.start(
                *command,
                env=os.environ | emulated.rank_variables(host.number),
                stderr=said,
                **(pipes if host.number == 0 else {}),
            )
            for host in emulated.hosts
        ]
        for line in ranks[0].stdout:
            message = json.loads(line)
            if "link" in message:
                emulated.set(Link(*message["link"]))
                print(file=ranks[0].stdin, flush=True)
            else:
                yield message["network"], message["figures"]
        if any(rank.wait() for rank in ranks):
            said.seek(0)
            raise SystemExit(f"a rank of {name} has failed:\n{said.read()[-5000:]}")


def spelled(text: str) -> str:
    link = link_of(text)
    rate = f"{link.mbit:,.0f} Mbit/s" if link.mbit else "no limit"
    return f"{rate}, {link.delay_ms:g} ms"


def table(found: Found) -> str:
    lines = [
        "| network | replicas agree by | s a step: median of the rounds (min, max; rounds) "
        "| faster than DDP alone | MB a step and host | processor's s a step and host |",
        "|---|---|---|---|---|---|",
    ]
    for text, of_network in found.items():
        alone = middle(found, text, "DDP alone")
        for name in (name for name in CONTENDERS if name in of_network):
            seconds, median = of_network[name]["seconds"], middle(found, text, name)
            spread = f"{median:.3f} ({min(seconds):.3f}, {max(seconds):.3f}; {len(seconds)})"
            sent, busy = (middle(found, text, name, key) for key in ("megabytes", "cpu_seconds"))
            figures = f"{alone / median:.2f} x | {sent:,.0f} | {busy:.3f}"
            lines.append(f"| {spelled(text)} | {name} | {spread} | {figures} |")
    return "\n".join(lines)


def comparison(found: Found) -> str:
    """Ratios of medians."""
    pairs = [
        ("our all-reduce", "DDP alone"),
        ("our virtual ranks", "our all-reduce"),
        ("our gossip", "decent-dp"),
        ("our all-reduce", "our gossip"),
    ]
    pairs = [pair for pair in pairs if all(one in found[next(iter(found))] for one in pair)]
    titles = " | ".join(f"{one} / {other}" for one, other in pairs)
    lines = [f"| network | {titles} |", f"|---{'|---' * len(pairs)}|"]
    for text in found:
        ratios = [middle(found, text, one) / middle(found, text, other) for one, other in pairs]
        lines.append(f"| {spelled(text)} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |")
    return "\n".join(lines)


def middle(found: Found, text: str, name: str, figure: str = "seconds") -> float:
    return statistics.median(found[text][name][figure])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "vit_base_patch16_224"])
    parser.add_argument("--networks", nargs="+", default=NETWORKS, metavar="MBIT:MS")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--straggler", type=float, default=1.0, help="the last host computes so many times as long"
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--hosts", type=int, default=4, help="a power of two")
    parser.add_argument("--quick", action="store_true", help="a ResNet-18's, two networks, once")
    parser.add_argument("--hardware", help="save results/DATE-HARDWARE-averaging*.json and .md")
    parser.add_argument("--rank", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.models, options.networks = ["resnet18"], ["0:0", "1000:5"]
        options.seconds, options.rounds = 2.0, 1
    if options.rank:
        run_rank(options.rank, options)
        sys.stdout.flush()
        os._exit(0)  # groups and their threads need no farewell
    load, begun = os.getloadavg()[0], time.monotonic()
    results, tables = {}, []
    for model in options.models:
        with network(options.hosts) as emulated:
            results[model] = run_model(model, options, emulated)
        tables += [f"## {model}", comparison(results[model]), table(results[model])]
        print(*tables[-3:], sep="\n\n")
    about = {
        "date": date.today().isoformat(),
        "hardware": options.hardware,
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "hosts": options.hosts,
        "compute_s": COMPUTE_S,
        "straggler": options.straggler,
        "rounds": options.rounds,
        "torch": torch.__version__,
        "decent-dp": importlib.metadata.version("decent-dp"),
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }
    if options.hardware:
        text = "\n\n".join(["# Averaging", listed(about), *tables]) + "\n"
        name = "averaging" if options.straggler == 1 else "averaging-straggler"
        save(f"{options.hardware}-{name}", about | {"found": results}, text)


if __name__ == "__main__":
    main()
