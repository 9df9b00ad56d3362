// SPDX-License-Identifier: GPL-2.0
/*
 * /dev/netvm_mem_control, and /dev/netvm_memN: another machine's memory as a
 * character device. See docs/design/device.md.
 *
 * A device lives from its attachment until it is detached and nobody has it
 * open or mapped. It holds the module as long as it is attached, and files of
 * it do as files do.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/capability.h>
#include <linux/cdev.h>
#include <linux/debugfs.h>
#include <linux/device.h>
#include <linux/idr.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/poll.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <crypto/algapi.h>

#include "mem_compat.h"
#include "mem_device.h"

#define DEVICES_MAX 256

static dev_t first_number;
static struct dentry *debug_root;
/* All that are attached. */
static DEFINE_IDR(devices);
static DEFINE_MUTEX(devices_lock);

/* ---- what the peer wants ---- */

static u16 peer_imports(struct mem_session *session, const u8 *key,
			const char *name, u32 name_bytes)
{
	struct mem_device *device =
		container_of(session, struct mem_device, session);
	static const u8 none[16];

	/* As for a wrong key: nobody is told which names there are. */
	if (name_bytes != strlen(NETVM_MEM_BOARD) ||
	    memcmp(name, NETVM_MEM_BOARD, name_bytes) ||
	    !crypto_memneq(device->board_key, none, sizeof(none)) ||
	    crypto_memneq(device->board_key, key, sizeof(device->board_key)))
		return NETVM_NO_SEGMENT;
	return NETVM_OK;
}

static u16 peer_notifies(struct mem_session *session, u16 number, u32 value)
{
	struct mem_device *device =
		container_of(session, struct mem_device, session);

	if (number >= NETVM_MEM_NOTIFICATIONS)
		return NETVM_OUT_OF_BOUNDS;
	spin_lock(&device->board_lock);
	device->counts[number]++;
	if (value)
		device->values[number] = value;
	device->notified++;
	spin_unlock(&device->board_lock);
	wake_up_interruptible(&device->board_waits);
	return NETVM_OK;
}

static void session_ended(struct mem_session *session)
{
	struct mem_device *device =
		container_of(session, struct mem_device, session);

	if (session->error != -ENODEV)
		pr_notice("netvm_mem%d: %s: %s\n", device->number, device->peer,
			  session->reason);
	if (device->inode)
		mem_cache_drop(device);
	wake_up_interruptible(&device->board_waits);
}

const struct mem_session_ops mem_device_session_ops = {
	.import = peer_imports,
	.notify = peer_notifies,
	.ended = session_ended,
};

/* ---- files ---- */

static int mem_open(struct inode *inode, struct file *file)
{
	struct mem_device *device =
		container_of(inode->i_cdev, struct mem_device, cdev);
	struct mem_file *open;

	if (device->read_only && (file->f_mode & FMODE_WRITE))
		return -EROFS;
	open = kzalloc(sizeof(*open), GFP_KERNEL);
	if (!open)
		return -ENOMEM;
	mutex_lock(&device->lock);
	if (device->gone) {
		mutex_unlock(&device->lock);
		kfree(open);
		return -ENXIO;
	}
	device->opens++;
	mutex_unlock(&device->lock);
	get_device(&device->dev);
	open->device = device;
	open->seen = READ_ONCE(device->notified);
	file->private_data = open;
	/* As for block devices: all files share one page cache. */
	file->f_mapping = device->inode->i_mapping;
	file->f_wb_err = filemap_sample_wb_err(file->f_mapping);
	return 0;
}

static int mem_release(struct inode *inode, struct file *file)
{
	struct mem_file *open = file->private_data;
	struct mem_device *device = open->device;

	mutex_lock(&device->lock);
	device->opens--;
	mutex_unlock(&device->lock);
	kfree(open);
	put_device(&device->dev);
	return 0;
}

static loff_t mem_llseek(struct file *file, loff_t offset, int whence)
{
	return fixed_size_llseek(file, offset, whence,
				 device_of_file(file)->bytes);
}

static __poll_t mem_poll(struct file *file, poll_table *table)
{
	struct mem_file *open = file->private_data;
	struct mem_device *device = open->device;
	__poll_t events = EPOLLIN | EPOLLRDNORM;

	poll_wait(file, &device->board_waits, table);
	if (!device->read_only)
		events |= EPOLLOUT | EPOLLWRNORM;
	if (READ_ONCE(device->notified) != READ_ONCE(open->seen))
		events |= EPOLLPRI;
	if (mem_session_error(&device->session))
		events |= EPOLLERR | EPOLLHUP;
	return events;
}

static long tell_notified(struct mem_file *open, void __user *argument)
{
	struct mem_device *device = open->device;
	struct netvm_mem_notified notified;

	if (copy_from_user(&notified, argument, sizeof(notified)))
		return -EFAULT;
	if (notified.number >= NETVM_MEM_NOTIFICATIONS)
		return -EINVAL;
	spin_lock(&device->board_lock);
	notified.count = device->counts[notified.number];
	notified.value = device->values[notified.number];
	WRITE_ONCE(open->seen, device->notified);
	spin_unlock(&device->board_lock);
	return copy_to_user(argument, &notified, sizeof(notified)) ? -EFAULT : 0;
}

/* The peer is told once it has everything that was written before. */
static long notify_peer(struct mem_device *device, void __user *argument)
{
	struct mem_question question = {};
	struct netvm_mem_notify notify;
	int error;

	if (copy_from_user(&notify, argument, sizeof(notify)))
		return -EFAULT;
	if (device->kind != NETVM_MEM_SEGMENT)
		return -EOPNOTSUPP;
	if (notify.number > U16_MAX)
		return -EINVAL;
	/* The peer's refusal would be the end of all that the device has. */
	if (!device->boarded)
		return -EOPNOTSUPP;
	if (notify.number >= device->boarded)
		return -ERANGE;
	error = mem_cache_sync(device, 0, LLONG_MAX);
	if (error)
		return error;
	question.request.header.kind = NETVM_WRITE;
	question.request.header.flags = notify.value ? NETVM_POST : NETVM_COUNT;
	question.request.header.status = cpu_to_le16(notify.number);
	question.request.header.bytes = cpu_to_le32(notify.value);
	question.request.header.handle = cpu_to_le32(device->handles[0]);
	return mem_ask(&device->session, &question) ? -EIO : 0;
}

static long tell_page(struct mem_device *device, void __user *argument)
{
	struct netvm_mem_page page;
	int error;

	if (copy_from_user(&page, argument, sizeof(page)))
		return -EFAULT;
	error = mem_walk(device, &page);
	if (error)
		return error;
	return copy_to_user(argument, &page, sizeof(page)) ? -EFAULT : 0;
}

static long mem_ioctl(struct file *file, unsigned int command,
		      unsigned long argument)
{
	struct mem_file *open = file->private_data;
	struct mem_device *device = open->device;
	void __user *pointer = (void __user *)argument;
	struct netvm_mem_info info = {};
	struct netvm_mem_range range;

	switch (command) {
	case NETVM_MEM_INFO:
		info.bytes = device->bytes;
		info.kind = device->kind;
		info.flags = device->read_only ? NETVM_MEM_READ_ONLY : 0;
		info.error = mem_session_error(&device->session);
		info.device = device->number;
		return copy_to_user(pointer, &info, sizeof(info)) ? -EFAULT : 0;
	case NETVM_MEM_INVALIDATE:
		if (copy_from_user(&range, pointer, sizeof(range)))
			return -EFAULT;
		return mem_cache_invalidate(device, range.offset, range.bytes);
	case NETVM_MEM_NOTIFY:
		if (!(file->f_mode & FMODE_WRITE))
			return -EBADF;
		return notify_peer(device, pointer);
	case NETVM_MEM_NOTIFIED:
		return tell_notified(open, pointer);
	case NETVM_MEM_PAGE:
		return tell_page(device, pointer);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations mem_fops = {
	.owner = THIS_MODULE,
	.open = mem_open,
	.release = mem_release,
	.llseek = mem_llseek,
	.read_iter = mem_read_iter,
	.write_iter = mem_write_iter,
	.splice_read = netvm_splice_read,
	.splice_write = iter_file_splice_write,
	.mmap = mem_mmap,
	.fsync = mem_fsync,
	.poll = mem_poll,
	.unlocked_ioctl = mem_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

/* ---- what is told in sysfs and debugfs ---- */

static struct mem_device *to_mem(struct device *dev)
{
	return container_of(dev, struct mem_device, dev);
}

static ssize_t kind_show(struct device *dev, struct device_attribute *attr,
			 char *buffer)
{
	bool lender = to_mem(dev)->kind == NETVM_MEM_LENDER;

	return sysfs_emit(buffer, "%s\n", lender ? "lender" : "segment");
}
static DEVICE_ATTR_RO(kind);

static ssize_t state_show(struct device *dev, struct device_attribute *attr,
			  char *buffer)
{
	struct mem_session *session = &to_mem(dev)->session;
	ssize_t length;

	spin_lock(&session->lock);
	if (session->error)
		length = sysfs_emit(buffer, "lost: %s\n", session->reason);
	else
		length = sysfs_emit(buffer, "attached\n");
	spin_unlock(&session->lock);
	return length;
}
static DEVICE_ATTR_RO(state);

static ssize_t opens_show(struct device *dev, struct device_attribute *attr,
			  char *buffer)
{
	return sysfs_emit(buffer, "%u\n", READ_ONCE(to_mem(dev)->opens));
}
static DEVICE_ATTR_RO(opens);

static ssize_t in_flight_show(struct device *dev, struct device_attribute *attr,
			      char *buffer)
{
	return sysfs_emit(buffer, "%u\n",
			  READ_ONCE(to_mem(dev)->session.in_flight));
}
static DEVICE_ATTR_RO(in_flight);

#define SHOW(field, format, value)                                          \
static ssize_t field##_show(struct device *dev,                             \
			    struct device_attribute *attr, char *buffer)    \
{                                                                           \
	struct mem_device *device = to_mem(dev);                            \
									    \
	return sysfs_emit(buffer, format "\n", value);                      \
}                                                                           \
static DEVICE_ATTR_RO(field)

SHOW(bytes, "%llu", device->bytes);
SHOW(name, "%s", device->name);
SHOW(peer, "%s", device->peer);
SHOW(read_only, "%d", device->read_only);
SHOW(encrypted, "%d", !!device->session.seal);
SHOW(notified, "%llu", READ_ONCE(device->notified));
SHOW(reads, "%lld", atomic64_read(&device->reads));
SHOW(read_bytes, "%lld", atomic64_read(&device->read_bytes));
SHOW(writes, "%lld", atomic64_read(&device->writes));
SHOW(write_bytes, "%lld", atomic64_read(&device->write_bytes));
SHOW(flushes, "%lld", atomic64_read(&device->flushes));
SHOW(errors, "%lld", atomic64_read(&device->errors));

static struct attribute *mem_attrs[] = {
	&dev_attr_kind.attr,
	&dev_attr_state.attr,
	&dev_attr_bytes.attr,
	&dev_attr_name.attr,
	&dev_attr_peer.attr,
	&dev_attr_read_only.attr,
	&dev_attr_encrypted.attr,
	&dev_attr_opens.attr,
	&dev_attr_in_flight.attr,
	&dev_attr_notified.attr,
	&dev_attr_reads.attr,
	&dev_attr_read_bytes.attr,
	&dev_attr_writes.attr,
	&dev_attr_write_bytes.attr,
	&dev_attr_flushes.attr,
	&dev_attr_errors.attr,
	NULL,
};
ATTRIBUTE_GROUPS(mem);

static int session_show(struct seq_file *file, void *data)
{
	struct mem_device *device = file->private;
	struct mem_session *session = &device->session;
	unsigned int slot;

	spin_lock(&session->lock);
	seq_printf(file, "written %llu\napplied %llu\nflushed %llu\nwindow %u\n",
		   session->written, session->applied, device->flushed,
		   session->window);
	seq_printf(file, "slots %u of %u\nanswers %u\nqueued %u\n",
		   session->in_flight, session->ops_max, session->answer_count,
		   !list_empty(&session->posted));
	seq_printf(file, "sent %lld\nreceived %lld\ntaken %llu\nasked for life %u\n",
		   atomic64_read(&session->sent),
		   atomic64_read(&session->received), session->taken,
		   session->asked_for_life);
	for_each_set_bit(slot, session->used, NETVM_OPS_MAX)
		seq_printf(file, "slot %u: kind %u, %u bytes, for %u ms\n", slot,
			   session->slots[slot]->header.kind,
			   session->slots[slot]->bytes,
			   jiffies_to_msecs(jiffies - session->slots[slot]->since));
	spin_unlock(&session->lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(session);

/* ---- life and death ---- */

static void mem_device_free(struct device *dev)
{
	struct mem_device *device = to_mem(dev);

	mem_session_stop(&device->session);
	mem_cache_free(device);
	mem_seal_free(device->session.seal);
	mem_seal_free(device->session.open);
	if (device->session.socket)
		sockfd_put(device->session.socket);
	kvfree(device->handles);
	kfree_sensitive(device);
}

static struct class mem_class = {
	.name = "netvm_mem",
	.dev_groups = mem_groups,
};

/* To be given back with put_device(). */
struct mem_device *mem_device_new(void)
{
	struct mem_device *device = kzalloc(sizeof(*device), GFP_KERNEL);

	if (!device)
		return NULL;
	device_initialize(&device->dev);
	device->dev.class = &mem_class;
	device->dev.release = mem_device_free;
	mutex_init(&device->lock);
	mutex_init(&device->flush_lock);
	spin_lock_init(&device->board_lock);
	init_waitqueue_head(&device->board_waits);
	device->number = -1;
	return device;
}

int mem_device_show(struct mem_device *device)
{
	int error;

	mutex_lock(&devices_lock);
	device->number = idr_alloc(&devices, device, 0, DEVICES_MAX, GFP_KERNEL);
	if (device->number < 0) {
		mutex_unlock(&devices_lock);
		return device->number == -ENOSPC ? -EMFILE : device->number;
	}
	device->dev.devt = first_number + device->number;
	error = dev_set_name(&device->dev, "netvm_mem%d", device->number);
	if (!error) {
		cdev_init(&device->cdev, &mem_fops);
		device->cdev.owner = THIS_MODULE;
		error = cdev_device_add(&device->cdev, &device->dev);
	}
	if (error) {
		idr_remove(&devices, device->number);
	} else {
		device->debug = debugfs_create_dir(dev_name(&device->dev), debug_root);
		debugfs_create_file("session", 0400, device->debug, device,
				    &session_fops);
		/* Until it is detached. */
		__module_get(THIS_MODULE);
	}
	mutex_unlock(&devices_lock);
	return error;
}

/* Nobody can open it from now on. */
static int make_gone(struct mem_device *device, bool force)
{
	int error = 0;

	mutex_lock(&device->lock);
	device->forced |= force;
	if (device->gone)
		error = -ENODEV;
	else if (device->opens && !force)
		error = -EBUSY;
	else
		device->gone = true;
	mutex_unlock(&device->lock);
	return error;
}

/* What was written reaches the peer, or the device stays, unless it was forced meanwhile. */
static int part_well(struct mem_device *device)
{
	int error = mem_cache_sync(device, 0, LLONG_MAX);

	if (!error) {
		mem_goodbye(&device->session);
		return 0;
	}
	mutex_lock(&device->lock);
	device->gone = device->forced;
	if (device->forced)
		error = 0;
	mutex_unlock(&device->lock);
	return error;
}

/* Whoever has made it gone has it for himself. */
static int detach_gone(struct mem_device *device, bool force)
{
	int error = 0;

	if (!force && !mem_session_error(&device->session))
		error = part_well(device);
	if (error)
		return error;
	debugfs_remove(device->debug);
	cdev_device_del(&device->cdev, &device->dev);
	mutex_lock(&devices_lock);
	idr_remove(&devices, device->number);
	mutex_unlock(&devices_lock);
	/* Whoever has it open gets errors from now on. */
	mem_session_stop(&device->session);
	put_device(&device->dev);
	module_put(THIS_MODULE);
	return 0;
}

/* Somebody else may have done it, or be doing it. */
static void detach_by_force(struct mem_device *device)
{
	if (!make_gone(device, true))
		detach_gone(device, true);
}

static int detach_number(unsigned int number, bool force)
{
	struct mem_device *device;
	int error;

	mutex_lock(&devices_lock);
	device = idr_find(&devices, number);
	error = device ? make_gone(device, force) : -ENODEV;
	mutex_unlock(&devices_lock);
	return error ? error : detach_gone(device, force);
}

/* ---- the control device ---- */

/* An open file of it. */
struct control_file {
	/* One attachment at a time; protects bound. */
	struct mutex lock;
	/* What goes with this file, with a reference. */
	struct mem_device *bound;
};

static int control_open(struct inode *inode, struct file *file)
{
	struct control_file *open = kzalloc(sizeof(*open), GFP_KERNEL);

	if (!open)
		return -ENOMEM;
	mutex_init(&open->lock);
	file->private_data = open;
	return 0;
}

/* The last descriptor is closed, by whoever made a device or by his death. */
static int control_release(struct inode *inode, struct file *file)
{
	struct control_file *open = file->private_data;

	if (open->bound) {
		detach_by_force(open->bound);
		put_device(&open->bound->dev);
	}
	mutex_destroy(&open->lock);
	kfree(open);
	return 0;
}

static int control_attach(struct control_file *open, void __user *pointer,
			  struct netvm_mem_attach *attach)
{
	bool bound = attach->flags & NETVM_MEM_BOUND;
	struct mem_device *device;
	int error;

	if (bound && open->bound)
		return -EBUSY;
	error = mem_attach(attach, &device);
	if (error)
		return error;
	if (copy_to_user(pointer, attach, sizeof(*attach))) {
		detach_by_force(device);
		error = -EFAULT;
	} else if (bound) {
		open->bound = device;
		return 0;
	}
	put_device(&device->dev);
	return error;
}

static long control_ioctl(struct file *file, unsigned int command,
			  unsigned long argument)
{
	struct control_file *open = file->private_data;
	void __user *pointer = (void __user *)argument;
	struct netvm_mem_attach *attach;
	struct netvm_mem_detach detach;
	int error;

	switch (command) {
	case NETVM_MEM_ATTACH:
		attach = memdup_user(pointer, sizeof(*attach));
		if (IS_ERR(attach))
			return PTR_ERR(attach);
		error = mutex_lock_interruptible(&open->lock);
		if (!error) {
			error = control_attach(open, pointer, attach);
			mutex_unlock(&open->lock);
		}
		kfree_sensitive(attach);
		return error;
	case NETVM_MEM_DETACH:
		if (copy_from_user(&detach, pointer, sizeof(detach)))
			return -EFAULT;
		if (detach.flags & ~NETVM_MEM_FORCE)
			return -EINVAL;
		return detach_number(detach.device,
				     detach.flags & NETVM_MEM_FORCE);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations control_fops = {
	.owner = THIS_MODULE,
	.open = control_open,
	.release = control_release,
	.llseek = noop_llseek,
	.unlocked_ioctl = control_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice control = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "netvm_mem_control",
	.fops = &control_fops,
	.mode = 0600,
};

static int __init netvm_mem_init(void)
{
	int error;

	BUILD_BUG_ON(sizeof(struct netvm_header) != NETVM_HEADER_BYTES);
	BUILD_BUG_ON(!MEM_IO_PAGES || MEM_IO_PAGES * PAGE_SIZE > NETVM_PAYLOAD_BYTES_MAX);
	error = mem_cache_init();
	if (error)
		return error;
	error = class_register(&mem_class);
	if (error)
		goto no_class;
	error = alloc_chrdev_region(&first_number, 0, DEVICES_MAX, "netvm_mem");
	if (error)
		goto no_numbers;
	debug_root = debugfs_create_dir("netvm_mem", NULL);
	error = misc_register(&control);
	if (error)
		goto no_control;
	return 0;

no_control:
	debugfs_remove(debug_root);
	unregister_chrdev_region(first_number, DEVICES_MAX);
no_numbers:
	class_unregister(&mem_class);
no_class:
	mem_cache_exit();
	return error;
}

/* No device is attached, and no file of one is open. */
static void __exit netvm_mem_exit(void)
{
	misc_deregister(&control);
	debugfs_remove(debug_root);
	unregister_chrdev_region(first_number, DEVICES_MAX);
	class_unregister(&mem_class);
	idr_destroy(&devices);
	mem_cache_exit();
}

module_init(netvm_mem_init);
module_exit(netvm_mem_exit);
MODULE_AUTHOR("The netvm authors");
MODULE_DESCRIPTION("Another machine's memory as a character device");
MODULE_LICENSE("GPL");
MODULE_SOFTDEP("pre: gcm");
