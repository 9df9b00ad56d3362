#!/bin/sh
# Memory that nobody gives back is noticed, after the script.
# kernels: debug
# kmod: mistakes
# ends: complaint new suspected memory leaks
insmod /test/mistakes.ko what=leak
