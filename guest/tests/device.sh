#!/bin/sh
# netvm_mem with a real lender and a real node in another guest, and the greeting of `netvm device`.
# kernels: 6.1+6.12
# modules: ctr gcm ghash_generic aes_generic
# kmod: netvm_mem
# programs: netvm
# examples: device_service
# compiles: memory
# limit: 300
. /test/functions
umask 077
if [ "$ROLE" = first ]; then
    netvm secret new key
    netvm lend --size 96M --listen 10.7.0.1:7070 --secret key >lend.log 2>&1 &
    lender=$!
    netvm lend --size 32M --listen 10.7.0.1:7072 --secret key --encrypt >sealed.log 2>&1 &
    NETVM_SECRET_FILE=key device_service 10.7.0.1:7071 segment.key >service.log 2>&1 &
    wait_until 30 grep -q 'lending' lend.log
    wait_until 30 grep -q 'attach' service.log
    # The other one gets the secrets, has the lender killed, and says how it went.
    nc -l -p 7000 <key
    nc -l -p 7001 <segment.key
    nc -l -p 7002 >told
    equal "what the other guest says" "$(cat told)" kill
    netvm status 10.7.0.1:7070 --secret key
    kill -9 $lender
    nc -l -p 7003 >told
    equal "what the other guest says" "$(cat told)" done
    cat lend.log
    exit
fi

state=/sys/class/netvm_mem
wait_until 90 sh -c 'nc 10.7.0.1 7000 </dev/null >key 2>/dev/null && [ -s key ]'
wait_until 30 sh -c 'nc 10.7.0.1 7001 </dev/null >segment.key 2>/dev/null && [ -s segment.key ]'
lent="--lender 10.7.0.1:7070 --size 64M"
said() { grep -q "$1" refusal || fail "it should have said $1, not $(cat refusal)"; }

echo "== what is refused"
refused netvm device attach $lent --secret key 2>refusal
said "load the kernel module"
insmod /test/netvm_mem.ko
refused netvm device attach $lent 2>refusal
said "secret"
netvm secret new other
refused netvm device attach $lent --secret other 2>refusal
said "another secret"
refused netvm device attach $lent --encrypt 2>refusal
said "secret"
refused netvm device attach --lender 10.7.0.1:7070 --size 97M --secret key 2>refusal
said "not so much memory"
refused netvm device attach --segment service --at 10.7.0.1:7071 --key key --secret key 2>refusal
said "no key\|32 hexadecimal"
refused netvm device attach --segment other --at 10.7.0.1:7071 --key segment.key --secret key 2>refusal
said "no segment"
refused netvm device detach 0 2>refusal
said "there is no /dev/netvm_mem0"
netvm device status

echo "== a lender's memory"
netvm device attach $lent --secret key
memory random 0 5 150
memory pages 0
netvm device page 0 --offset 1000K
refused netvm device page 0 --offset 64M 2>refusal
dd if=/dev/urandom of=/tmp/random bs=1M count=24 2>/dev/null
dd if=/tmp/random of=/dev/netvm_mem0 bs=1M seek=3 conv=notrunc,fsync 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
before=$(cat $state/netvm_mem0/read_bytes)
dd if=/dev/netvm_mem0 bs=1M skip=3 count=24 2>/dev/null | cmp - /tmp/random
read=$(($(cat $state/netvm_mem0/read_bytes) - before))
[ $read -ge $((24 << 20)) ] || fail "only $read bytes came from the lender"
# More dirty pages than this machine may have: written back while it goes on.
for at in 0 24; do
    dd if=/tmp/random of=/dev/netvm_mem0 bs=1M seek=$at conv=notrunc 2>/dev/null
done
[ "$(cat $state/netvm_mem0/write_bytes)" -gt $((30 << 20)) ] || fail "nothing was written back"
sync
echo 3 >/proc/sys/vm/drop_caches
for at in 0 24; do
    dd if=/dev/netvm_mem0 bs=1M skip=$at count=24 2>/dev/null | cmp - /tmp/random
done
netvm device status
netvm device status --json | grep -q '"state":"attached"'

echo "== encrypted, because the lender insists, and because we do"
netvm device attach --lender 10.7.0.1:7072 --size 16M --secret key
equal encrypted "$(cat $state/netvm_mem1/encrypted)" 1
memory random 1 8 150
dd if=/tmp/random of=/dev/netvm_mem1 bs=1M count=16 conv=notrunc,fsync 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
cmp -n 16777216 /tmp/random /dev/netvm_mem1
netvm device detach 1
netvm device attach --segment service --at 10.7.0.1:7071 --key segment.key --board-key segment.key --secret key --encrypt
equal answer "$(memory asks 1 'drawn inward')" "drawni nward"
memory random 1 9 100
sleep 5
equal state "$(cat $state/netvm_mem1/state)" attached
netvm device status
netvm device detach 1

echo "== a lender on this host"
netvm lend --size 16M --listen unix:/tmp/lender >here.log 2>&1 &
wait_until 30 grep -q lending here.log
netvm device attach --lender unix:/tmp/lender --size 16M
memory random 1 7 100
netvm device detach 1

echo "== a node's segment"
netvm device attach --segment service --at 10.7.0.1:7071 --key segment.key --board-key segment.key --secret key
equal bytes "$(cat $state/netvm_mem1/bytes)" $((1 << 20))
equal answer "$(memory asks 1 'able was I')" "I saw elba"
# It has one notification.
memory beyond 1 1
equal state "$(cat $state/netvm_mem1/state)" attached
equal answer "$(memory asks 1 'once more')" "erom ecno"
memory random 1 6 100
sum=$(sha256sum </dev/netvm_mem1)
netvm device detach 1
netvm device attach --segment service --at 10.7.0.1:7071 --key segment.key --secret key --read-only
equal "after attaching again" "$(sha256sum </dev/netvm_mem1)" "$sum"
# It asks us for signs of life, and we ask it.
sleep 6
netvm device status
refused rmmod netvm_mem 2>/dev/null
netvm device detach 1

echo "== the lender is killed"
tell() { echo "$1" | nc 10.7.0.1 "$2"; }
memory lost 0 "echo kill | nc 10.7.0.1 7002"
refused netvm device status
netvm device detach 0
rmmod netvm_mem
wait_until 10 tell done 7003
