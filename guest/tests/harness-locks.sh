#!/bin/sh
# Locks that are taken in two orders are noticed, though nothing hangs.
# kernels: debug
# kmod: mistakes
# ends: complaint WARNING: possible circular locking
insmod /test/mistakes.ko what=locks
