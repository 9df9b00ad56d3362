#!/bin/sh
# netvm_coherency: what is allocated, what is mapped, and which ranges are maintained, as a kprobe sees them.
# kernels: 6.1 6.12 6.12-arm64 debug
# modules: ext4? crc32c_generic? loop
# kmod: netvm_coherency
# compiles: coherency
. /test/functions
trace=/sys/kernel/tracing
parameters=/sys/module/netvm_coherency/parameters
state=/sys/class/misc/netvm_coherency
page=$(($(grep KernelPageSize /proc/self/smaps | head -1 | tr -dc 0-9) * 1024))

order() { echo "$1" >$parameters/max_contiguous_alloc_order; }
blocks() { cat $state/blocks; }

# cleans PROBE COMMAND...: the sizes in pages of the ranges that were maintained, in order
cleans() {
    probe=$1
    shift
    echo >$trace/trace
    coherency "$@" || fail "coherency $*"
    sed -n "s/.* $probe: .*start=\(0x[0-9a-f]*\) end=\(0x[0-9a-f]*\).*/\1 \2/p" $trace/trace >ranges
    while read -r start end; do
        [ $((start % (end - start))) = 0 ] || fail "a block is not aligned: $start $end"
        printf '%d ' $(((end - start) / page))
    done <ranges
}

echo "== parameters that are not possible"
refused insmod /test/netvm_coherency.ko max_contiguous_alloc_order=11
refused insmod /test/netvm_coherency.ko operation=wash
insmod /test/netvm_coherency.ko
for wrong in 11 -1 x 99999999999999999999; do
    refused sh -c "echo $wrong >$parameters/max_contiguous_alloc_order" 2>/dev/null
done
refused sh -c "echo wash >$parameters/operation" 2>/dev/null
equal order "$(cat $parameters/max_contiguous_alloc_order)" 0
equal operation "$(cat $parameters/operation)" clean
equal "mode of the device" "$(stat -c %a /dev/netvm_coherency)" 600
coherency private 0 1

for function in clean clean_inval inval; do
    grep -q "^netvm_${function}_to_poc \[netvm_coherency\]" $trace/available_filter_functions || fail "ftrace does not know $function"
    echo "p:$function netvm_coherency:netvm_${function}_to_poc start=\$arg1 end=\$arg2" >>$trace/kprobe_events
    echo 1 >$trace/events/kprobes/$function/enable
done

echo "== lazily, page by page"
equal "cleaned pages" "$(cleans clean map a 0 100)" ""
equal blocks "$(blocks)" 0
equal "cleaned pages" "$(cleans clean map a 0 100 fill a 7 2 1 unmap a 0 100)" "1 1 "
equal blocks "$(blocks)" 2
equal "at the end of the process" "$(cleans clean map a 0 100 check a 7 2 1 zero a 0 7)" "1 1 1 1 1 1 1 1 1 "

echo "== every order"
for o in 0 1 2 3 4 5 6 7 8 9 10; do
    order $o
    size=$((1 << o)) first=$(((o + 1) << 12))
    before=$(blocks)
    # Not where the block begins: it is mapped from its middle.
    equal "cleaned at order $o" "$(cleans clean map a $((first + size + size / 2)) 1 fill a 0 1 $o)" "$size "
    equal blocks "$(blocks)" $((before + 1))
    # Both blocks, from another offset, with the contents of the first mapping.
    equal "cleaned at order $o" "$(cleans clean map a $((first + size - 1)) $((size + 1)) \
        check a $((size / 2 + 1)) 1 $o fill a 0 $((size + 1)) 9 unmap a 0 $((size + 1)))" "$size $size "
    equal blocks "$(blocks)" $((before + 2))
    equal "cleaned at order $o" "$(cleans clean map b $first $((size * 2)) check b $((size - 1)) $((size + 1)) 9)" "$size $size "
done
equal pages "$(cat $state/pages)" $((9 + 2 * 2047))

echo "== parts of mappings"
order 2
equal "two blocks" "$(cleans clean map a 0x200003 2 fill a 0 2 3)" "4 4 "
equal "the middle" "$(cleans clean map a 0x200100 16 fill a 0 16 4 unmap a 5 4 exec "grep -c clean: $trace/trace >middle" \
    check a 0 5 4 check a 9 7 4)" "4 4 4 4 4 4 "
equal "cleaned before the end" "$(cat middle)" 2
equal "contents afterwards" "$(cleans clean map a 0x200100 16 check a 0 16 4)" "4 4 4 4 "

echo "== blocks between older ones"
order 0
coherency map a 0x300000 1 fill a 0 1 5
order 3
equal "what fits" "$(cleans clean map a 0x300000 16 fill a 1 15 5)" "1 1 2 4 8 "
equal "contents" "$(cleans clean map a 0x300000 16 check a 0 16 5)" "1 1 2 4 8 "

echo "== processes"
order 1
equal "a child" "$(cleans clean map a 0x400000 4 fill a 0 2 6 fork check a 0 2 6 fill a 2 2 7 join check a 2 2 7)" "2 2 2 2 "
before=$(blocks)
for process in 1 2 3 4; do
    coherency map a 0x500000 64 fill a 0 64 8 check a 0 64 8 &
done
wait
equal "blocks of four at once" "$(blocks)" $((before + 32))
coherency map a 0x500000 64 check a 0 64 8
equal "a mapping that moves and grows" "$(cleans clean map b 0x600000 2 map a 0x600000 2 fill a 0 2 1 grow a 4 check a 0 2 1 zero a 2 2)" \
    "2 2 2 2 "

echo "== pages that a disk reads"
dd if=/dev/zero of=/tmp/image bs=1k count=2048 2>/dev/null
mke2fs -F /tmp/image >/dev/null 2>&1
mkdir /tmp/disk
# By the driver of ext4, where there is one.
mount -o loop -t ext2 /tmp/image /tmp/disk
coherency map a 0x400000 4 write a 0 4
umount /tmp/disk

echo "== other operations"
echo clean_invalidate >$parameters/operation
equal "cleaned and invalidated" "$(cleans clean_inval map a 0x200003 2 check a 0 2 3)" "4 4 "
if [ "$(uname -m)" = aarch64 ]; then
    echo invalidate >$parameters/operation
    equal "cleaned" "$(cleans clean map a 0x200003 2 fill a 0 2 2)" "4 4 "
    equal "invalidated" "$(sed -n 's/.* inval: .*/x/p' $trace/trace | wc -l)" 2
else
    refused sh -c "echo invalidate >$parameters/operation" 2>/dev/null
    coherency map a 0x200003 2 fill a 0 2 2
fi
echo clean >$parameters/operation
coherency map a 0x200003 2 check a 0 2 2

echo "== limits"
held=$(cat $state/pages)
echo "$held" >$parameters/max_pages
coherency map a 0x700000 1 bus a 0 check a 0 0 0
equal pages "$(cat $state/pages)" "$held"
echo $((held + 1)) >$parameters/max_pages
order 10
coherency map a 0x700000 1 bus a 0
order 0
coherency map a 0x700000 1 zero a 0 1

echo "== unloading"
coherency map a 0 1 fill a 0 1 1 exec "! rmmod netvm_coherency" check a 0 1 1
for function in clean clean_inval inval; do
    echo 0 >$trace/events/kprobes/$function/enable
done
echo >$trace/kprobe_events
# In KiB, with what each CPU keeps for itself.
free() {
	echo 3 >/proc/sys/vm/drop_caches
	awk -v kib=$((page / 1024)) '/MemFree/ { sum += $2 } $1 == "count:" { sum += $2 * kib } END { print sum }' \
		/proc/meminfo /proc/zoneinfo
}
before=$(free)
rmmod netvm_coherency
freed=$((($(free) - before) / (page / 1024)))
[ $freed -gt $((held * 9 / 10)) ] || fail "of $held pages $freed were freed"
insmod /test/netvm_coherency.ko max_contiguous_alloc_order=3 operation=clean_invalidate
equal "blocks of a new module" "$(blocks)" 0
coherency map a 7 2 zero a 0 2
equal "pages of a new module" "$(cat $state/pages)" 16
rmmod netvm_coherency
echo "== done"
