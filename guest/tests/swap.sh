#!/bin/sh
# Swap on memory that another guest lends: programs of three times their memory, lenders that are lost, servers that are killed, a kernel that takes
# no more swap.
# kernels: 6.12+6.12 6.1+6.1
# modules: fuse loop nbd ublk_drv?
# programs: netvm
# compiles: pages
# memory: 256
# limit: 480
. /test/functions
first_lends 96M 96M
settings() { cat /proc/sys/vm/min_free_kbytes /proc/sys/vm/watermark_boost_factor; }
before=$(settings)
on() { netvm swap on --secret key "$@"; }
status() { netvm swap status >status; }
server() { sed -n "/^swap  *$1 /,/^server/s/^server  *\([0-9]*\) .*/\1/p" status; }
# Nothing of a swap is left: neither files, nor a mount, nor a device, nor a process.
gone() {
    [ -z "$(ls /run/netvm)" ] || fail "there is $(ls /run/netvm)"
    refused grep netvm /proc/mounts /proc/swaps
    refused pidof @netvm
    equal "settings" "$(settings)" "$before"
    [ -z "$(grep netvm /sys/block/loop*/loop/backing_file 2>/dev/null)" ] || fail "the loop device is in use"
    [ ! -e /dev/ublkb0 ] && [ ! -e /dev/ublkc0 ] || fail "there is a ublk device"
    [ ! -e /sys/block/nbd0/pid ] || fail "the network block device is in use"
    refused grep -E 'ublkb|nbd|loop0' /proc/swaps
}
# Whoever needs a page that is gone is killed: it never sees another content. And `swap status` fails.
dies() {
    answers=$(grep -c wrong said) || true
    echo >&3
    wait $pages && fail "the program has found its pages"
    exec 3>&-
    equal "answers of the program" "$(grep -c wrong said || true)" "$answers"
    refused netvm swap status >status
}
# No lender is lost, or thought to be: on a busy machine one may be silent for too long.
is_well() { netvm swap status >status && ! grep -E 'lost|missing' status; }
# A lender that was killed is there again.
lends() { netvm status --secret key 10.7.0.1:"$1" >lends 2>&1; }
again() {
    order "lender $1 $2 96M"
    wait_until 60 lends "$2"
}
a="--lender 10.7.0.1:7070" b="--lender 10.7.0.1:7071"
used() { netvm status --secret key --json 10.7.0.1:"$1" | grep -o '"resident_bytes":[0-9]*' | cut -d: -f2; }
nothing_used() { [ "$(used "$1")" = 0 ] || { echo "$(used "$1") bytes are used"; false; }; }

# What a kernel has beside ublk is tested where there is no ublk.
means="ublk nbd"
[ -e /dev/ublk-control ] || means="nbd loop"
for by in $means; do
    echo "== $by: several, a server that is asked to end, a program of three times the memory that it may have"
    on --size 32M $a --by $by --priority 100
    on --size 16M $a --by $by
    cat /proc/swaps
    equal priority "$(awk 'NR == 2 { print $5 }' /proc/swaps)" 100
    status
    cat status
    equal "swaps" "$(grep -c ': in use' status)" 2
    grep -q 'priority 100' status
    refused grep warning status
    [ "$(settings | sed 1q)" -ge 8000 ] || fail "the kernel keeps only $(settings)"
    equal "oom_score_adj of the server" "$(cat "/proc/$(server 0)/oom_score_adj")" -1000
    start_pages 12 4
    [ "$(awk 'NR == 2 { print $4 }' /proc/swaps)" -ge 6144 ] || fail "little is swapped out: $(cat /proc/swaps)"
    [ "$(used 7070)" -ge $((6 << 20)) ] || fail "the lender has little: $(used 7070)"
    kill -TERM "$(server 0)"
    kill -HUP "$(server 1)"
    swapoff "$(sed -n 's/^swap  *1 at \(.*\): .*/\1/p' status)"
    check_pages
    status
    grep -q '^swap  *0 at .*: in use' status
    grep -q '^swap  *1 at .*: not in use' status
    # All of it comes back, and nothing of it is lost.
    limit
    netvm swap off
    gone
    refused netvm swap off
    check_pages
    end_pages
    wait_until 10 nothing_used 7070

    echo "== $by: one of two lenders is lost, and then the server is killed"
    on --size 24M $a $b --replicas 2 --by $by
    start_pages 12 4
    wait_until 90 is_well
    order 'kill -9 $b'
    check_pages
    status
    cat status
    grep -q ': in use' status
    grep -q '^lender  *10.7.0.1:7071 lost' status
    refused grep '^lender  *10.7.0.1:7070 lost' status
    kill -9 "$(server 0)"
    dies
    cat status
    grep -q 'server dead' status
    netvm swap off
    gone
    again b 7071

    echo "== $by: the only lender is lost"
    on --size 24M $a --by $by
    start_pages 12 4
    order 'kill -9 $a'
    lost() { netvm swap status | grep -q 'pages lost'; }
    wait_until 20 lost
    dies
    cat status
    netvm swap off
    gone
    again a 7070
done

if [ "${means%% *}" = ublk ]; then
    echo "== ublk: the server and its stand-in are killed together"
    on --size 24M $a --by ublk
    start_pages 12 4
    status
    stand_in=$(sed 's/.*"guard":\[\([0-9]*\),.*/\1/' /run/netvm/swap-0.json)
    [ -d "/proc/$stand_in" ] || fail "there is no stand-in $stand_in"
    answers=$(grep -c wrong said) || true
    kill -9 "$stand_in" "$(server 0)"
    # It waits for a page that nobody brings.
    echo >&3
    sleep 1
    kill -0 $pages
    refused netvm swap status >status
    grep -q 'server dead' status
    netvm swap off >off.log 2>&1 || { cat off.log; fail "swap off"; }
    cat off.log
    grep -q 'nobody answers' off.log
    wait $pages && fail "the program has found its pages"
    exec 3>&-
    equal "answers of the program" "$(grep -c wrong said || true)" "$answers"
    gone
    wait_until 10 nothing_used 7070
fi

echo "== nobody reads what status says"
mkfifo unread
netvm swap status --json >unread 2>unread.log &
reader=$!
: <unread
wait $reader && fail "it was read"
[ ! -s unread.log ] || fail "it said $(cat unread.log)"

echo "== the kernel takes no more swap"
number=0
device=$(losetup -f)
while :; do
    dd if=/dev/zero of=dummy$number bs=64k count=1 2>/dev/null
    losetup "$device" dummy$number
    mkswap "$device" >/dev/null
    swapon "$device" 2>/dev/null || break
    number=$((number + 1))
    device=$(losetup -f)
done
echo "after $number"
losetup -d "$device"
for by in $means; do
    refused on --size 24M $a --by $by
    [ -z "$(ls /run/netvm)" ] || fail "there is $(ls /run/netvm)"
    equal "settings" "$(settings)" "$before"
    wait_until 10 sh -c '! pidof @netvm'
    [ ! -e /dev/ublkb0 ] && [ ! -e /dev/ublkc0 ] || fail "there is a ublk device"
    [ ! -e /sys/block/nbd0/pid ] || fail "the network block device is in use"
    equal "first free loop device" "$(losetup -f)" "$device"
    wait_until 10 nothing_used 7070
done

order obeyed=all
echo "== done"
