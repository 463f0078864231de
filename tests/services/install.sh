#!/bin/sh
# Installs the services that tests/services drives for real. Needs Debian or Ubuntu and root.
set -eu
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || missing=nginx-light
command -v openssl >/dev/null || missing="${missing:-} openssl"
command -v tc >/dev/null || [ -x /usr/sbin/tc ] || missing="${missing:-} iproute2"
[ -n "${missing:-}" ] || exit 0
[ "$(id -u)" = 0 ] || { echo "missing: $missing; as root: apt-get install $missing"; exit 1; }
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086
apt-get install -qq -y $missing >/dev/null 2>&1 || { apt-get update -qq && apt-get install -qq -y $missing >/dev/null; }
