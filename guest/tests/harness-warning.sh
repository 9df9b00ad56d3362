#!/bin/sh
# A warning of the kernel is noticed though the script succeeds.
# ends: complaint WARNING: CPU
echo "<4>WARNING: CPU: 0 PID: 1 at somewhere" >/dev/kmsg
exit 0
