#!/usr/bin/env bash
# The extension's tests under AddressSanitizer and UndefinedBehaviorSanitizer, and under ThreadSanitizer.
# Each runs in a copy of the checkout under build/, so that the extension in use stays as it is.
#   bash scripts/sanitize_cpu.sh [address|thread]        (both if none is named)
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT="$PWD"
PYTHON="${HYBRIDGEN_PYTHON:-$ROOT/.venv/bin/python}"
[ -x "$PYTHON" ] || PYTHON=python3
status=0

check() { # name, compiler flags, library to load first, tests
    local name="$1" flags="$2" library="$3" tree="$ROOT/build/sanitize-$1"
    shift 3
    rm -rf "$tree" && mkdir -p "$tree"
    git ls-files --cached --others --exclude-standard -z | tar --null --files-from=- -c | tar -x -C "$tree"
    echo "sanitize_cpu: $name"
    (
        cd "$tree"
        CFLAGS="$flags -g -O1 -fno-omit-frame-pointer" LDFLAGS="$flags" \
            "$PYTHON" setup.py build_ext --inplace >build.log 2>&1 || { tail -n 20 build.log >&2; exit 1; }
        # Python itself leaks and is not instrumented; its allocator would hide overflows.
        LD_PRELOAD="$(gcc -print-file-name="$library") $(gcc -print-file-name=libstdc++.so)" PYTHONMALLOC=malloc \
            ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
            TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1 \
            "$PYTHON" -m pytest -p no:cacheprovider "$@"
    ) || status=1
}

wanted="${1:-all}"
case "$wanted" in
    all | address | thread) ;;
    *) echo "sanitize_cpu: $wanted: must be address, thread or nothing" >&2; exit 2 ;;
esac
if [ "$wanted" != thread ]; then
    check address "-fsanitize=address,undefined -fno-sanitize-recover=undefined" libasan.so \
        tests/kernels --ignore=tests/kernels/test_triton_kernels.py
fi
if [ "$wanted" != address ]; then
    # ThreadSanitizer does not follow a process with threads through a fork.
    check thread "-fsanitize=thread" libtsan.so tests/kernels/test_scan_worker.py tests/kernels/test_attention_jobs.py \
        --deselect tests/kernels/test_scan_worker.py::test_child_of_a_fork_does_not_hang
fi
exit $status
