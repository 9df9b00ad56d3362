#!/bin/sh
# `netvm bench block --device`: lent memory behind ublk and behind nbd.ko, side by side.
# kernels: 6.12+6.12
# modules: ublk_drv nbd
# programs: netvm nbd-client
# memory: 256
# limit: 300
. /test/functions
if [ "$ROLE" = first ]; then
    netvm secret new key
    lender a 7070 96M
    obey
    exit
fi

get_secret
netvm ublk --size 16M --lender 10.7.0.1:7070 --secret key >ublk.log 2>&1 &
ublk=$!
netvm nbd --size 16M --lender 10.7.0.1:7070 --secret key >nbd.log 2>&1 &
nbd=$!
wait_until 30 grep -q serving ublk.log
wait_until 30 grep -q serving nbd.log
nbd-client -N "" 127.0.0.1 /dev/nbd0 2>/dev/null
is_there() { [ "$(cat /sys/block/nbd0/size)" = $((16 * 2048)) ]; }
wait_until 10 is_there

echo "== what is refused"
refused netvm bench block --device /dev/nbd0 2>refusal
grep -q overwrite refusal
refused netvm bench block --device /dev/nbd0 --overwrite 2>refusal
grep -q 'are needed' refusal
refused netvm bench block --quick --device /dev/nbd1 --overwrite
refused netvm bench block --quick --device /tmp/key --overwrite 2>refusal
grep -q 'no block device' refusal

echo "== what is measured"
netvm bench block --quick --device /dev/ublkb0 --device /dev/nbd0 --overwrite --case-ms 1500 --json >/results/disk.json
netvm bench block --quick --device /dev/ublkb0 --device /dev/nbd0 --overwrite --plot /results/disk.svg
cat /results/disk.json
for row in disk-4k-qd1 disk-4k-qd1-write disk-4k-qd16 disk-4k-qd16-write disk-128k-qd4; do
    for disk in ublkb0 nbd0; do
        grep "\"case\":\"$row\"" /results/disk.json | grep "\"link\":\"$disk\"" | grep -q '"median":[0-9]*\.[0-9]' || fail "no $row of $disk"
    done
done

nbd-client -d /dev/nbd0
kill $nbd
kill $ublk
wait $ublk
order obeyed=all
echo "== done"
