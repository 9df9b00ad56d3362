/* SPDX-License-Identifier: GPL-2.0 */
/* What differs between Linux 6.1 and 6.12. NETVM_KERNEL is 601 and so on. */
#ifndef NETVM_MEM_COMPAT_H
#define NETVM_MEM_COMPAT_H

#include <linux/fs.h>
#include <linux/pagemap.h>
#include <linux/uio.h>
#include <linux/writeback.h>
#include <net/sock.h>

#if NETVM_KERNEL >= 612
#include <linux/unaligned.h>
#else
#include <asm/unaligned.h>
#endif

/* What write_cache_pages() hands out, locked. */
#if NETVM_KERNEL >= 603
#define written_arg_t struct folio
#define written_folio(arg) (arg)
#else
#define written_arg_t struct page
#define written_folio(arg) page_folio(arg)
#endif

#if NETVM_KERNEL >= 605
#define netvm_splice_read filemap_splice_read
#else
#define netvm_splice_read generic_file_splice_read
#endif

#ifndef ITER_DEST
#define ITER_DEST READ
#define ITER_SOURCE WRITE
#endif

/*
 * The socket is used while memory is written back: its buffers must not wait
 * for that.
 */
static inline void netvm_sock_of_memory(struct sock *sk)
{
	sk->sk_allocation = GFP_NOIO | __GFP_MEMALLOC;
#if NETVM_KERNEL >= 602
	sk->sk_use_task_frag = false;
#endif
}

#endif
