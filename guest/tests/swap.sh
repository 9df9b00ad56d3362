#!/bin/sh
# Swap on memory that another guest lends: programs of twice their memory, lenders that are lost, servers that are killed, leftovers.
# kernels: 6.12+6.12 6.1+6.1
# modules: fuse loop nbd ublk_drv?
# programs: netvm
# compiles: pages
# memory: 384 256
# limit: 580
. /test/functions
if [ "$ROLE" = first ]; then
    netvm secret new key
    lender a 7070 160M
    lender b 7071 160M
    obey
    exit
fi

get_secret
on() { netvm swap on --secret key "$@"; }
status() { netvm swap status >status; }
number() { sed -n 's/^netvm: swap \([0-9]*\):.*/\1/p' said_on; }
server() { sed -n "/^swap  *$1 /,/^server/s/^server  *\([0-9]*\) .*/\1/p" status; }
# Nothing of a swap is left: neither files, nor a mount, nor a device, nor a process.
gone() {
    [ -z "$(ls /run/netvm)" ] || fail "there is $(ls /run/netvm)"
    equal "lines of /proc/swaps" "$(wc -l </proc/swaps)" 1
    refused grep netvm /proc/mounts
    refused pidof @netvm
    [ ! -e /sys/block/loop0/loop ] || fail "the loop device is in use"
    [ ! -e /dev/ublkb0 ] && [ ! -e /dev/ublkc0 ] || fail "there is a ublk device"
    [ ! -e /sys/block/nbd0/pid ] || fail "the network block device is in use"
}
a="--lender 10.7.0.1:7070" b="--lender 10.7.0.1:7071"
used() { netvm status --secret key --json 10.7.0.1:"$1" | grep -o '"resident_bytes":[0-9]*' | cut -d: -f2; }
nothing_used() { [ "$(used "$1")" = 0 ] || { echo "$(used "$1") bytes are used"; false; }; }

means="ublk nbd loop"
[ -e /dev/ublk-control ] || means="nbd loop"
for by in ${MEANS:-$means}; do
    echo "== $by: a program of twice the memory that it may have"
    on --size 96M $a --priority 100 --by $by
    cat /proc/swaps
    equal priority "$(awk 'NR == 2 { print $5 }' /proc/swaps)" 100
    status
    cat status
    grep -q ': in use' status
    grep -q 'priority 100' status
    refused grep warning status
    equal "oom_score_adj of the server" "$(cat "/proc/$(server 0)/oom_score_adj")" -1000
    start_pages 32 12
    [ "$(awk 'NR == 2 { print $4 }' /proc/swaps)" -ge $((10 << 10)) ] || fail "little is swapped out: $(cat /proc/swaps)"
    [ "$(used 7070)" -ge $((10 << 20)) ] || fail "the lender has little: $(used 7070)"
    check_pages
    # What one turn wrote is what the next one finds.
    check_pages
    limit
    netvm swap off
    gone
    check_pages
    end_pages
    wait_until 10 nothing_used 7070

    echo "== $by: one of two lenders is lost"
    on --size 64M $a $b --replicas 2 --by $by
    start_pages 32 12
    order 'kill -9 $b'
    check_pages
    check_pages
    status
    cat status
    grep -q ': in use' status
    grep -q '^lender  *10.7.0.1:7071 lost' status
    refused grep '^lender  *10.7.0.1:7070 lost' status
    limit
    netvm swap off
    gone
    check_pages
    end_pages
    order 'lender b 7071 160M'

    echo "== $by: several, a server that is asked to end, and the system's tools"
    on --size 32M $a --by $by
    on --size 16M $a --by $by
    status
    equal "swaps" "$(grep -c ': in use' status)" 2
    kill -TERM "$(server 0)"
    kill -HUP "$(server 1)"
    swapoff "$(sed -n 's/^swap  *1 at \(.*\): .*/\1/p' status)"
    sleep 1
    status
    cat status
    grep -q '^swap  *0 at .*: in use' status
    grep -q '^swap  *1 at .*: not in use' status
    netvm swap off
    gone
    refused netvm swap off

    echo "== $by: the server is killed"
    on --size 64M $a --by $by
    start_pages 32 12
    status
    kill -9 "$(server 0)"
    # Whoever needs a page that is gone is killed: it never sees another content.
    echo >&3
    wait $pages && fail "the program has found its pages"
    exec 3>&-
    refused grep wrong said
    refused netvm swap status >status
    cat status
    grep -q 'server dead' status
    netvm swap off
    gone

    echo "== $by: the only lender is lost"
    on --size 64M $a --by $by
    start_pages 32 12
    order 'kill -9 $a'
    sleep 1
    echo >&3
    wait $pages && fail "the program has found its pages"
    exec 3>&-
    refused grep wrong said
    refused netvm swap status >status
    cat status
    grep -q 'pages lost' status
    netvm swap off
    gone
    order 'lender a 7070 160M'
done

order obeyed=all
echo "== done"
