"""An environment for each peer, beside the benchmark's own, whose packages it sees.

So torch is installed once (5 GB). What a peer wants in another version lies in its own
environment, where Python finds it first. torchvision, timm and webdataset are in the main one.

FFCV is compiled: it needs a compiler, pkg-config, and OpenCV's and libturbojpeg's headers (Debian:
libopencv-core-dev, libopencv-imgproc-dev, libturbojpeg0-dev). SPDL decodes by FFmpeg's libraries
(Debian: libavfilter8, libavdevice59).
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

_REQUIREMENTS = Path(__file__).parent / "requirements"
PEERS = tuple(sorted(path.stem for path in _REQUIREMENTS.glob("*.txt")))
MAIN = "main"


def python_of(folder: Path, name: str) -> Path | None:
    """The interpreter of an environment; None if it has not been made."""
    if name == MAIN:
        return Path(sys.executable)
    python = folder / "environments" / name / "bin" / "python"
    return python if (python.parent / "ready").exists() else None


def install(folder: Path, name: str, requirements: Path = _REQUIREMENTS) -> str | None:
    """Make an environment of a file of requirements; the reason if it cannot be."""
    if python_of(folder, name) is not None:
        return None
    place = (folder / "environments" / name).absolute()
    venv.create(place, with_pip=False, clear=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = place / "lib" / version / "site-packages"
    (packages / "main.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install"]
    words += ["--quiet", "--disable-pip-version-check", "--no-build-isolation"]
    words += ["--requirement", str(requirements / f"{name}.txt")]
    environ = os.environ | (_opencv(folder) if name == "ffcv" else {})
    # First the peer itself, though the main environment may have a part of it.
    for more in (["--no-deps", "--ignore-installed"], []):
        result = subprocess.run([*words, *more], env=environ, stderr=subprocess.PIPE, text=True)
        if result.returncode:
            lines = [line.strip() for line in result.stderr.splitlines() if "rror" in line]
            return lines[-1] if lines else f"pip ended with {result.returncode}"
    (place / "bin" / "ready").touch()
    return None


def _opencv(folder: Path) -> dict[str, str]:
    """Where pkg-config finds the two modules of OpenCV that FFCV uses, without all the others."""
    if subprocess.run(["pkg-config", "--exists", "opencv4"]).returncode == 0:
        return {}
    place = (folder / "opencv").absolute()
    (place / "opencv2").mkdir(parents=True, exist_ok=True)
    headers = "#include <opencv2/core.hpp>\n#include <opencv2/imgproc.hpp>\n"
    (place / "opencv2" / "opencv.hpp").write_text(headers)
    (place / "opencv4.pc").write_text(
        "Name: opencv4\nDescription: core and imgproc\nVersion: 4\n"
        f"Cflags: -I{place} -I/usr/include/opencv4\nLibs: -lopencv_core -lopencv_imgproc\n"
    )
    return {"PKG_CONFIG_PATH": str(place)}
