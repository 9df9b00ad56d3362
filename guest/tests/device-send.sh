#!/bin/sh
# `netvm send --method device`: files that the kernel module writes into the files of a receiver in another guest, plain and encrypted, whole, with
# holes, in folders, cut and gone on with; a receiver that is killed. And what the module costs, beside other means.
# kernels: 6.1+6.12
# modules: ctr gcm ghash_generic aes_generic fuse
# kmod: netvm_mem
# programs: netvm
# memory: 384 640
# limit: 480
. /test/functions
receive() {
    netvm recv into --listen 10.7.0.1:7071 --secret key "$@" >recv.log 2>&1 &
    receiver=$!
}
if [ "$ROLE" = first ]; then
    netvm secret new key
    mkdir into
    obey
    exit
fi

get_secret
# The other guest is listening: its connections are refused before.
send() {
    wait_until 30 tried "$@"
    cat send.log
}
tried() {
    netvm send "$@" --to 10.7.0.1:7071 --secret key --method device --json >send.log 2>&1 && return
    refused grep -v 'cannot connect to 10.7.0.1' send.log
    false
}
told() { sed "s/.*\"$1\":\"\{0,1\}\([^,\"}]*\).*/\1/" send.log; }
# The sums of all that has arrived, as the other guest sees them.
sums() {
    order '(cd into && find . -type f ! -name "*.part" | sort | xargs sha256sum) >sums; nc -l -p 7002 <sums'
    wait_until 30 sh -c 'nc 10.7.0.1 7002 </dev/null >sums 2>/dev/null && [ -s sums ]'
    cat sums
}
expected() { (cd source && find . -type f | sort | xargs sha256sum); }

mkdir -p source/folder
dd if=/dev/urandom of=source/folder/a bs=1000 count=7654 2>/dev/null
dd if=/dev/urandom of=source/small bs=1 count=333 2>/dev/null
# Data, a hole, and data; and of a length that nothing divides.
dd if=/dev/urandom of=source/holes bs=1000 count=2345 2>/dev/null
echo end | dd of=source/holes bs=1 seek=21000001 2>/dev/null

echo "== what is refused"
refused netvm send source --to 10.7.0.1:7071 --secret key --method device 2>refusal
grep -q 'load the kernel module' refusal
insmod /test/netvm_mem.ko
refused netvm recv source --method device 2>refusal
grep -q 'possible values: copy, mmap, sendfile' refusal
refused netvm send source/small --to 10.7.0.1:7071 --method device --framing simple 2>refusal
grep -q 'another method' refusal

for more in "" --encrypt; do
    echo "== folders and holes $more"
    order "receive $more"
    send source/folder source/small source/holes $more
    equal files "$(told files)" 3
    equal checked "$(told checked)" true
    equal link "$(told link)" device
    [ "$(told moved_bytes)" -lt 12000000 ] || fail "holes were sent"
    order 'wait $receiver; cat recv.log'
    sums >got
    expected >wanted
    cmp got wanted
    netvm device status
    [ -z "$(ls /sys/class/netvm_mem)" ] || fail "there is $(ls /sys/class/netvm_mem)"
    order 'rm -r into; mkdir into'
done

echo "== cut, and gone on with"
rm -r source/*
dd if=/dev/urandom of=source/big bs=1M count=96 2>/dev/null
order receive
wait_until 30 sh -c 'nc -w 1 10.7.0.1 7071 </dev/null >/dev/null 2>&1'
(exec netvm send source/big --to 10.7.0.1:7071 --secret key --method device >cut.log 2>&1) &
sender=$!
writes() { cat /sys/class/netvm_mem/netvm_mem0/write_bytes 2>/dev/null || echo 0; }
wrote() { [ "$(writes)" -gt $((48 << 20)) ]; }
while ! wrote; do kill -0 $sender || { cat cut.log; fail "it ended before it was cut"; }; done
kill -9 $sender
wait $sender || true
# Its device has gone with it, whatever the receiver does.
[ -z "$(ls /sys/class/netvm_mem)" ] || fail "there is $(ls /sys/class/netvm_mem)"
order 'wait $receiver || true; cat recv.log; grep -q "was cut" recv.log'
order receive
send source/big
equal checked "$(told checked)" true
[ "$(told moved_bytes)" -lt $((88 << 20)) ] || fail "all of it was sent again"
order 'wait $receiver; cat recv.log'
sums >got
expected >wanted
cmp got wanted
[ -z "$(ls /sys/class/netvm_mem)" ] || fail "there is $(ls /sys/class/netvm_mem)"

echo "== the receiver is killed"
order 'rm -r into; mkdir into; receive'
wait_until 30 sh -c 'nc -w 1 10.7.0.1 7071 </dev/null >/dev/null 2>&1'
(exec netvm send source/big --to 10.7.0.1:7071 --secret key --method device >cut.log 2>&1) &
sender=$!
while ! wrote; do kill -0 $sender || { cat cut.log; fail "it ended before it was cut"; }; done
order 'kill -9 $receiver'
wait $sender && fail "it was sent to nobody"
cat cut.log
[ -z "$(ls /sys/class/netvm_mem)" ] || fail "there is $(ls /sys/class/netvm_mem)"
order obeyed=all

echo "== what it costs"
rm -r source
netvm bench transfer --quick --rounds 1 --json --dir /dev/shm >/results/transfer.json 2>transfer.err || { cat transfer.err; fail "bench transfer"; }
cat /results/transfer.json
grep '"case":"transfer-device","link":"device"' /results/transfer.json | grep -q '"median":[0-9]*\.[0-9]'
netvm bench file --quick --rounds 1 --json >/results/file.json 2>file.err || { cat file.err; fail "bench file"; }
cat /results/file.json
for row in file-seq file-rand file-mmap; do
    grep "\"case\":\"$row\"" /results/file.json | grep 'lender tcp, device' | grep -q '"median":[0-9]*\.[0-9]' || fail "no $row of the device"
done
rmmod netvm_mem
echo "== done"
