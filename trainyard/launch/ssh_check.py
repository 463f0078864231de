"""What is wrong with a host, in one line that says what to do."""

import re
from collections.abc import Mapping, Sequence

NO_FOLDER, NO_PYTHON = 81, 82
"""Exit codes of the script that starts the agent."""
_SSH_FAILED = 255
_LOGIN = (
    ("Permission denied", "login refused: your public key is not in its authorized_keys"),
    (
        "Could not resolve hostname",
        "unknown host: no name service nor ssh config knows it",
    ),
    (
        "Host key verification failed",
        "its host key is not known here: log in by hand once",
    ),
    ("Connection refused", "nothing listens at its ssh port"),
    ("timed out|not responding|No route|unreachable", "it does not answer"),
)
_NO_MODULE = re.compile(r"No module named '?trainyard|Error while finding module.*trainyard")


def why_not(code: int, said: Sequence[str], *, folder: str, python: str) -> str:
    """Why no agent runs there: by the exit code of ssh, and what it wrote to stderr."""
    last = said[-1].strip() if said else ""
    if code == NO_FOLDER:
        return f"there is no directory {folder} there: name it by --folder, or copy this by --sync"
    if code == NO_PYTHON:
        return f"there is no {python} there: name its Python by --python"
    if code == _SSH_FAILED:
        known = (text for words, text in _LOGIN if re.search(words, " ".join(said)))
        return f"{next(known, 'ssh failed')} ({last or 'ssh says nothing'})"
    if _NO_MODULE.search(" ".join(said)):
        return f"{python} there has no such trainyard: install it, or name another Python"
    return f"{python} there ended with exit code {code}: {last or 'it says nothing'}"


def why_gone(code: int, said: Sequence[str]) -> str:
    """Why a connection has ended that was in use."""
    last = said[-1].strip() if said else "connection closed"
    if code == _SSH_FAILED:
        return last
    return f"its agent ended with exit code {code} ({last})"


def differences(facts: Mapping[str, Mapping[str, str]], here: Mapping[str, str]) -> dict[str, str]:
    """What hosts have that do not have the same code as this one, and torch as the first."""
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
    """One line each."""
    lines = [f"host {host}: {problem}" for host, problem in problems.items()]
    if total == 1:
        return lines[0]
    verb = "is" if len(lines) == 1 else "are"
    return "\n  ".join(
        [f"{len(lines)} of {total} hosts {verb} not ready; nothing was started", *lines]
    )
