from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the indexes of data that cannot be written to go; not there yet."""
    folder = tmp_path.with_name(f"{tmp_path.name}-cache")  # since tmp_path may be the data
    monkeypatch.setenv("TRAINYARD_CACHE", str(folder))
    return folder
