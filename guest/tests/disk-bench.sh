#!/bin/sh
# `netvm bench block --device`: lent memory behind ublk and behind nbd.ko, side by side.
# kernels: 6.12+6.12
# modules: ublk_drv nbd
# programs: netvm nbd-client
# memory: 256
# checks: none
# limit: 300
. /test/functions
measures
first_lends 96M
# disks LENDER...: the same memory as /dev/ublkb0 and as /dev/nbd0.
disks() {
    # What the last ones said is no answer.
    : >ublk.log
    : >nbd.log
    netvm ublk --size 16M "$@" >ublk.log 2>&1 &
    ublk=$!
    netvm nbd --size 16M "$@" >nbd.log 2>&1 &
    nbd=$!
    wait_until 30 grep -q serving ublk.log
    wait_until 30 grep -q serving nbd.log
    nbd-client -N "" 127.0.0.1 /dev/nbd0 2>/dev/null
    wait_until 10 is_there
}
is_there() { [ "$(cat /sys/block/nbd0/size)" = $((16 * 2048)) ]; }
end_disks() {
    nbd-client -d /dev/nbd0
    kill $nbd
    kill $ublk
    wait $ublk
}
# median ROW DISK FILE
median() {
    grep "\"case\":\"$1\"" "$3" | grep "\"link\":\"$2\"" | sed -n 's/.*"median":\([0-9]*\.[0-9]*\).*/\1/p'
}
# measure NAME: all rows, and ublk beside nbd.ko
measure() {
    netvm bench block --quick --device /dev/ublkb0 --device /dev/nbd0 --overwrite --case-ms 400 --json >/results/$1.json
    cat /results/$1.json
    for row in disk-4k-qd1 disk-4k-qd1-write disk-4k-qd16 disk-4k-qd16-write disk-128k-qd4; do
        u=$(median $row ublkb0 /results/$1.json)
        n=$(median $row nbd0 /results/$1.json)
        [ "$u" ] && [ "$n" ] || fail "no $row"
        echo "$1 $row: ublk $u, nbd.ko $n" | tee -a /results/ratios
    done
}

disks --lender 10.7.0.1:7070 --secret key
echo "== what is refused"
refused netvm bench block --device /dev/nbd0 2>refusal
grep -q overwrite refusal
refused netvm bench block --device /dev/nbd0 --overwrite 2>refusal
grep -q 'are needed' refusal
refused netvm bench block --quick --device /dev/nbd1 --overwrite
refused netvm bench block --quick --device /tmp/key --overwrite 2>refusal
grep -q 'no block device' refusal

echo "== what is measured"
measure disk
netvm bench block --quick --device /dev/ublkb0 --device /dev/nbd0 --overwrite --rounds 1 --svg /results/disk.svg
end_disks

echo "== with a lender on this machine: what the kernel's side costs"
netvm lend --size 48M --listen unix:/tmp/lender >here.log 2>&1 &
wait_until 30 grep -q lending here.log
disks --lender unix:/tmp/lender
measure here
end_disks
order obeyed=all
echo "== done"
