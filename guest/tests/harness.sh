#!/bin/sh
# What comes back of a guest: output, status, files. See harness.check.
# kernels: 6.1 6.12 6.12-arm64
# ends: status 7
. /test/functions
equal "working folder" "$(pwd)" /tmp
grep -q virtio_blk /proc/modules
# Memory is checked where nothing else is said.
grep -q 'page_poison=1 slub_debug=FZP init_on_alloc=1' /proc/cmdline
uname -m -r
echo "on standard error" >&2
dd if=/dev/urandom of=/results/random bs=1k count=300 2>/dev/null
sha256sum </results/random | cut -d' ' -f1 >/results/sum
exit 7
