"""A short run of the fuzzing target: the corpus, and some seconds beyond."""

from pathlib import Path

import pytest

from tests.fuzz.run import build, find_clang, fuzz, lay_out_corpus


@pytest.mark.timeout(600)
def test_no_finding_in_a_short_run(tmp_path: Path) -> None:
    clang = find_clang()
    if clang is None:
        pytest.skip("needs clang with libFuzzer: apt install clang-16 libclang-rt-16-dev")
    target = build(clang, tmp_path)
    corpus = lay_out_corpus(tmp_path)
    assert len(list(corpus.iterdir())) > 100
    assert fuzz(target, corpus, runs=-1, seconds=20, jobs=1) == 0
