#!/bin/bash
# Says on stderr which versions an image has, and becomes its arguments. What is missing is said as
# missing and stops nothing. TRAINKIT_IMAGE_QUIET=1 leaves the versions out.
#
# Runs as any user: one without a home that can be written to gets one in /tmp, as trainkit's own
# start of a container gives it, and one without a name gets one (getpass, which torch asks for its
# caches, fails without).
set -u

here=${BASH_SOURCE[0]%/*}

line() {
    printf '  %-10s %s\n' "$1" "${2:-not in this image}" >&2
}

libfabric() {
    local name version
    # fi_info --version: "fi_info: 1.22.0amzn4.0", a line of libfabric's, one of its interface
    while read -r name version; do
        if [ "$name" = libfabric: ]; then
            echo "$version"
            return
        fi
    done < <(fi_info --version 2>/dev/null)
}

versions() {
    local name version
    echo "trainkit's image:" >&2
    while IFS=$'\t' read -r name version; do
        line "$name" "$version"
    done < <(python3 -I "$here/versions.py" 2>/dev/null || printf 'python\t\n')
    line libfabric "$(libfabric)"
    line commit "${TRAINKIT_IMAGE_REVISION-}"
}

if [ ! -w "${HOME:-/nonexistent}" ]; then
    export HOME=/tmp/home-$UID
    mkdir -p -m 700 "$HOME"
    if [ ! -O "$HOME" ]; then # in a /tmp of the host's: programs would run what lies there
        echo "entrypoint.sh: $HOME is not of user $UID: remove it, or give another HOME" >&2
        exit 1
    fi
fi
if [ -z "${USER-}" ]; then
    USER=$(id -un 2>/dev/null) || USER=user-$UID
    export USER
fi
if [ "${TRAINKIT_IMAGE_QUIET-}" != 1 ]; then
    versions
fi
if [ $# -eq 0 ]; then
    set -- bash
fi
exec "$@"
