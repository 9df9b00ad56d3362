#!/bin/sh
# `netvm bench fault --walks` beside zram and a disk that takes no time, by instructions, which come out the same on a busy host: one CPU, a lender's memory at
# hand, faults served by the program's threads and by the pager's.
# kernels: 6.12
# modules: 9p 9pnet_virtio loop zram zsmalloc ext4 crc32c_generic
# host: read only
# memory: 2048
# clock: counted
# checks: none
# limit: 3600
. /test/functions
measures
with_host_files netvm
dd if=/dev/zero of=/host/dev/shm/image bs=1M count=384 2>/dev/null
on_host mkfs.ext4 -q /dev/shm/image
mount -o loop -t ext4 /host/dev/shm/image /host/var/tmp
mkdir /host/tmp/groups
mount -t cgroup2 none /host/tmp/groups
before=$(cat /proc/swaps)
for path in in-thread thread; do
    echo "== $path"
    on_host /tmp/netvm bench fault --walks --quick --placement nearby --fault-path $path --local-percent 50,25 --json \
        >/results/walks-$path.json
    cat /results/walks-$path.json
done
umount /host/var/tmp
equal "swap" "$(cat /proc/swaps)" "$before"
