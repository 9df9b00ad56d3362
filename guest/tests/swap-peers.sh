#!/bin/sh
# `netvm bench swap`: nbdkit by nbd.ko, and under nbdfuse and a loop device, beside all other kinds of swap that this kernel has. All have their pages in
# this guest's own memory, nbdkit and netvm's lender as another process, so that they can be compared.
# kernels: 6.12 6.1
# modules: fuse loop nbd zram? zsmalloc? ublk_drv?
# programs: netvm nbdkit nbdfuse nbd-client
# files: /usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-memory-plugin.so
# memory: 768
# limit: 480
. /test/functions
mkdir -p /tmp/groups
mount -t cgroup2 none /tmp/groups
before=$(cat /proc/swaps)

kinds="tmpfs nbdkit nbdfuse netvm-nbd netvm-loop"
[ ! -e /dev/ublk-control ] || kinds="$kinds netvm-ublk"
[ ! -e /sys/class/zram-control ] || kinds="zram $kinds"
options=
for kind in $kinds; do
    options="$options --kind $kind"
done
netvm bench swap --size 12M --local 5M --case-ms 700 --rounds 2 $options \
    --json --plot /results/swap.svg >/results/swap.json 2>bench.log || { cat bench.log; fail "it ended"; }
cat bench.log /results/swap.json
for kind in $kinds; do
    bench_rows "$kind" /results/swap.json
done
equal "swap" "$(cat /proc/swaps)" "$before"
refused pidof nbdkit nbdfuse netvm @netvm
[ ! -e /sys/block/nbd0/pid ] || fail "nbd0 is still connected"
refused grep fuse.nbdfuse /proc/mounts
echo "== done"
