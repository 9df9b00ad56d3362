// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/netvm_coherency: memory that processes share by mapping the device, and
 * that is made coherent by software whenever a mapping goes away, as for a
 * device that does not snoop caches.
 *
 * The device is one range of pages that all mappings see. Memory comes in
 * blocks of 2^order contiguous pages when a page is touched for the first
 * time, and stays until the module is unloaded. See docs/design/coherency.md.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/atomic.h>
#include <linux/fs.h>
#include <linux/maple_tree.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "cache_lines.h"
#include "netvm_coherency.h"

#define ORDER_MAX 10

/* 2^order contiguous pages, which are the device's pages from first on. */
struct block {
	struct page *pages;
	unsigned long first;
	unsigned int order;
};

/*
 * All blocks, by the pages of the device that they are. Blocks are added under
 * blocks_lock and never leave while the module can be entered: whoever has
 * found one may use it without a lock.
 */
static struct maple_tree blocks = MTREE_INIT(blocks, MT_FLAGS_USE_RCU);
static DEFINE_MUTEX(blocks_lock);

/* For sysfs; the first two change under blocks_lock. */
static unsigned long blocks_held;
static unsigned long pages_held;
static atomic_long_t maintained_count;

static unsigned int max_contiguous_alloc_order;

static int set_order(const char *value, const struct kernel_param *param)
{
	return param_set_uint_minmax(value, param, 0, ORDER_MAX);
}

static const struct kernel_param_ops order_ops = {
	.set = set_order,
	.get = param_get_uint,
};
module_param_cb(max_contiguous_alloc_order, &order_ops,
		&max_contiguous_alloc_order, 0644);
MODULE_PARM_DESC(max_contiguous_alloc_order,
		 "blocks allocated from now on have 2^this pages, 0..10, where there is room between older ones (0)");

static unsigned long max_pages = SZ_1G >> PAGE_SHIFT;
module_param(max_pages, ulong, 0644);
MODULE_PARM_DESC(max_pages, "most pages that all blocks have together (1 GiB)");

enum operation { CLEAN, CLEAN_INVALIDATE, INVALIDATE };

static const char * const operation_names[] = {
	[CLEAN] = "clean",
	[CLEAN_INVALIDATE] = "clean_invalidate",
	[INVALIDATE] = "invalidate",
};

static enum operation operation = CLEAN;

static int set_operation(const char *value, const struct kernel_param *param)
{
	int which = sysfs_match_string(operation_names, value);

	if (which < 0)
		return which;
	if (which == INVALIDATE && !NETVM_HAS_INVAL)
		return -EOPNOTSUPP;
	WRITE_ONCE(operation, which);
	return 0;
}

static int get_operation(char *buffer, const struct kernel_param *param)
{
	return sysfs_emit(buffer, "%s\n", operation_names[READ_ONCE(operation)]);
}

static const struct kernel_param_ops operation_ops = {
	.set = set_operation,
	.get = get_operation,
};
module_param_cb(operation, &operation_ops, NULL, 0644);
MODULE_PARM_DESC(operation,
		 "what unmapping does to the caches: clean, clean_invalidate, or invalidate, which cleans first (clean)");

noinline void netvm_clean_to_poc(unsigned long start, unsigned long end)
{
	unsigned long line, step = line_bytes();

	for (line = round_down(start, step); line < end; line += step)
		line_clean(line);
	lines_done();
}
EXPORT_SYMBOL_GPL(netvm_clean_to_poc);

noinline void netvm_clean_inval_to_poc(unsigned long start, unsigned long end)
{
	unsigned long line, step = line_bytes();

	for (line = round_down(start, step); line < end; line += step)
		line_clean_inval(line);
	lines_done();
}
EXPORT_SYMBOL_GPL(netvm_clean_inval_to_poc);

noinline void netvm_inval_to_poc(unsigned long start, unsigned long end)
{
	unsigned long line, step = line_bytes();

	for (line = round_down(start, step); line < end; line += step)
		line_inval(line);
	lines_done();
}
EXPORT_SYMBOL_GPL(netvm_inval_to_poc);

static void maintain(const struct block *block)
{
	unsigned long start = (unsigned long)page_address(block->pages);
	unsigned long end = start + (PAGE_SIZE << block->order);

	switch (READ_ONCE(operation)) {
	case CLEAN:
		netvm_clean_to_poc(start, end);
		break;
	case CLEAN_INVALIDATE:
		netvm_clean_inval_to_poc(start, end);
		break;
	case INVALIDATE:
		/* Not a byte that was there before may come back. */
		netvm_clean_to_poc(start, end);
		netvm_inval_to_poc(start, end);
		break;
	}
	atomic_long_inc(&maintained_count);
}

/* Makes the block that has this page. The caller holds blocks_lock. */
static struct block *add_block(unsigned long page)
{
	unsigned int order = READ_ONCE(max_contiguous_alloc_order);
	unsigned long first, last, i;
	struct block *block;
	int error;

	/* Blocks lie at multiples of their size, and not on older ones. */
	for (;; order--) {
		unsigned long index;

		first = round_down(page, 1UL << order);
		last = first + (1UL << order) - 1;
		index = first;
		if (order == 0 || !mt_find(&blocks, &index, last))
			break;
	}
	if (pages_held + (1UL << order) > READ_ONCE(max_pages)) {
		pr_notice_ratelimited("max_pages is reached\n");
		return ERR_PTR(-ENOSPC);
	}
	block = kmalloc(sizeof(*block), GFP_KERNEL);
	if (!block)
		return ERR_PTR(-ENOMEM);
	/* Nothing that is killed gives these pages back: kill nothing. */
	block->pages = alloc_pages(GFP_USER | __GFP_ZERO | __GFP_NOWARN |
				   __GFP_RETRY_MAYFAIL, order);
	if (!block->pages) {
		pr_notice_ratelimited("no memory for 2^%u contiguous pages\n",
				      order);
		kfree(block);
		return ERR_PTR(-ENOMEM);
	}
	/* Each page is mapped, and may be pinned, by itself. */
	split_page(block->pages, order);
	block->first = first;
	block->order = order;
	error = mtree_insert_range(&blocks, first, last, block, GFP_KERNEL);
	if (error) {
		for (i = 0; i < 1UL << order; i++)
			__free_page(block->pages + i);
		kfree(block);
		return ERR_PTR(error);
	}
	blocks_held++;
	pages_held += 1UL << order;
	return block;
}

static vm_fault_t coherency_fault(struct vm_fault *vmf)
{
	struct block *block = mtree_load(&blocks, vmf->pgoff);

	if (!block) {
		mutex_lock(&blocks_lock);
		block = mtree_load(&blocks, vmf->pgoff);
		if (!block)
			block = add_block(vmf->pgoff);
		mutex_unlock(&blocks_lock);
	}
	/* Not VM_FAULT_OOM: the fault would be tried again for ever. */
	if (IS_ERR(block))
		return VM_FAULT_SIGBUS;
	vmf->page = block->pages + (vmf->pgoff - block->first);
	get_page(vmf->page);
	return 0;
}

/* A mapping, or a part of one that was split off, is gone. */
static void coherency_close(struct vm_area_struct *vma)
{
	unsigned long index = vma->vm_pgoff;
	unsigned long last = index + vma_pages(vma) - 1;
	struct block *block;

	mt_for_each(&blocks, block, index, last) {
		maintain(block);
		cond_resched();
	}
}

static const struct vm_operations_struct coherency_vm_ops = {
	.fault = coherency_fault,
	.close = coherency_close,
};

static int coherency_mmap(struct file *file, struct vm_area_struct *vma)
{
	/* A private mapping would leave the device's pages at the first write. */
	if (!(vma->vm_flags & VM_MAYSHARE))
		return -EINVAL;
	vma->vm_ops = &coherency_vm_ops;
	return 0;
}

static const struct file_operations coherency_fops = {
	.owner = THIS_MODULE,
	.mmap = coherency_mmap,
	.llseek = noop_llseek,
};

static ssize_t blocks_show(struct device *dev, struct device_attribute *attr,
			   char *buffer)
{
	return sysfs_emit(buffer, "%lu\n", READ_ONCE(blocks_held));
}
static DEVICE_ATTR_RO(blocks);

static ssize_t pages_show(struct device *dev, struct device_attribute *attr,
			  char *buffer)
{
	return sysfs_emit(buffer, "%lu\n", READ_ONCE(pages_held));
}
static DEVICE_ATTR_RO(pages);

static ssize_t maintained_show(struct device *dev,
			       struct device_attribute *attr, char *buffer)
{
	return sysfs_emit(buffer, "%ld\n", atomic_long_read(&maintained_count));
}
static DEVICE_ATTR_RO(maintained);

static struct attribute *coherency_attrs[] = {
	&dev_attr_blocks.attr,
	&dev_attr_pages.attr,
	&dev_attr_maintained.attr,
	NULL,
};
ATTRIBUTE_GROUPS(coherency);

static struct miscdevice coherency_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "netvm_coherency",
	.fops = &coherency_fops,
	.groups = coherency_groups,
	.mode = 0600,
};

static int __init coherency_init(void)
{
	return misc_register(&coherency_device);
}

/* Mappings hold the module: none is left here. */
static void __exit coherency_exit(void)
{
	unsigned long index = 0, i;
	struct block *block;

	misc_deregister(&coherency_device);
	mt_for_each(&blocks, block, index, ULONG_MAX) {
		for (i = 0; i < 1UL << block->order; i++)
			__free_page(block->pages + i);
		kfree(block);
		cond_resched();
	}
	mtree_destroy(&blocks);
}

module_init(coherency_init);
module_exit(coherency_exit);
MODULE_AUTHOR("The netvm authors");
MODULE_DESCRIPTION("Shared memory that is made coherent by software when it is unmapped");
MODULE_LICENSE("GPL");
