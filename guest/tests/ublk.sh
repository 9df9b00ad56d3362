#!/bin/sh
# Lent memory as a ublk block device, lent by another guest: a file system, checksums, several queues, flush, discard, write zeroes, a
# lender that is lost, the server ended and killed.
# kernels: 6.12+6.12
# modules: ublk_drv ext4 crc32c_generic
# programs: netvm mkfs.ext4 e2fsck
# memory: 384 256
# limit: 200
. /test/functions
first_lends 112M 112M
disk=/dev/ublkb0
gone() { [ ! -e $disk ] && [ ! -e /dev/ublkc0 ]; }
serve() {
    # What the last one said is no answer.
    : >ublk.log
    netvm ublk --secret key "$@" >ublk.log 2>&1 &
    server=$!
    wait_until 30 grep -q serving ublk.log
    cat ublk.log
    wait_until 5 [ -b $disk ]
}
a="--lender 10.7.0.1:7070" b="--lender 10.7.0.1:7071"
used() { netvm status --secret key --json 10.7.0.1:"$1" | grep -o '"resident_bytes":[0-9]*' | cut -d: -f2; }
nothing_used() { [ "$(used "$1")" = 0 ] || { echo "$(used "$1") bytes are used"; false; }; }
queue() { cat "/sys/block/ublkb0/queue/$1"; }
dd if=/dev/urandom of=random bs=64k count=128 2>/dev/null
sum=$(sha256sum <random)

echo "== what is not possible"
refused netvm ublk --secret key --size 0 $a
refused netvm ublk --secret key --size 64M $a --replicas 2
refused netvm ublk --secret key --size 64M $a --queues 33
refused netvm ublk --secret key --size 64M $a --queues 32 --depth 64
refused netvm ublk --secret key --size 1G $a
gone || fail "there is a device"

echo "== a file system, two queues"
serve --size 64M $a --queues 2 --depth 16
equal "size" "$(cat /sys/block/ublkb0/size)" $((64 * 2048))
equal "write cache" "$(queue write_cache)" "write back"
equal "FUA" "$(queue fua)" 1
equal "discard" "$(queue discard_granularity)" 4096
[ "$(queue write_zeroes_max_bytes)" -gt 0 ] || fail "it cannot write zeroes"
equal "requests" "$(queue max_sectors_kb)" 128
cmp -n $((4 << 20)) $disk /dev/zero
wait_until 5 nothing_used 7070
mkfs.ext4 -q -E nodiscard $disk
mkdir -p /tmp/disk
mount -t ext4 -o discard $disk /tmp/disk
cp random /tmp/disk/random
sync
copies=
for copy in 1 2 3; do
    dd if=random of=/tmp/disk/copy$copy bs=64k count=100 2>/dev/null &
    copies="$copies $!"
done
wait $copies
sync
echo 3 >/proc/sys/vm/drop_caches
equal checksum "$(sha256sum </tmp/disk/random)" "$sum"
for copy in 1 2 3; do
    cmp -n 6553600 random /tmp/disk/copy$copy
done
before=$(used 7070)
rm /tmp/disk/copy*
sync
# The journal's next commit discards what was removed.
given_back() { sync; [ "$(used 7070)" -lt $((before - (12 << 20))) ]; }
wait_until 20 given_back
umount /tmp/disk
e2fsck -fn $disk

echo "== bytes, zeroes, parts of blocks"
dd if=random of=$disk bs=64k count=64 oflag=direct 2>/dev/null
blkdiscard_zeroes() { fallocate -p -o "$1" -l "$2" $disk 2>/dev/null || dd if=/dev/zero of=$disk bs=1 seek="$1" count="$2" conv=notrunc 2>/dev/null; }
dd if=random of=$disk bs=512 skip=3 seek=9001 count=7 oflag=direct conv=notrunc 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
dd if=$disk bs=512 skip=9001 count=7 2>/dev/null | cmp -n 3584 - random 0 1536
dd if=$disk bs=512 skip=9008 count=1 2>/dev/null | cmp -n 512 - /dev/zero
cmp -n $((4 << 20)) $disk random
blkdiscard_zeroes 65536 131072
echo 3 >/proc/sys/vm/drop_caches
dd if=$disk bs=64k skip=1 count=2 2>/dev/null | cmp -n 131072 - /dev/zero
dd if=$disk bs=64k skip=3 count=5 2>/dev/null | cmp -n 327680 - random 0 196608

echo "== ended"
kill -TERM $server
wait $server
wait_until 20 gone
wait_until 10 nothing_used 7070
refused pidof @netvm

echo "== one of two lenders is lost"
serve --size 32M $a $b --replicas 2
dd if=random of=$disk bs=64k oflag=direct 2>/dev/null
order 'kill -9 $b'
echo 3 >/proc/sys/vm/drop_caches
equal checksum "$(head -c 8388608 $disk | sha256sum)" "$sum"
dd if=random of=$disk bs=64k seek=100 count=50 oflag=direct conv=notrunc 2>/dev/null
wait_until 10 grep -q 'lost lender 10.7.0.1:7071' ublk.log

echo "== ended while a file system is mounted"
mkfs.ext4 -q -E nodiscard $disk
mount -t ext4 $disk /tmp/disk
echo something >/tmp/disk/file
kill -TERM $server
wait $server
umount /tmp/disk
wait_until 20 gone

echo "== killed while a file system is mounted"
serve --size 32M $a
mkfs.ext4 -q -E nodiscard $disk
mount -t ext4 $disk /tmp/disk
cp random /tmp/disk/random
sync
kill -9 $server
echo 3 >/proc/sys/vm/drop_caches
refused sh -c 'cat /tmp/disk/random >/dev/null' 2>/dev/null
umount /tmp/disk
wait_until 20 gone
refused pidof @netvm

echo "== killed while it reads and writes"
serve --size 32M $a
dd if=/dev/zero of=$disk bs=64k count=500 oflag=direct 2>/dev/null &
writer=$!
while :; do cat $disk >/dev/null || break; echo 3 >/proc/sys/vm/drop_caches; done 2>/dev/null &
reader=$!
sleep 1
kill -9 $server
wait $writer || true
wait $reader
wait_until 20 gone

echo "== the only lender is lost"
serve --size 32M $a
dd if=random of=$disk bs=64k count=100 oflag=direct 2>/dev/null
order 'kill -9 $a'
wait_until 10 grep -q 'nothing is left: reads of what was written fail' ublk.log
refused dd if=$disk of=/dev/null bs=64k count=100 iflag=direct 2>/dev/null
kill -TERM $server
wait $server
wait_until 20 gone
order obeyed=all
echo "== done"
