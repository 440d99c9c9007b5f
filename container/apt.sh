#!/bin/sh
# Debian packages for a layer of an image: apt.sh [--python] [PACKAGE...]. --python adds what the
# image's python3 lacks for installing and compiling packages: itself, pip, venv, its headers.
# Where all of them are there no archive is asked, and the layer is empty. What apt and dpkg write
# beside the packages (lists, caches, logs, the machine's id) is removed in the same layer: it has
# times in it, and the same packages must give the same layer twice.
set -eu

lacks() {
    ! python3 -I -c "$1" 2>/dev/null
}

if [ "${1-}" = --python ]; then
    shift
    if lacks 'pass'; then
        set -- "$@" python3
    fi
    if lacks 'import pip'; then
        set -- "$@" python3-pip
    fi
    if lacks 'import venv'; then
        set -- "$@" python3-venv
    fi
    if lacks 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'; then
        set -- "$@" python3-dev
    fi
fi
left=$#
while [ "$left" -gt 0 ]; do
    package=$1
    shift
    left=$((left - 1))
    # shellcheck disable=SC2016  # dpkg-query's own variable
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    if [ "$state" != installed ]; then
        set -- "$@" "$package"
    fi
done
if [ $# -eq 0 ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "apt.sh: this base image has no apt-get, and lacks: $*. Take one of Debian or Ubuntu" \
        "as BASE_IMAGE, or one that has them." >&2
    exit 3
fi

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends "$@"
apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /var/lib/dpkg/*-old \
    /var/cache/debconf/*-old /var/cache/ldconfig/aux-cache
if [ -e /etc/machine-id ]; then
    : >/etc/machine-id # systemd fills an empty one at its first start; an image has none
fi
