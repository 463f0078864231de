"""Everything that only a GPU can show, in parts; each has a process and a time limit of its own.

python -m benchmarks.gpu [PART ...] [--minutes M] [--dry]

A part is a name or its number; all parts run if none is given. Results go to
benchmarks/results/DATE-GPU-gpu.md and .json, also into the folder $OUT if set, after each part; a
part that runs again on the same day replaces its section. --minutes limits all parts together.
--dry runs tiny models on the CPU, to try the parts out; its results go to build/gpu. See README.md.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import as_markdown
from benchmarks.gpu.place import ROOT, WORK, prepare

PARTS = {  # module and heading; the cheapest and most telling come first
    "tests": "Tests of what only a GPU can show",
    "transforms": "Transforms of batches on the device",
    "accuracy": "Training to an accuracy",
    "steps": "Steps with a batch at hand",
    "trainer": "The whole trainer, from JPEGs",
}
_LIMIT_S = 9 * 60


def run(name: str, environment: dict[str, str], limit_s: float, *, dry: bool) -> dict[str, Any]:
    """Runs a part, and kills it with all its processes at the limit."""
    findings, log = WORK / f"{name}.json", WORK / f"{name}.log"
    findings.unlink(missing_ok=True)
    module = f"benchmarks.gpu.{name}"
    command = [sys.executable, "-m", module, str(findings), *(["--dry"] if dry else [])]
    started = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ending = f"exit code {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ending = f"stopped after {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print(log.read_text(errors="replace")[-6000:], flush=True)
    return {
        "ending": ending,
        "seconds": round(time.monotonic() - started),
        "tables": json.loads(findings.read_text()) if findings.exists() else {},
    }


def save(facts: dict[str, Any], name: str, part: dict[str, Any], folder: Path) -> list[Path]:
    """Puts a part into the results of this GPU and day. Returns the two files."""
    folder.mkdir(parents=True, exist_ok=True)
    gpu = re.sub(r"[^a-z0-9]+", "-", facts.get("gpu", "cpu").lower().replace("nvidia", "")).strip(
        "-"
    )
    figures, text = (folder / f"{date.today()}-{gpu}-gpu.{kind}" for kind in ("json", "md"))
    known = json.loads(figures.read_text()) if figures.exists() else {"parts": {}}
    known["facts"] = facts
    known["parts"][name] = part
    known["parts"] = {each: known["parts"][each] for each in PARTS if each in known["parts"]}
    figures.write_text(json.dumps(known, indent=1) + "\n")
    text.write_text(as_text(known))
    return [figures, text]


def as_text(known: dict[str, Any]) -> str:
    about = ", ".join(f"{key} {value}" for key, value in known["facts"].items())
    found = [f"# On a GPU: {known['facts'].get('gpu', 'none')}\n\n{about}\n"]
    for name, part in known["parts"].items():
        found.append(f"## {PARTS[name]}\n\nPart {name}: {part['ending']}, {part['seconds']} s.\n")
        found.append(as_markdown(part["tables"]))
    return "\n".join(found)


def chosen(words: list[str]) -> list[str]:
    """The parts that words name, by name or number."""
    names = list(PARTS)
    numbered = {str(number): name for number, name in enumerate(names, start=1)}
    found = [numbered.get(word, word) for word in words]
    for name in found:
        if name not in PARTS:
            raise SystemExit(f"no part {name!r}: choose 1 to {len(names)} or {', '.join(names)}")
    return found or names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all parts")
    parser.add_argument("--dry", action="store_true", help="tiny models, on the CPU")
    options = parser.parse_args()
    names, end = chosen(options.parts), time.monotonic() + 60 * options.minutes
    environment = prepare()
    if options.dry:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRAINYARD_GPU_TESTS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.gpu.facts"]
    found = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    facts = json.loads(found.stdout)
    if "gpu" not in facts and not options.dry:
        raise SystemExit("torch sees no GPU here; --dry tries the parts out on the CPU")
    print(facts, flush=True)
    failed = False
    for name in names:
        print(f"--- {name} ---", flush=True)
        limit_s = max(0.0, min(_LIMIT_S, end - time.monotonic()))
        part = run(name, environment, limit_s, dry=options.dry)
        failed |= part["ending"] != "exit code 0"
        files = save(facts, name, part, WORK if options.dry else ROOT / "benchmarks" / "results")
        if out := os.environ.get("OUT"):
            for file in [*files, WORK / f"{name}.log"]:
                shutil.copy(file, out)
        print(f"{name}: {part['ending']}, {part['seconds']} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
