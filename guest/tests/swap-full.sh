#!/bin/sh
# A machine that runs out of all memory: a program of more than there is, without any limit, on swap that another guest lends. Nothing
# but what is swapped out can be freed.
# kernels: 6.12+6.12 6.1+6.1
# modules: nbd ublk_drv?
# programs: netvm
# compiles: pages
# memory: 320 128
# limit: 240
. /test/functions
if [ "$ROLE" = first ]; then
    netvm secret new key
    lender a 7070 160M
    obey
    exit
fi

get_secret
means=ublk
[ -e /dev/ublk-control ] || means=nbd
for by in $means; do
    echo "== $by"
    free -m
    netvm swap on --secret key --size 144M --lender 10.7.0.1:7070 --by $by
    start_pages 112
    free -m
    check_pages
    netvm swap status
    end_pages
    netvm swap off
done
order obeyed=all
echo "== done"
