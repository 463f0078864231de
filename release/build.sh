#!/usr/bin/env bash
# release/build.sh MACHINE COMPILER FOLDER: a wheel for Linux on x86_64 or aarch64, and the source
# distribution that it was built of. The Makefile's `wheel` and `wheel-aarch64` run it.
set -euo pipefail
machine=$1 compiler=$2 folder=$3
command -v "$compiler" >/dev/null || {
    echo "$compiler not found: apt install gcc, or gcc-aarch64-linux-gnu for aarch64" >&2
    exit 1
}
raw=$folder/raw-$machine
rm -rf "$raw"
mkdir -p "$folder"
rm -f "$folder"/*_"$machine".whl

# Python's headers on this machine serve for the other one too: C types on both have the same sizes.
# LDSHARED leaves out the run path that some builds of Python write into extensions.
_PYTHON_HOST_PLATFORM=linux-$machine CC=$compiler LDSHARED="$compiler -shared" \
    python -m build --no-isolation --outdir "$raw" .
python release/contents.py "$machine" "$raw"/*.whl "$raw"/*.tar.gz
auditwheel repair --plat auto --only-plat --wheel-dir "$raw/repaired" "$raw"/*.whl
wheel=$(echo "$raw"/repaired/*.whl)
[[ $wheel == *manylinux_2_17_$machine.whl ]] || {
    echo "${wheel##*/}: needs a newer glibc than 2.17, or a library beside it: auditwheel show tells" >&2
    exit 1
}
mv "$wheel" "$raw"/*.tar.gz "$folder"
rm -r "$raw"
ls -l "$folder"
