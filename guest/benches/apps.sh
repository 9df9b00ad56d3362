#!/bin/sh
# `netvm bench apps` beside swap of each kind, where nobody else's memory is swapped out. The programs are this machine's, and all memory is one guest's: the lender's,
# the compressed one of zram, nbdkit's, and that of two disks: an ext4 image on tmpfs, which takes no time of its own, and one whose answers take 50 us, as a good drive's.
# kernels: 6.12
# modules: 9p 9pnet_virtio fuse loop nbd zram zsmalloc ext4 crc32c_generic null_blk
# host: read only
# memory: 3072
# clock: counted
# checks: none
# limit: 14400
. /test/functions
measures
with_host_files netvm libnetvm_preload.so
for folder in /host/usr/lib/python3 /host/usr/lib/python3.*; do
    in_memory "${folder#/host}"
done
dd if=/dev/zero of=/host/dev/shm/image bs=1M count=640 2>/dev/null
on_host mkfs.ext4 -q /dev/shm/image
mount -t configfs none /sys/kernel/config
drive=/sys/kernel/config/nullb/drive
mkdir $drive
for setting in size=640 memory_backed=1 queue_mode=2 irqmode=2 completion_nsec=50000 blocksize=4096 power=1; do
    echo "${setting#*=}" >"$drive/${setting%=*}"
done
# It does take so long.
taken=$(on_host dd if=/dev/drive of=/dev/null bs=4k count=1000 iflag=direct 2>&1 | sed -n 's/.* copied, \([0-9.]*\) s,.*/\1/p')
echo "1000 reads of the drive: $taken s"
awk "BEGIN { exit !($taken > 0.05 && $taken < 0.2) }" || fail "a disk of 50 us takes $taken ms for a read"
on_host mkfs.ext4 -q /dev/drive
mkdir /host/tmp/groups
mount -t cgroup2 none /host/tmp/groups
before=$(cat /proc/swaps)

# measure NAME OPTION...: with the disk that is mounted.
measure() {
    name=$1
    shift
    on_host /tmp/netvm bench apps --swap disk --svg /tmp/apps.svg "$@"
    cp /host/tmp/apps.svg "/results/$name.svg"
    umount /host/var/tmp
}
# One program at a time: the first tables are there long before the last.
for app in numpy-sort sqlite redis pagerank tree numpy-matmul join gcc; do
    echo "== $app, a disk of 50 us"
    mount -t ext4 /dev/drive /host/var/tmp
    measure $app-drive --quick --repetitions 3 --app $app --local-percent 25
    echo "== $app, a disk that takes no time"
    mount -o loop -t ext4 /host/dev/shm/image /host/var/tmp
    measure $app --quick --app $app --local-percent 50,25 --swap zram --swap nbdkit
done
# Of little data most is the start of Python.
echo "== numpy-matmul, all of it, a disk of 50 us"
mount -t ext4 /dev/drive /host/var/tmp
measure numpy-matmul-whole --app numpy-matmul --local-percent 25
equal "swap" "$(cat /proc/swaps)" "$before"
