#!/bin/sh
# `netvm bench apps` beside swap of each kind, where nobody else's memory is swapped out. The programs are this machine's, and all memory is one guest's: the lender's,
# the compressed one of zram, nbdkit's, and that of the disk, an ext4 image on tmpfs, which is faster than any disk.
# kernels: 6.12
# modules: 9p 9pnet_virtio fuse loop nbd zram zsmalloc ext4 crc32c_generic
# host: read only
# memory: 3072
# clock: counted
# checks: none
# limit: 7200
. /test/functions
mkdir -p /host
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 host /host
cp "/host$BUILT/netvm" "/host$BUILT/libnetvm_preload.so" .
for folder in proc sys dev; do
    mount --rbind /$folder /host/$folder
done
for folder in tmp run; do
    mount -t tmpfs tmpfs /host/$folder
done
dd if=/dev/zero of=/host/dev/shm/image bs=1M count=640 2>/dev/null
chroot /host /sbin/mkfs.ext4 -q /dev/shm/image
mount -o loop -t ext4 /host/dev/shm/image /host/var/tmp
mkdir /host/tmp/groups
mount -t cgroup2 none /host/tmp/groups
cp netvm libnetvm_preload.so /host/tmp/
before=$(cat /proc/swaps)

# One program at a time: the first tables are there long before the last.
for app in pagerank sqlite redis join numpy-sort numpy-matmul gcc; do
    chroot /host /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp /tmp/netvm bench apps --quick --app $app --local-percent 50,25 \
        --swap zram --swap disk --swap nbdkit --svg /tmp/apps.svg
    cp /host/tmp/apps.svg "/results/$app.svg"
done
equal "swap" "$(cat /proc/swaps)" "$before"
