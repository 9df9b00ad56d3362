#!/bin/sh
# Page descriptors on a kernel that uses five levels of page tables.
# kernels: 6.12 debug
# image: packed
# kmod: netvm_mem
# compiles: memory memory_peer
. /test/functions
grep -qw la57 /proc/cpuinfo || fail "this machine has no fifth level"
insmod /test/netvm_mem.ko
memory_peer 7000 >peer.log 2>&1 &
listens() { nc -z 127.0.0.1 7000 2>/dev/null || netstat -ltn | grep -q :7000; }
wait_until 10 listens
n=$(memory attach 127.0.0.1 7000 grid k)
memory pages $n >said
cat said
grep -q "levels 5" said
# The first entry is not the second one.
[ "$(cut -d' ' -f4 <said)" != "$(cut -d' ' -f5 <said)" ] || fail "the P4D is folded"
memory detach $n
rmmod netvm_mem
