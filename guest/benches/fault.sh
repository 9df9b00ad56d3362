#!/bin/sh
# `netvm bench fault` by instructions, which come out the same on a busy host, and where they go (perf of this machine, if it has it): with a lender's
# memory at hand, one CPU.
# kernels: 6.12
# modules: 9p 9pnet_virtio
# host: read only
# memory: 1536
# clock: counted
# checks: none
# limit: 1200
. /test/functions
measures
with_host_files netvm

echo "== what is measured"
on_host /tmp/netvm bench fault --quick --placement nearby --peers none --json >/results/fault.json
cat /results/fault.json

echo "== where it goes"
if [ -x /host/usr/bin/perf ]; then
    echo 0 >/proc/sys/kernel/kptr_restrict
    # A sample each 125,000 instructions.
    on_host perf record -q -e cpu-clock -F 4000 -a -g -o /tmp/samples \
        /tmp/netvm bench fault --quick --case random-read --placement nearby --peers none
    on_host perf report -i /tmp/samples --no-children -g none --sort symbol --comm netvm-pager --stdio >/results/pager
    on_host perf report -i /tmp/samples --children -g none --sort symbol --comm netvm-pager --stdio >/results/pager-with-callees
    grep -v '^#' /results/pager | head -n 40
else
    echo "skipped (this machine has no perf)"
fi
echo "== done"
