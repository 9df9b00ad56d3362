/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Cache maintenance by address, to the point of coherency: where everything
 * that accesses memory, also a device that does not snoop caches, sees the
 * same bytes.
 */
#ifndef NETVM_COHERENCY_H
#define NETVM_COHERENCY_H

/*
 * These are functions of their own, with the range in their first two
 * arguments, so that ftrace, kprobes and BPF can count and time them. The
 * range [start, end) is in the kernel's linear mapping; whole lines are
 * maintained. Any context.
 */

/* Writes modified lines back; they stay in the caches. */
void netvm_clean_to_poc(unsigned long start, unsigned long end);

/* Writes modified lines back and drops all lines. */
void netvm_clean_inval_to_poc(unsigned long start, unsigned long end);

/*
 * Drops all lines, modified ones too: bytes that were not written back are
 * lost. Nothing on machines that have no such instruction (x86).
 */
void netvm_inval_to_poc(unsigned long start, unsigned long end);

#endif
