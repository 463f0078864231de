"""The fuzzing target over its corpus: with sanitizers and some seconds beyond; and on ARM."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.run import HERE, build, core_sources, find_clang, fuzz, include, lay_out_corpus

pytestmark = pytest.mark.night

ARM = ("aarch64-linux-gnu-gcc", "qemu-aarch64")


@pytest.mark.timeout(600)
def test_no_finding_in_a_short_run(tmp_path: Path) -> None:
    clang = find_clang()
    if clang is None:
        pytest.skip("needs clang with libFuzzer: apt install clang-16 libclang-rt-16-dev")
    target = build(clang, tmp_path)
    corpus = lay_out_corpus(tmp_path)
    assert len(list(corpus.iterdir())) > 100
    assert fuzz(target, corpus, runs=-1, seconds=20, jobs=1) == 0


@pytest.mark.timeout(600)
def test_neon_gives_the_bits_of_plain_c(tmp_path: Path) -> None:
    compiler, emulator = map(shutil.which, ARM)
    if compiler is None or emulator is None:
        pytest.skip(
            "needs ARM's: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
        )
    program = tmp_path / "replay"
    subprocess.run(
        [
            *(compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-static"),
            *("-ffp-contract=off", include(), "-o", str(program)),
            *(str(HERE / "replay.c"), str(HERE / "fuzz.c"), *core_sources(), "-lm"),
        ],
        check=True,
    )
    inputs = sorted(lay_out_corpus(tmp_path).iterdir())
    done = subprocess.run(
        [emulator, str(program), *map(str, inputs)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{len(inputs)} inputs\n"), done.stderr
