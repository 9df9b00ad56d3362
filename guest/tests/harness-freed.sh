#!/bin/sh
# Memory that is used after it was given back is noticed.
# kernels: debug
# kmod: mistakes
# ends: complaint BUG: KASAN: slab-use-after-free
insmod /test/mistakes.ko what=freed
