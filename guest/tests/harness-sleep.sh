#!/bin/sh
# Sleeping under a spin lock is noticed.
# kernels: debug
# kmod: mistakes
# ends: complaint BUG: sleeping function called from invalid context
insmod /test/mistakes.ko what=sleep
