#!/bin/sh
# Lent memory as a disk of the kernel: one guest lends, the other has it behind nbd.ko, with a file system on it.
# kernels: 6.1+6.12 6.12+6.1
# modules: nbd ext4 crc32c_generic
# programs: netvm nbd-client mkfs.ext4 e2fsck
# limit: 240
. /test/functions
if [ "$ROLE" = first ]; then
    netvm secret new key
    netvm lend --size 96M --listen 10.7.0.1:7070 --secret key >lend.log 2>&1 &
    lender=$!
    wait_until 30 grep -q 'lending' lend.log
    # The other one gets the secret, and has used the memory when it answers.
    nc -l -p 7000 <key
    nc -l -p 7001 >told
    equal "what the other guest says" "$(cat told)" done
    netvm status 10.7.0.1:7070 --secret key
    kill $lender
    wait $lender || true
    cat lend.log
    exit
fi

disk=/dev/nbd0
umask 077
wait_until 90 sh -c 'nc 10.7.0.1 7000 </dev/null >key 2>/dev/null && [ -s key ]'
netvm nbd --size 64M --lender 10.7.0.1:7070 --secret key >nbd.log 2>&1 &
server=$!
wait_until 30 grep -q serving nbd.log
attach() {
    nbd-client -N "" "$@" 127.0.0.1 $disk 2>/dev/null
    wait_until 10 sh -c '[ "$(cat /sys/block/nbd0/size)" = 131072 ]'
}

echo "== one connection"
attach
cat /sys/block/nbd0/queue/logical_block_size
mkfs.ext4 -q -E nodiscard $disk
mkdir -p /tmp/disk
mount -t ext4 $disk /tmp/disk
dd if=/dev/urandom of=/tmp/disk/random bs=64k count=320 2>/dev/null
sum=$(sha256sum </tmp/disk/random)
sync
umount /tmp/disk
refused mount -t ext4 -o ro $disk /tmp/nowhere 2>/dev/null
nbd-client -d $disk
wait_until 10 sh -c '[ "$(cat /sys/block/nbd0/size)" = 0 ]'

echo "== the same disk, with four connections"
attach -C 4
e2fsck -fn $disk
mount -t ext4 -o discard $disk /tmp/disk
equal checksum "$(sha256sum </tmp/disk/random)" "$sum"
copies=
for copy in 1 2 3; do
    dd if=/tmp/disk/random of=/tmp/disk/copy$copy bs=64k count=100 2>/dev/null &
    copies="$copies $!"
done
wait $copies
sync
echo 3 >/proc/sys/vm/drop_caches
for copy in 1 2 3; do
    cmp -n 6553600 /tmp/disk/random /tmp/disk/copy$copy
done
rm /tmp/disk/copy*
umount /tmp/disk
e2fsck -fn $disk

echo "== the server goes while the disk is in use"
mount -t ext4 -o ro $disk /tmp/disk
kill -9 $server
echo 3 >/proc/sys/vm/drop_caches
refused sh -c 'cat /tmp/disk/random >/dev/null' 2>/dev/null
umount /tmp/disk
nbd-client -d $disk || true
cat nbd.log
told() { echo done | nc 10.7.0.1 7001; }
wait_until 10 told
