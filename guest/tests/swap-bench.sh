#!/bin/sh
# `netvm bench swap`: each kind of swap that this kernel has, with lent memory of another guest. Everything is as it was afterwards.
# kernels: 6.12+6.12 6.1+6.1
# modules: fuse loop nbd zram? zsmalloc? ext4 crc32c_generic ublk_drv?
# programs: netvm mkfs.ext4
# memory: 256 384
# checks: none
# limit: 480
. /test/functions
measures
first_lends 96M
mkdir -p /tmp/groups /var/tmp
mount -t cgroup2 none /tmp/groups
# A disk, as far as there is one here.
dd if=/dev/zero of=/dev/shm/image bs=1M count=80 2>/dev/null
mkfs.ext4 -q /dev/shm/image
mount -o loop -t ext4 /dev/shm/image /var/tmp

echo "== what is refused"
refused netvm bench swap --size 8M --local 8M 2>refusal
grep -q 'must be larger than' refusal
refused netvm bench swap --size 8G --local 1M 2>refusal
grep -q 'MiB of free memory' refusal

echo "== what is measured"
means="netvm-nbd netvm-loop"
[ ! -e /dev/ublk-control ] || means="netvm-ublk netvm-nbd"
kinds="disk tmpfs $means"
[ ! -e /sys/class/zram-control ] || kinds="zram $kinds"
options=
for kind in $kinds; do
    options="$options --kind $kind"
done
before=$(cat /proc/swaps)
netvm bench swap --size 12M --local 5M --case-ms 150 --rounds 1 $options --lender 10.7.0.1:7070 --secret key \
    --json --svg /results/swap.svg >/results/swap.json 2>bench.log || { cat bench.log; fail "it ended"; }
cat bench.log
cat /results/swap.json
for kind in $kinds; do
    bench_rows "$kind" /results/swap.json
done
grep -q 'netvm by' /results/swap.svg
equal "swap" "$(cat /proc/swaps)" "$before"
[ -z "$(ls /run/netvm)" ] || fail "there is $(ls /run/netvm)"
equal "groups" "$(find /tmp/groups -name 'netvm-bench*')" ""
equal "controllers" "$(cat /tmp/groups/cgroup.subtree_control)" ""

echo "== ended early"
netvm bench swap --size 12M --local 5M $options --lender 10.7.0.1:7070 --secret key >/dev/null 2>&1 &
bench=$!
in_use() { [ "$(cat /proc/swaps)" != "$before" ]; }
wait_until 30 in_use
kill -9 $bench
unused() { [ "$(cat /proc/swaps)" = "$before" ] && [ -z "$(ls /run/netvm)" ]; }
wait_until 60 unused
controlled() { [ -n "$(cat /tmp/groups/cgroup.subtree_control)" ]; }
wait_until 10 eval '! controlled'
order obeyed=all
echo "== done"
