"""Checks that hosts are ready: all ranks need the same code and torch."""

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def installed() -> dict[str, str]:
    """Versions of trainyard and torch, and a checksum of Trainyard's code; imports neither."""
    return {"trainyard": version("trainyard"), "torch": version("torch"), "code": checksum()}


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def checksum() -> str:
    """Digest of all modules and recipes, 12 hex digits."""
    digest = hashlib.sha256()
    files = (path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".toml"))
    for path in sorted(files):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def differences(facts: Mapping[str, Mapping[str, str]], here: Mapping[str, str]) -> dict[str, str]:
    """Problems by host: code that differs from this host's, torch that differs from the first's."""
    first, torch = next((host, each["torch"]) for host, each in facts.items())
    problems = {}
    for host, each in facts.items():
        if each["trainyard"] != here["trainyard"]:
            versions = f"trainyard {each['trainyard']} there, {here['trainyard']} here"
            problems[host] = f"{versions}: install the same"
        elif each["code"] != here["code"]:
            problems[host] = (
                f"another code of trainyard {each['trainyard']} there ({each['code']}) than here "
                f"({here['code']}): install the same"
            )
        elif each["torch"] == "not installed":
            problems[host] = "torch is not installed there"
        elif each["torch"] != torch:
            problems[host] = f"torch {each['torch']} there, {torch} on {first}: install the same"
    return problems


def as_text(problems: Mapping[str, str], total: int) -> str:
    """The problems, one line per host."""
    lines = [f"host {host}: {problem}" for host, problem in problems.items()]
    if total == 1:
        return lines[0]
    verb = "is" if len(lines) == 1 else "are"
    return "\n  ".join(
        [f"{len(lines)} of {total} hosts {verb} not ready; nothing was started", *lines]
    )
