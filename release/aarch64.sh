#!/usr/bin/env bash
# release/aarch64.sh FOLDER: runs the tests of the C core, from FOLDER's wheel for aarch64, on an
# emulated processor. What that needs is put into build/aarch64, and not installed.
set -euo pipefail
wheel=$(realpath "$1"/*_aarch64.whl)
cd "$(dirname "$0")/.."
here=$PWD/build/aarch64
mkdir -p "$here"

# Debian's Python 3.11 and its libraries, which Debian 12 has.
if [ ! -x "$here/root/usr/bin/python3.11" ]; then
    mkdir -p "$here/lists/partial" "$here/cache/archives/partial" "$here/packages"
    apt=(apt-get -q -o APT::Architectures::=amd64 -o APT::Architectures::=arm64
        -o Dir::State::lists="$here/lists" -o Dir::Cache="$here/cache" -o APT::Sandbox::User=root)
    "${apt[@]}" update
    libraries=(libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g
        libexpat1 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libssl3 libuuid1)
    (cd "$here/packages" && "${apt[@]}" download qemu-user-static python3.11-minimal:arm64 \
        "${libraries[@]/%/:arm64}")
    for package in "$here"/packages/*.deb; do dpkg-deb --extract "$package" "$here/root"; done
    rm -r "$here/packages" "$here/lists" "$here/cache"
fi
if [ ! -d "$here/site" ]; then
    python3 -m pip install --quiet --only-binary=:all: --python-version 3.11 --implementation cp \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
        --platform manylinux2014_aarch64 --constraint requirements.lock \
        --constraint requirements-dev.lock --target "$here/site" crc32c hypothesis numpy \
        opencv-python-headless pillow pydantic pytest pytest-timeout scikit-learn
fi

# The package of the wheel beside the tests, so that the one in the repository is not imported.
rm -rf "$here/tree"
mkdir "$here/tree"
python3 -m zipfile -e "$wheel" "$here/tree"
cp -r tests pyproject.toml "$here/tree"
cd "$here/tree"
# CI: a test that is skipped, since the core cannot be loaded say, fails.
CI=true PYTHONPATH=$here/site PYTHONDONTWRITEBYTECODE=1 \
    "$here/root/usr/bin/qemu-aarch64-static" -L "$here/root" "$here/root/usr/bin/python3.11" \
    -m pytest -p no:cacheprovider tests/data/native/test_{entropy,packed,pixels,seek}.py
