#!/bin/sh
# Installs the services that tests/services drives for real. Needs Debian or Ubuntu and root.
set -eu
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || missing=nginx-light
command -v openssl >/dev/null || missing="${missing:-} openssl"
command -v tc >/dev/null || [ -x /usr/sbin/tc ] || missing="${missing:-} iproute2"
command -v slurmd >/dev/null || [ -x /usr/sbin/slurmd ] ||
	missing="${missing:-} slurmctld slurmd slurm-client munge"
command -v mpirun >/dev/null || missing="${missing:-} openmpi-bin"
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || missing="${missing:-} openssh-server"
command -v ssh >/dev/null || missing="${missing:-} openssh-client"
command -v rsync >/dev/null || missing="${missing:-} rsync"
# The C extension: a compiler, one with libFuzzer, and ARM's with an emulator for its path.
command -v gcc >/dev/null || missing="${missing:-} gcc libc6-dev"
command -v clang-16 >/dev/null || missing="${missing:-} clang-16 libclang-rt-16-dev"
command -v aarch64-linux-gnu-gcc >/dev/null ||
	missing="${missing:-} gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
command -v qemu-aarch64 >/dev/null || missing="${missing:-} qemu-user"
# Reports and the documentation are looked at in a real browser.
command -v chromium >/dev/null || missing="${missing:-} chromium"
[ -n "${missing:-}" ] || exit 0
[ "$(id -u)" = 0 ] || { echo "missing: $missing; as root: apt-get install $missing"; exit 1; }
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d # that nothing is started: the tests do it themselves
if [ ! -e $policy ]; then
	trap 'rm -f $policy' EXIT
	printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy
fi
# shellcheck disable=SC2086
apt-get install -qq -y $missing >/dev/null 2>&1 || { apt-get update -qq && apt-get install -qq -y $missing >/dev/null; }
