#!/bin/sh
# A machine that runs out of all memory: a program of more than there is, without any limit, on swap that another guest lends. Nothing
# but what is swapped out can be freed. Meanwhile one of two lenders is lost.
# kernels: 6.12+6.12 6.1+6.1
# modules: nbd ublk_drv?
# programs: netvm
# compiles: pages
# memory: 512 128
# limit: 480
. /test/functions
first_lends 320M 320M
means=ublk
[ -e /dev/ublk-control ] || means=nbd
for by in $means; do
    echo "== $by"
    free -m
    netvm swap on --secret key --size 144M --lender 10.7.0.1:7070 --lender 10.7.0.1:7071 --replicas 2 --by $by
    start_pages 112
    free -m
    # On a busy machine a lender may be silent for too long.
    is_well() { netvm swap status >status && ! grep -E 'lost|missing' status; }
    wait_until 90 is_well
    order 'kill -9 $b'
    check_pages
    netvm swap status >status
    cat status
    grep -q '^lender  *10.7.0.1:7071 lost' status
    end_pages
    netvm swap off
done
order obeyed=all
echo "== done"
