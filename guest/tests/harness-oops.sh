#!/bin/sh
# A kernel that dies is noticed, whatever the script says.
# kernels: 6.1 6.12
# ends: complaint Kernel panic
sleep 1
echo c >/proc/sysrq-trigger
exit 0
