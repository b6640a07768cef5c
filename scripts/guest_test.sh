#!/usr/bin/env bash
# Proves the memory placement on real multi-node memory: boots a Linux guest under software emulation with two nodes
# with a CPU each and one with memory alone (as a CXL expander appears), and runs tests/guest/numa_test.cpp in it.
# Exit 0: every check passed. 1: not so. 77: it did not run, and the last line says why; that is not a pass.
# HYBRIDGEN_GUEST_KERNEL names the kernel image; default: the newest of /boot that can be read.
set -euo pipefail

PACKAGES="qemu-system-x86 linux-image-cloud-amd64 busybox-static cpio"
if [ "${1:-}" = --packages ]; then
    echo "$PACKAGES"
    exit 0
fi

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
LIMIT_S="${HYBRIDGEN_GUEST_LIMIT_S:-120}"
skip() {
    echo "guest_test: skipped: $1 (on Debian: apt-get install $PACKAGES g++)"
    exit 77
}
fail() {
    echo "guest_test: FAILED: $1" >&2
    exit 1
}

for program in qemu-system-x86_64 busybox cpio g++ timeout; do
    command -v "$program" >/dev/null || skip "$program is not installed"
done
kernel="${HYBRIDGEN_GUEST_KERNEL:-}"
if [ -z "$kernel" ]; then
    for image in $(printf '%s\n' /boot/vmlinuz-*-amd64 | sort -V); do
        if [ -r "$image" ]; then kernel="$image"; fi
    done
fi
[ -r "$kernel" ] || skip "no kernel image that can be read${kernel:+: $kernel}"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/root/{bin,dev,proc,sys}
g++ -std=c++17 -O1 -Wall -Wextra -Werror -static -pthread -I"$ROOT/cpp_ext" \
    "$ROOT/tests/guest/numa_test.cpp" "$ROOT/cpp_ext/host_memory.cpp" -o "$work/root/bin/numa_test" ||
    fail "the test program does not compile"
cp "$(command -v busybox)" "$work/root/bin/busybox"
cat >"$work/root/init" <<'EOT'
#!/bin/busybox sh
export PATH=/bin
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
numa_test
echo "guest: exit $?"
busybox poweroff -f
EOT
chmod +x "$work/root/init"
(cd "$work/root" && find . | cpio --quiet -o -H newc) >"$work/initramfs"

# Node 1, not 0, is the one closest to node 2. -no-reboot: a kernel that panics ends the run.
status=0
timeout --kill-after=5 "$LIMIT_S" qemu-system-x86_64 -accel tcg -cpu max -smp 2 -m 768M \
    -object memory-backend-ram,id=m0,size=256M -numa node,nodeid=0,cpus=0,memdev=m0 \
    -object memory-backend-ram,id=m1,size=256M -numa node,nodeid=1,cpus=1,memdev=m1 \
    -object memory-backend-ram,id=m2,size=256M -numa node,nodeid=2,memdev=m2 \
    -numa dist,src=0,dst=1,val=21 -numa dist,src=0,dst=2,val=24 -numa dist,src=1,dst=2,val=17 \
    -kernel "$kernel" -initrd "$work/initramfs" -append "console=ttyS0 quiet panic=-1" \
    -nodefaults -nic none -display none -serial stdio -no-reboot </dev/null >"$work/console" 2>&1 || status=$?
tr -d '\r' <"$work/console" >"$work/log"
grep -E '^guest: ' "$work/log" || true

# explain REASON: with the kernel's or qemu's own last words.
explain() {
    grep -vE '^guest: ' "$work/log" | tail -n 20 >&2 || true
    fail "$1"
}
[ "$status" -ne 124 ] && [ "$status" -ne 137 ] || explain "the guest did not end within $LIMIT_S s"
[ "$status" -eq 0 ] || explain "qemu ended with status $status"
grep -qx 'guest: exit 0' "$work/log" || explain "a check failed, or the test program did not end (above)"
grep -qE '^guest: [0-9]+ checks, 0 failed$' "$work/log" || explain "the guest's summary is missing"
# Nothing was left out: every policy, on both kinds of pages.
for pages in huge small; do
    for policy in local semantic inverse interleave; do
        for part in keys values; do
            grep -q "^guest: PASS $pages pages, $policy, $part: " "$work/log" || explain "no result for $policy, $part"
        done
    done
done
[ "$(grep -c '^guest: PASS bind after touch, ' "$work/log")" -eq 4 ] || explain "no result for bind after touch"
echo "guest_test: passed ($kernel)"
