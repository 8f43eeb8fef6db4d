#!/bin/sh
# Prepare .venv, and as root Debian's packages: `setup.sh` for everything that tests use,
# `setup.sh demo` for what the demonstration uses, `setup.sh demo hdfs` with a real HDFS.
# Safe to run again, in any order.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
kinds=${*:-demo hdfs test}
begun=$(date +%s)

say() { printf 'setup: %s (%s s)\n' "$*" "$(($(date +%s) - begun))" >&2; }
wants() { case " $kinds " in *" $1 "*) true ;; *) false ;; esac; }
is_root() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }

# Of each kind's section: "# kind: why" begins it.
packages=$(for kind in $kinds; do
    sed -n "/^# $kind:/,/^# /p" tools/debian-packages.txt | grep -v '^#'
done | tr '\n' ' ')
missing=
if command -v dpkg-query >/dev/null 2>&1; then
    for package in $packages; do
        state=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
        [ "$state" = "install ok installed" ] || missing="$missing $package"
    done
fi
if [ -n "$missing" ]; then
    if is_root; then
        say "installing Debian packages:$missing"
        apt-get update -q >/dev/null
        # shellcheck disable=SC2086 # a list of names
        DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing >/dev/null
    else
        say "not root: what needs these Debian packages is left out:$missing"
    fi
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "$PYTHON is older than 3.11; name a newer one: make PYTHON=/path/to/python3.11 ..."
    exit 7
}
# Not there, or left half made.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "making a virtual environment"
    "$PYTHON" -m venv .venv >/dev/null || {
        say "$PYTHON cannot make virtual environments; install Debian's python3-venv"
        exit 7
    }
fi
pip() { .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "$@"; }
if wants test; then
    say "installing Python packages for the tests into .venv"
    pip -e '.[dev]'
    # These are compiled against libraries that only root can install.
    if [ "$(id -u)" = 0 ]; then
        pip -e '.[native]'
    elif ! pip -e '.[native]' >/dev/null 2>&1; then
        say "left out, for want of the libraries' headers: Kerberos for webhdfs://, pyfuse3 in a bench"
    fi
    if is_root; then
        say "building what the tests need beyond that: Kubernetes, and smaller things"
        .venv/bin/python -m tools.prepare
    fi
    # Once, here, and not in each of the processes that run tests; a fault shows again there.
    say "compiling the tests"
    PYTHONDONTWRITEBYTECODE='' .venv/bin/python -m pytest --collect-only -q >/dev/null 2>&1 || true
else
    say "installing bootseer and its Python packages into .venv"
    pip -e .
    if wants hdfs; then
        pip -e '.[webhdfs]'
    fi
fi
for kind in $kinds; do
    case $kind in
    test) touch .venv/.ready ;;
    *) touch ".venv/.ready-$kind" ;;
    esac
done
say "ready"
