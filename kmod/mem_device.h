/* SPDX-License-Identifier: GPL-2.0 */
/* A device: its session, its page cache, and who has it open. */
#ifndef NETVM_MEM_DEVICE_H
#define NETVM_MEM_DEVICE_H

#include <linux/atomic.h>
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/mempool.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/wait.h>

#include "mem_session.h"
#include "netvm_mem.h"

struct vfsmount;

/* Most pages that one read or write of the cache moves, no more than a payload. */
#define MEM_IO_PAGES \
	(NETVM_PAYLOAD_BYTES_MAX / PAGE_SIZE < 64 ? NETVM_PAYLOAD_BYTES_MAX / PAGE_SIZE : 64)

struct mem_device {
	struct device dev;
	struct cdev cdev;
	int number;
	u32 kind;
	bool read_only;
	u64 bytes;
	/* A lender's slabs, each of slab_bytes; or the one handle of a segment. */
	u32 *handles;
	u32 handle_count;
	u64 slab_bytes;
	/* How many notifications a segment has. */
	u64 boarded;
	char name[256];
	char peer[128];
	struct dentry *debug;

	struct mem_session session;
	/* The page cache: an inode in a file system that has nothing else. */
	struct vfsmount *mount;
	struct inode *inode;
	mempool_t *ios;
	/* One flush at a time: all that wait for one are served by the next. */
	struct mutex flush_lock;
	u64 flushed;

	/* Protects opens, gone and forced. */
	struct mutex lock;
	unsigned int opens;
	/* It cannot be opened any more. */
	bool gone;
	/* It has to go, whether or not its bytes reach the peer. */
	bool forced;

	u8 board_key[16];
	/* Protects the peer's notifications. */
	spinlock_t board_lock;
	u64 notified;
	u64 counts[NETVM_MEM_NOTIFICATIONS];
	u32 values[NETVM_MEM_NOTIFICATIONS];
	wait_queue_head_t board_waits;

	atomic64_t reads, read_bytes, writes, write_bytes, flushes, errors;
};

/* An open file. */
struct mem_file {
	struct mem_device *device;
	/* How many notifications it has seen. */
	u64 seen;
};

static inline struct mem_device *device_of_file(struct file *file)
{
	return ((struct mem_file *)file->private_data)->device;
}

/* mem_cache.c */
int mem_cache_make(struct mem_device *device);
void mem_cache_free(struct mem_device *device);
/* Nothing in the cache counts any more: mappings lose their pages. */
void mem_cache_drop(struct mem_device *device);
/* Everything written is in the peer's memory. */
int mem_cache_sync(struct mem_device *device, loff_t start, loff_t end);
int mem_cache_invalidate(struct mem_device *device, u64 offset, u64 bytes);
int mem_cache_init(void);
void mem_cache_exit(void);
ssize_t mem_read_iter(struct kiocb *kiocb, struct iov_iter *to);
ssize_t mem_write_iter(struct kiocb *kiocb, struct iov_iter *from);
int mem_fsync(struct file *file, loff_t start, loff_t end, int datasync);
int mem_mmap(struct file *file, struct vm_area_struct *vma);

/* mem_walk.c */
int mem_walk(struct mem_device *device, struct netvm_mem_page *page);

/* mem_device.c */
extern const struct mem_session_ops mem_device_session_ops;
struct mem_device *mem_device_new(void);
/* From now on it can be opened. */
int mem_device_show(struct mem_device *device);

/* mem_attach.c */
/* Gives the device, too, to be given back with put_device(). */
int mem_attach(struct netvm_mem_attach *attach, struct mem_device **made);

#endif
