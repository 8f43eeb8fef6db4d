#!/bin/sh
# Prepare .venv, and as root the Debian packages that the tests use. Safe to run again.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

say() { printf 'setup: %s\n' "$*" >&2; }

packages=$(grep -v '^#' tools/debian-packages.txt | tr '\n' ' ')
missing=
if command -v dpkg-query >/dev/null 2>&1; then
    for package in $packages; do
        state=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
        [ "$state" = "install ok installed" ] || missing="$missing $package"
    done
fi
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "installing Debian packages:$missing"
        apt-get update -q >/dev/null
        # shellcheck disable=SC2086 # a list of names
        DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing >/dev/null
    else
        say "not root: tests that need these Debian packages are left out:$missing"
    fi
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "$PYTHON is older than 3.11; name a newer one: make PYTHON=/path/to/python3.11 ..."
    exit 7
}
# Not there, or left half made.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$PYTHON" -m venv .venv >/dev/null || {
        say "$PYTHON cannot make virtual environments; install Debian's python3-venv"
        exit 7
    }
fi
say "installing Python packages into .venv"
pip() { .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "$@"; }
pip -e '.[dev]'
# These are compiled against libraries that only root can install.
if [ "$(id -u)" = 0 ]; then
    pip -e '.[native]'
elif ! pip -e '.[native]' >/dev/null 2>&1; then
    say "left out, for want of the libraries' headers: Kerberos for webhdfs://, pyfuse3 in a bench"
fi
touch .venv/.ready
