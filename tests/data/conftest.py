from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the indexes of data that cannot be written to go; not there yet."""
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
