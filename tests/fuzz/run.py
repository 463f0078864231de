"""Fuzz the decoder: the target under clang's sanitizers, over the corpus and on from there.

    python -m tests.fuzz.run --runs 10_000_000 --jobs 2

Inputs that reach new code are kept in build/fuzz/corpus; `--merge` puts the smallest set of files
that reaches as much into tests/fuzz/corpus.tar.xz. A finding is left as crash-* or timeout-* in
build/fuzz and ends the run with an error.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.fuzz.seeds import write_seeds

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NATIVE = ROOT / "trainyard" / "data" / "_native"
CORPUS = HERE / "corpus.tar.xz"
NEEDS_PYTHON = {"module.c", "decoder.c", "arguments.c"}
SANITIZERS = "address,undefined"


def find_clang() -> str | None:
    """A clang with libFuzzer."""
    for name in ("clang", "clang-19", "clang-16", "clang-14"):
        path = shutil.which(name)
        if path is None:
            continue
        where = subprocess.run(
            [path, "-print-resource-dir"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if any(Path(where).rglob("libclang_rt.fuzzer*")):
            return path
    return None


def core_sources() -> list[str]:
    """What knows nothing of Python."""
    return [str(path) for path in NATIVE.rglob("*.c") if path.name not in NEEDS_PYTHON]


def include() -> str:
    return f"-I{NATIVE}"


def build(clang: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "fuzz"
    subprocess.run(
        [
            *(clang, "-std=gnu11", "-O2", "-g", f"-fsanitize=fuzzer,{SANITIZERS}"),
            *("-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-Wall", "-Wextra"),
            *(
                "-DUNSTUFF_PIECE=37",
                include(),
                "-o",
                str(target),
                str(HERE / "fuzz.c"),
                *core_sources(),
                "-lm",
            ),
        ],
        check=True,
    )
    return target


def lay_out_corpus(folder: Path) -> Path:
    """The committed corpus and the seeds, as files."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    if CORPUS.exists():
        with tarfile.open(CORPUS) as archive:
            archive.extractall(corpus, filter="data")
    write_seeds(corpus)
    return corpus


def fuzz(target: Path, corpus: Path, *, runs: int, seconds: int, jobs: int) -> int:
    """The exit code of libFuzzer: not 0 after a finding."""
    command = [str(target.resolve()), str(corpus.resolve()), f"-runs={runs}"]
    command += [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=3000"]
    command += ["-print_final_stats=1", "-use_value_profile=1", "-verbosity=1"]
    if jobs > 1:
        command += [f"-fork={jobs}", "-ignore_timeouts=0", "-ignore_ooms=0"]
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    # A shell between: exec hands on the largest memory of the caller, for which the limit would
    # take that of the target.
    command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    return subprocess.run(command, cwd=target.parent, env=environment, check=False).returncode


def merge(target: Path, corpus: Path) -> None:
    smallest = corpus.parent / "smallest"
    shutil.rmtree(smallest, ignore_errors=True)
    smallest.mkdir()
    subprocess.run(
        [str(target.resolve()), "-merge=1", str(smallest.resolve()), str(corpus.resolve())],
        cwd=target.parent,
        check=True,
    )
    with tarfile.open(CORPUS, "w:xz", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(smallest.iterdir()):
            about = tarfile.TarInfo(path.name)
            about.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(about, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=-1, help="executions; -1: until --seconds")
    parser.add_argument("--seconds", type=int, default=0, help="0: until --runs")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--merge", action="store_true", help="write tests/fuzz/corpus.tar.xz anew")
    options = parser.parse_args()
    clang = find_clang()
    if clang is None:
        sys.exit("needs clang with libFuzzer: apt install clang-16 libclang-rt-16-dev")
    target = build(clang, options.folder)
    corpus = lay_out_corpus(options.folder)
    if options.merge:
        merge(target, corpus)
        return 0
    return fuzz(target, corpus, runs=options.runs, seconds=options.seconds, jobs=options.jobs)


if __name__ == "__main__":
    raise SystemExit(main())
