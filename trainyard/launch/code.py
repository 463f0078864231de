"""What is installed, as ranks on several hosts must have it alike."""

import hashlib
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def installed() -> dict[str, str]:
    """Versions and a checksum of Trainyard's own code; imports none of it."""
    return {"trainyard": version("trainyard"), "torch": version("torch"), "code": checksum()}


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def checksum() -> str:
    """Of all modules and recipes."""
    digest = hashlib.sha256()
    files = (path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".toml"))
    for path in sorted(files):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
