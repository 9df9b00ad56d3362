// SPDX-License-Identifier: GPL-2.0
/*
 * The page cache of a device. Each device has an inode of its own, in a file
 * system of its own that nobody can mount: so it has a page cache as files
 * have, written back in the background, shared by read(2), write(2) and mmap(2)
 * and reclaimed when memory is short. Files of the device are bound to it as
 * those of block devices are to theirs.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/backing-dev.h>
#include <linux/fs.h>
#include <linux/fs_context.h>
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/mount.h>
#include <linux/pagemap.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/swap.h>
#include <linux/uio.h>
#include <linux/writeback.h>

#include "mem_compat.h"
#include "mem_device.h"

#ifndef CONFIG_64BIT
#error "positions and slabs are divided as 64-bit numbers"
#endif

/* Reads and writes that go on though no memory is left for more of them. */
#define IOS_KEPT 4
/* Bytes that are read ahead. */
#define READ_AHEAD_BYTES SZ_1M
#define MEM_MAGIC 0x6e766d6d

/* A read or write of neighbouring pages. */
struct mem_io {
	struct mem_request request;
	struct mem_device *device;
	loff_t start;
	struct bio_vec vecs[MEM_IO_PAGES];
};

static struct mem_device *device_of(const struct address_space *mapping)
{
	return mapping->host->i_private;
}

/* Bytes of a page that the device has. */
static unsigned int bytes_of(const struct mem_device *device, loff_t start)
{
	return min_t(u64, PAGE_SIZE, device->bytes - start);
}

/* Where the peer has the byte at start, and how many follow it there. */
static u64 locate(const struct mem_device *device, loff_t start, u32 *handle,
		  u64 *offset)
{
	u64 slab = start / device->slab_bytes;

	*handle = device->handles[slab];
	*offset = start - slab * device->slab_bytes;
	return device->slab_bytes - *offset;
}

static void read_done(struct mem_request *request, int error)
{
	struct mem_io *io = container_of(request, struct mem_io, request);
	struct mem_device *device = io->device;
	unsigned int i;

	if (error)
		atomic64_inc(&device->errors);
	for (i = 0; i < request->vec_count; i++) {
		struct bio_vec *vec = &io->vecs[i];
		struct folio *folio = page_folio(vec->bv_page);

		if (!error) {
			if (vec->bv_len < PAGE_SIZE)
				folio_zero_segment(folio, vec->bv_len, PAGE_SIZE);
			flush_dcache_folio(folio);
			folio_mark_uptodate(folio);
		}
		folio_unlock(folio);
	}
	mempool_free(io, device->ios);
}

static void write_done(struct mem_request *request, int error)
{
	struct mem_io *io = container_of(request, struct mem_io, request);
	struct mem_device *device = io->device;
	unsigned int i;

	if (error)
		atomic64_inc(&device->errors);
	for (i = 0; i < request->vec_count; i++) {
		struct folio *folio = page_folio(io->vecs[i].bv_page);

		if (error)
			mapping_set_error(folio->mapping, -EIO);
		folio_end_writeback(folio);
	}
	mempool_free(io, device->ios);
}

static void submit(struct mem_io *io)
{
	struct mem_device *device = io->device;
	bool writes = io->request.header.kind == NETVM_WRITE;
	u64 offset;
	u32 handle;

	locate(device, io->start, &handle, &offset);
	io->request.header.handle = cpu_to_le32(handle);
	io->request.header.offset = cpu_to_le64(offset);
	if (!writes)
		io->request.header.bytes = cpu_to_le32(io->request.bytes);
	atomic64_inc(writes ? &device->writes : &device->reads);
	atomic64_add(io->request.bytes,
		     writes ? &device->write_bytes : &device->read_bytes);
	mem_post(&device->session, &io->request);
}

/*
 * Adds a page, which is locked (reads) or under writeback, to an io that it
 * continues; submits that otherwise, and begins another.
 */
static struct mem_io *add(struct mem_io *io, struct mem_device *device,
			  struct folio *folio, u8 kind)
{
	loff_t start = folio_pos(folio);
	struct bio_vec *vec;

	if (io && (start != io->start + io->request.bytes ||
		   io->request.vec_count == MEM_IO_PAGES ||
		   start % device->slab_bytes == 0)) {
		submit(io);
		io = NULL;
	}
	if (!io) {
		/* Never NULL: it may wait. */
		io = mempool_alloc(device->ios, GFP_NOFS);
		memset(&io->request, 0, sizeof(io->request));
		io->device = device;
		io->start = start;
		io->request.header.kind = kind;
		io->request.done = kind == NETVM_WRITE ? write_done : read_done;
		io->request.vecs = io->vecs;
	}
	vec = &io->vecs[io->request.vec_count++];
	vec->bv_page = folio_page(folio, 0);
	vec->bv_offset = 0;
	vec->bv_len = bytes_of(device, start);
	io->request.bytes += vec->bv_len;
	return io;
}

static int mem_read_folio(struct file *file, struct folio *folio)
{
	struct mem_device *device = device_of(folio->mapping);

	submit(add(NULL, device, folio, NETVM_READ));
	return 0;
}

static void mem_readahead(struct readahead_control *rac)
{
	struct mem_device *device = device_of(rac->mapping);
	struct mem_io *io = NULL;
	struct folio *folio;

	/* The cache keeps them while they are locked. */
	while ((folio = readahead_folio(rac)))
		io = add(io, device, folio, NETVM_READ);
	if (io)
		submit(io);
}

struct write_out {
	struct mem_device *device;
	struct mem_io *io;
};

static int write_folio(written_arg_t *written, struct writeback_control *wbc,
		       void *data)
{
	struct folio *folio = written_folio(written);
	struct write_out *out = data;

	folio_start_writeback(folio);
	folio_unlock(folio);
	out->io = add(out->io, out->device, folio, NETVM_WRITE);
	return 0;
}

static int mem_writepages(struct address_space *mapping,
			  struct writeback_control *wbc)
{
	struct write_out out = { .device = device_of(mapping) };
	int error = write_cache_pages(mapping, wbc, write_folio, &out);

	if (out.io)
		submit(out.io);
	return error;
}

static const struct address_space_operations mem_aops = {
	.read_folio = mem_read_folio,
	.readahead = mem_readahead,
	.writepages = mem_writepages,
	.dirty_folio = filemap_dirty_folio,
	.migrate_folio = filemap_migrate_folio,
};

ssize_t mem_read_iter(struct kiocb *kiocb, struct iov_iter *to)
{
	struct mem_device *device = device_of_file(kiocb->ki_filp);

	if (mem_session_error(&device->session))
		return -EIO;
	return generic_file_read_iter(kiocb, to);
}

/* The page, locked; and its bytes are there, unless all will be overwritten. */
static struct folio *folio_to_write(struct mem_device *device, struct file *file,
				    loff_t start, bool whole)
{
	struct address_space *mapping = device->inode->i_mapping;
	pgoff_t index = start >> PAGE_SHIFT;
	struct folio *folio;

	if (whole) {
		folio = __filemap_get_folio(mapping, index,
					    FGP_LOCK | FGP_WRITE | FGP_CREAT | FGP_STABLE,
					    mapping_gfp_mask(mapping));
		return folio ? folio : ERR_PTR(-ENOMEM);
	}
	for (;;) {
		folio = read_mapping_folio(mapping, index, file);
		if (IS_ERR(folio))
			return folio;
		folio_lock(folio);
		if (folio->mapping == mapping && folio_test_uptodate(folio))
			break;
		folio_unlock(folio);
		folio_put(folio);
	}
	folio_wait_stable(folio);
	return folio;
}

static ssize_t write_part(struct mem_device *device, struct file *file,
			  loff_t start, struct iov_iter *from)
{
	unsigned int offset = offset_in_page(start);
	unsigned int length = min_t(u64, iov_iter_count(from),
				    bytes_of(device, start - offset) - offset);
	/* Of a page that the device has in part, the rest is zeros. */
	bool whole = !offset && length == bytes_of(device, start);
	struct folio *folio;
	size_t copied;

	if (fault_in_iov_iter_readable(from, length) == length)
		return -EFAULT;
	folio = folio_to_write(device, file, start, whole);
	if (IS_ERR(folio))
		return PTR_ERR(folio);
	if (mem_session_error(&device->session)) {
		folio_unlock(folio);
		folio_put(folio);
		return -EIO;
	}
	copied = copy_page_from_iter_atomic(folio_page(folio, 0), offset, length,
					    from);
	flush_dcache_folio(folio);
	if (copied < length && !folio_test_uptodate(folio)) {
		/* What the iterator pointed to has gone meanwhile: again. */
		iov_iter_revert(from, copied);
		copied = 0;
	} else if (copied) {
		if (!folio_test_uptodate(folio)) {
			if (length < PAGE_SIZE)
				folio_zero_segment(folio, length, PAGE_SIZE);
			folio_mark_uptodate(folio);
		}
		folio_mark_dirty(folio);
	}
	folio_mark_accessed(folio);
	folio_unlock(folio);
	folio_put(folio);
	return copied;
}

ssize_t mem_write_iter(struct kiocb *kiocb, struct iov_iter *from)
{
	struct file *file = kiocb->ki_filp;
	struct mem_device *device = device_of_file(file);
	ssize_t written = 0, part = 0;
	ssize_t allowed;

	/* With O_APPEND the position is the device's end. */
	allowed = generic_write_checks(kiocb, from);
	if (allowed <= 0)
		return allowed;
	if (kiocb->ki_pos >= device->bytes)
		return -ENOSPC;
	iov_iter_truncate(from, device->bytes - kiocb->ki_pos);
	while (iov_iter_count(from)) {
		if (fatal_signal_pending(current)) {
			part = -EINTR;
			break;
		}
		part = write_part(device, file, kiocb->ki_pos, from);
		if (part < 0)
			break;
		kiocb->ki_pos += part;
		written += part;
		balance_dirty_pages_ratelimited(device->inode->i_mapping);
		cond_resched();
	}
	if (!written)
		return part;
	return generic_write_sync(kiocb, written);
}

/* All that was sent before this is in the peer's memory when it returns. */
static int flush(struct mem_device *device)
{
	struct mem_question question = { .request.header.kind = NETVM_FLUSH };
	struct mem_session *session = &device->session;
	u64 written;
	int error;

	mutex_lock(&device->flush_lock);
	spin_lock(&session->lock);
	written = session->written;
	error = session->error ? -EIO : 0;
	spin_unlock(&session->lock);
	if (!error && written != device->flushed) {
		atomic64_inc(&device->flushes);
		error = mem_ask(session, &question) ? -EIO : 0;
		if (!error)
			device->flushed = written;
	}
	mutex_unlock(&device->flush_lock);
	return error;
}

int mem_cache_sync(struct mem_device *device, loff_t start, loff_t end)
{
	struct address_space *mapping = device->inode->i_mapping;
	int error = filemap_write_and_wait_range(mapping, start, end);

	return error ? error : flush(device);
}

int mem_fsync(struct file *file, loff_t start, loff_t end, int datasync)
{
	int error = file_write_and_wait_range(file, start, end);

	return error ? error : flush(device_of_file(file));
}

int mem_cache_invalidate(struct mem_device *device, u64 offset, u64 bytes)
{
	struct address_space *mapping = device->inode->i_mapping;
	loff_t end = device->bytes - 1;
	int error;

	if (offset >= device->bytes)
		return -EINVAL;
	if (bytes && bytes < device->bytes - offset)
		end = offset + bytes - 1;
	error = mem_cache_sync(device, offset, end);
	if (error)
		return error;
	return invalidate_inode_pages2_range(mapping, offset >> PAGE_SHIFT,
					     end >> PAGE_SHIFT);
}

/* A page is written through a mapping for the first time since it was clean. */
static vm_fault_t mem_page_mkwrite(struct vm_fault *vmf)
{
	struct mem_device *device = device_of_file(vmf->vma->vm_file);
	struct folio *folio = page_folio(vmf->page);

	folio_lock(folio);
	if (folio->mapping != device->inode->i_mapping) {
		folio_unlock(folio);
		return VM_FAULT_NOPAGE;
	}
	if (mem_session_error(&device->session)) {
		folio_unlock(folio);
		return VM_FAULT_SIGBUS;
	}
	folio_mark_dirty(folio);
	folio_wait_stable(folio);
	return VM_FAULT_LOCKED;
}

static const struct vm_operations_struct mem_vm_ops = {
	.fault = filemap_fault,
	.map_pages = filemap_map_pages,
	.page_mkwrite = mem_page_mkwrite,
};

int mem_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct mem_device *device = device_of_file(file);

	if (mem_session_error(&device->session))
		return -EIO;
	vma->vm_ops = &mem_vm_ops;
	return 0;
}

/*
 * The session's error is set: whoever locks a page after this sees that, or
 * that the page has left the cache.
 */
void mem_cache_drop(struct mem_device *device)
{
	struct address_space *mapping = device->inode->i_mapping;

	mapping_set_error(mapping, -EIO);
	/* Private copies of pages are their processes' and stay. */
	unmap_mapping_range(mapping, 0, 0, 0);
	truncate_inode_pages(mapping, 0);
}

/* ---- the file system ---- */

/* The end of sync(2): the pages have been written. */
static int mem_sync_fs(struct super_block *sb, int wait)
{
	struct mem_device *device = READ_ONCE(sb->s_fs_info);

	return device && wait ? flush(device) : 0;
}

static const struct super_operations mem_super_ops = {
	.statfs = simple_statfs,
	.sync_fs = mem_sync_fs,
};

static int fill_super(struct super_block *sb, struct fs_context *fc)
{
	struct inode *root;
	int error;

	sb->s_maxbytes = MAX_LFS_FILESIZE;
	sb->s_blocksize = PAGE_SIZE;
	sb->s_blocksize_bits = PAGE_SHIFT;
	sb->s_magic = MEM_MAGIC;
	sb->s_op = &mem_super_ops;
	sb->s_time_gran = 1;
	root = new_inode(sb);
	if (!root)
		return -ENOMEM;
	root->i_ino = 1;
	root->i_mode = S_IFDIR | 0500;
	sb->s_root = d_make_root(root);
	if (!sb->s_root)
		return -ENOMEM;
	/* Dirty pages are limited and written back by device. */
	error = super_setup_bdi(sb);
	if (error)
		return error;
	sb->s_bdi->ra_pages = READ_AHEAD_BYTES >> PAGE_SHIFT;
	sb->s_bdi->io_pages = READ_AHEAD_BYTES >> PAGE_SHIFT;
	return 0;
}

static int get_tree(struct fs_context *fc)
{
	return get_tree_nodev(fc, fill_super);
}

static const struct fs_context_operations context_ops = {
	.get_tree = get_tree,
};

static int init_context(struct fs_context *fc)
{
	/* Not for mount(2). */
	if (!(fc->sb_flags & SB_KERNMOUNT))
		return -EPERM;
	fc->ops = &context_ops;
	return 0;
}

static struct file_system_type mem_fs = {
	.owner = THIS_MODULE,
	.name = "netvm_mem",
	.init_fs_context = init_context,
	.kill_sb = kill_anon_super,
};

int mem_cache_make(struct mem_device *device)
{
	struct inode *inode;

	device->ios = mempool_create_kmalloc_pool(IOS_KEPT, sizeof(struct mem_io));
	if (!device->ios)
		return -ENOMEM;
	device->mount = kern_mount(&mem_fs);
	if (IS_ERR(device->mount)) {
		int error = PTR_ERR(device->mount);

		device->mount = NULL;
		return error;
	}
	inode = new_inode(device->mount->mnt_sb);
	if (!inode)
		return -ENOMEM;
	inode->i_ino = 2;
	inode->i_mode = S_IFREG | 0600;
	inode->i_private = device;
	inode->i_mapping->a_ops = &mem_aops;
	i_size_write(inode, device->bytes);
	/* The kernel writes back what it finds by its number. */
	insert_inode_hash(inode);
	device->inode = inode;
	WRITE_ONCE(inode->i_sb->s_fs_info, device);
	return 0;
}

void mem_cache_free(struct mem_device *device)
{
	if (device->inode) {
		WRITE_ONCE(device->inode->i_sb->s_fs_info, NULL);
		truncate_inode_pages_final(device->inode->i_mapping);
		iput(device->inode);
	}
	if (device->mount)
		kern_unmount(device->mount);
	mempool_destroy(device->ios);
}

int mem_cache_init(void)
{
	return register_filesystem(&mem_fs);
}

void mem_cache_exit(void)
{
	unregister_filesystem(&mem_fs);
}
