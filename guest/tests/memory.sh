#!/bin/sh
# netvm_mem: the page cache, the session and its failures, with a peer that does what it is told.
# kernels: 6.1 6.12 6.12-arm64 debug
# kmod: netvm_mem
# compiles: memory memory_peer
# waits: mostly
# limit: 300
. /test/functions
state=/sys/class/netvm_mem
quiet() { "$@" 2>/dev/null; }
attach() { memory attach 127.0.0.1 7000 "$@"; }

insmod /test/netvm_mem.ko
equal "mode of the control device" "$(stat -c %a /dev/netvm_mem_control)" 600
memory_peer 7000 >peer.log 2>&1 &
peer=$!
listens() { nc -z 127.0.0.1 7000 2>/dev/null || netstat -ltn | grep -q :7000; }
wait_until 10 listens

echo "== what is refused"
memory attaching 127.0.0.1 7000
equal "devices afterwards" "$(ls $state)" ""

echo "== borrowed memory"
n=$(attach lender $((2 * 1024 * 1024 - 5000)))
equal "the first device" "$n" 0
equal "mode" "$(stat -c %a /dev/netvm_mem0)" 600
equal kind "$(cat $state/netvm_mem0/kind)" lender
equal state "$(cat $state/netvm_mem0/state)" attached
equal bytes "$(cat $state/netvm_mem0/bytes)" $((2 * 1024 * 1024 - 5000))
memory random 0 1 400
memory random 0 2 400
memory edges 0
memory share 0
memory pages 0
grep -q "^window 4096" /sys/kernel/debug/netvm_mem/netvm_mem0/session

before=$(cat $state/netvm_mem0/flushes)
dd if=/dev/zero of=/dev/netvm_mem0 bs=4k count=10 conv=notrunc 2>/dev/null
sync
[ "$(cat $state/netvm_mem0/flushes)" -gt "$before" ] || fail "sync does not reach the lender"

echo "== busy"
memory keep 0 "! memory detach 0 2>/dev/null && ! rmmod netvm_mem 2>/dev/null"
refused quiet rmmod netvm_mem
for counter in reads read_bytes writes write_bytes flushes; do
    [ "$(cat $state/netvm_mem0/$counter)" -gt 0 ] || fail "$counter"
done
equal errors "$(cat $state/netvm_mem0/errors)" 0
equal opens "$(cat $state/netvm_mem0/opens)" 0
memory detach 0
[ ! -e /dev/netvm_mem0 ] || fail "the device is still there"

echo "== a segment, attached twice"
n=$(attach grid k)
memory random $n 3 300
memory edges $n
memory share $n
sum=$(sha256sum </dev/netvm_mem$n)
dd if=/dev/netvm_mem$n of=/tmp/copy bs=64k 2>/dev/null
equal "size of a copy" "$(stat -c %s /tmp/copy)" 1000003
memory detach $n
n=$(attach grid k)
equal "after attaching again" "$(sha256sum </dev/netvm_mem$n)" "$sum"
# Nobody calls fsync: detaching does.
dd if=/dev/urandom of=/tmp/random bs=1000003 count=1 2>/dev/null
cat /tmp/random >/dev/netvm_mem$n
memory detach $n
n=$(attach grid k read-only)
cmp /tmp/random /dev/netvm_mem$n
refused quiet sh -c "echo >/dev/netvm_mem$n"
m=$(attach fixed k)
equal "rights of the key" "$(cat $state/netvm_mem$m/read_only)" 1
cmp /tmp/random /dev/netvm_mem$m
memory detach $n
memory detach $m

echo "== devices that go with who made them"
memory bound 127.0.0.1 7000
equal "devices afterwards" "$(ls $state)" ""

echo "== notifications"
n=$(attach notify k)
memory notified $n
memory beyond $n 64
equal state "$(cat $state/netvm_mem$n/state)" attached
memory detach $n
n=$(attach grid k)
memory beyond $n 0
equal state "$(cat $state/netvm_mem$n/state)" attached
memory detach $n

echo "== an idle device lives on"
n=$(attach grid k)
sleep 6
equal state "$(cat $state/netvm_mem$n/state)" attached
memory detach $n

echo "== peers that break the protocol"
for evil in kind long short token slot twice applied alive call import order wait cut goodbye; do
    n=$(attach evil-$evil k)
    memory fails $n
    echo "$evil: $(cat $state/netvm_mem$n/state)"
    memory detach $n
done
n=$(attach evil-error k)
memory refused $n
memory detach $n
n=$(attach grid k)
dd if=/dev/netvm_mem$n of=/tmp/page bs=4096 count=4 2>/dev/null
memory detach $n
n=$(attach evil-requests k)
cmp -n 4096 /tmp/page /dev/netvm_mem$n
equal state "$(cat $state/netvm_mem$n/state)" attached
memory detach $n
n=$(attach evil-refuse k)
dd if=/tmp/random of=/dev/netvm_mem$n bs=4096 count=1 2>/dev/null
refused quiet memory detach $n
memory detach $n force
for evil in flood mute; do
    n=$(attach evil-$evil k)
    memory fails $n
    echo "$evil: $(cat $state/netvm_mem$n/state)"
    memory detach $n
done

# Bytes that come slowly are signs of life.
n=$(attach evil-slow k)
cmp -n 16384 /tmp/page /dev/netvm_mem$n
equal state "$(cat $state/netvm_mem$n/state)" attached
memory detach $n
# It answers everything, and applies nothing: as many writes as its window has are sent.
n=$(attach evil-window k)
equal "writes to a window that does not open" "$(memory writes $n)" 4096
grep -q 'no answer for 30000 ms' $state/netvm_mem$n/state
memory detach $n

echo "== detached by force"
n=$(attach grid k)
memory lost $n "memory detach $n force"
refused quiet test -e /dev/netvm_mem$n

echo "== the peer dies"
n=$(attach grid k)
m=$(attach lender 100000)
memory lost $n "kill $peer && killall -q memory_peer; true"
cat $state/netvm_mem$n/state
memory detach $n
memory detach $m
rmmod netvm_mem
[ ! -e /dev/netvm_mem_control ] || fail "the control device is still there"
insmod /test/netvm_mem.ko
rmmod netvm_mem
echo "== done"
