#!/bin/sh
# `netvm bench swap`: nbdkit by nbd.ko, and under nbdfuse and a loop device, beside all other kinds of swap that this kernel has. All have their pages in
# this guest's own memory, nbdkit and netvm's lender as another process, so that they can be compared: netvm asks its lender by TCP, and then, as nbdkit,
# nobody. The clock counts instructions: beside other work on the host whoever takes longer would be interrupted more often, and look worse than it is.
# kernels: 6.12
# modules: fuse loop nbd zram? zsmalloc? ublk_drv?
# programs: netvm nbdkit nbdfuse nbd-client
# files: /usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-memory-plugin.so
# memory: 768
# clock: counted
# checks: none
# limit: 900
. /test/functions
measures
mkdir -p /tmp/groups
mount -t cgroup2 none /tmp/groups
before=$(cat /proc/swaps)

kinds="tmpfs nbdkit nbdfuse netvm-nbd netvm-loop"
[ ! -e /dev/ublk-control ] || kinds="$kinds netvm-ublk"
[ ! -e /sys/class/zram-control ] || kinds="zram $kinds"
# measure NAME KINDS [OPTION]
measure() {
    options=${3:-}
    for kind in $2; do
        options="$options --kind $kind"
    done
    netvm bench swap --size 12M --local 5M --case-ms 100 --rounds 1 $options \
        --json --svg "/results/$1.svg" >"/results/$1.json" 2>bench.log || { cat bench.log; fail "it ended"; }
    cat bench.log "/results/$1.json"
    for kind in $2; do
        bench_rows "$kind" "/results/$1.json"
    done
}
measure swap "$kinds"
measure nearby "${kinds#*nbdfuse }" --nearby
equal "swap" "$(cat /proc/swaps)" "$before"
refused pidof nbdkit nbdfuse netvm @netvm
[ ! -e /sys/block/nbd0/pid ] || fail "nbd0 is still connected"
refused grep fuse.nbdfuse /proc/mounts
echo "== done"
