// SPDX-License-Identifier: GPL-2.0
/*
 * Makes a device of a connected socket: takes a lease and slabs of a lender, or
 * imports a segment of a node.
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/net.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <net/sock.h>

#include "mem_compat.h"
#include "mem_device.h"

/* How many calls a peer takes at once is not our concern: one at a time. */
static int call(struct mem_device *device, u32 method, const u8 *body,
		u32 body_bytes, u8 *reply, u32 reply_bytes)
{
	struct mem_question question = {
		.request = {
			.header.kind = NETVM_CALL,
			.header.handle = cpu_to_le32(method),
			.body = body,
			.body_bytes = body_bytes,
			.reply = reply,
			.reply_room = reply_bytes,
		},
	};
	int error = mem_ask(&device->session, &question);

	if (!error && question.request.reply_bytes != reply_bytes)
		error = -EPROTO;
	return error;
}

/* ATTACH, then BORROW for each slab: see crates/netvm/src/lender/protocol.rs. */
static int borrow(struct mem_device *device, const struct netvm_mem_attach *attach)
{
	u8 body[16 + 4 + 2 + NETVM_NAME_BYTES_MAX];
	u32 name_bytes = strlen(attach->name);
	u8 reply[NETVM_BORROW_ANSWER_BYTES];
	u64 count, i;
	int error;

	memset(body, 0, sizeof(body));
	put_unaligned_le32(attach->pid, body + 16);
	put_unaligned_le16(name_bytes, body + 20);
	memcpy(body + 22, attach->name, name_bytes);
	error = call(device, NETVM_METHOD_ATTACH, body, 22 + name_bytes, reply, 8);
	if (error)
		return error;
	device->slab_bytes = get_unaligned_le64(reply);
	/* A page of the cache lies in one slab. */
	if (!device->slab_bytes || device->slab_bytes % PAGE_SIZE ||
	    device->slab_bytes > NETVM_SLAB_BYTES_MAX)
		return -EPROTO;
	/* Of at least one byte (see check()): never 0, and nothing overflows. */
	count = div64_u64(attach->bytes - 1, device->slab_bytes) + 1;
	if (count > NETVM_SLABS_MAX)
		return -EFBIG;
	device->handles = kvcalloc(count, sizeof(u32), GFP_KERNEL);
	if (!device->handles)
		return -ENOMEM;
	for (i = 0; i < count; i++) {
		error = call(device, NETVM_METHOD_BORROW, NULL, 0, reply,
			     sizeof(reply));
		if (error)
			return error;
		if (get_unaligned_le32(reply) != 1)
			return -ENOSPC;
		device->handles[i] = get_unaligned_le32(reply + 4);
		if (fatal_signal_pending(current))
			return -EINTR;
	}
	device->handle_count = count;
	device->bytes = attach->bytes;
	return 0;
}

static int import(struct mem_device *device, const struct netvm_mem_attach *attach)
{
	u8 body[16 + NETVM_NAME_BYTES_MAX];
	u32 name_bytes = strlen(attach->name);
	struct mem_question question = {
		.request = {
			.header.kind = NETVM_IMPORT,
			.body = body,
			.body_bytes = 16 + name_bytes,
		},
	};
	const struct netvm_header *answer = &question.request.answer;
	int error;

	memcpy(body, attach->key, 16);
	memcpy(body + 16, attach->name, name_bytes);
	error = mem_ask(&device->session, &question);
	memzero_explicit(body, sizeof(body));
	if (error)
		return error;
	device->bytes = le64_to_cpu(answer->offset);
	if (!device->bytes)
		return -ENODATA;
	if (device->bytes > MAX_LFS_FILESIZE)
		return -EFBIG;
	/* 1 may be read, 3 written too. */
	if (le32_to_cpu(answer->bytes) != 3)
		device->read_only = true;
	device->handles = kvcalloc(1, sizeof(u32), GFP_KERNEL);
	if (!device->handles)
		return -ENOMEM;
	device->handles[0] = le32_to_cpu(answer->handle);
	device->boarded = le64_to_cpu(answer->sequence);
	device->handle_count = 1;
	/* Never reached: the whole segment is one piece. */
	device->slab_bytes = 1ULL << 63;
	return 0;
}

static int check(const struct netvm_mem_attach *attach)
{
	if (attach->struct_bytes != sizeof(*attach) ||
	    (attach->flags & ~(NETVM_MEM_READ_ONLY | NETVM_MEM_ENCRYPTED |
			       NETVM_MEM_BOUND)) ||
	    !attach->ops_max || attach->window < 2 ||
	    strnlen(attach->name, sizeof(attach->name)) == sizeof(attach->name) ||
	    strnlen(attach->peer, sizeof(attach->peer)) == sizeof(attach->peer))
		return -EINVAL;
	switch (attach->kind) {
	case NETVM_MEM_LENDER:
		if (!attach->bytes)
			return -EINVAL;
		return attach->bytes > MAX_LFS_FILESIZE ? -EFBIG : 0;
	case NETVM_MEM_SEGMENT:
		return attach->bytes ? -EINVAL : 0;
	default:
		return -EINVAL;
	}
}

/* A stream to one peer; with references that sockfd_put() gives back. */
static struct socket *socket_of(int fd)
{
	int error;
	struct socket *socket = sockfd_lookup(fd, &error);
	unsigned short family;

	if (!socket)
		return ERR_PTR(error);
	family = socket->sk->sk_family;
	/* Both name the state of a connection as TCP does. */
	if (socket->type == SOCK_STREAM &&
	    (family == AF_INET || family == AF_INET6 || family == AF_UNIX) &&
	    socket->sk->sk_state == TCP_ESTABLISHED)
		return socket;
	sockfd_put(socket);
	return ERR_PTR(-ENOTCONN);
}

static int make_seals(struct mem_session *session,
		      const struct netvm_mem_attach *attach)
{
	struct mem_seal *seal, *open;

	if (!(attach->flags & NETVM_MEM_ENCRYPTED))
		return 0;
	seal = mem_seal_new(attach->send_key, attach->send_record);
	if (IS_ERR(seal))
		return PTR_ERR(seal);
	session->seal = seal;
	open = mem_seal_new(attach->receive_key, attach->receive_record);
	if (IS_ERR(open))
		return PTR_ERR(open);
	session->open = open;
	return 0;
}

int mem_attach(struct netvm_mem_attach *attach, struct mem_device **made)
{
	struct mem_device *device;
	struct socket *socket;
	int error = check(attach);

	if (error)
		return error;
	socket = socket_of(attach->socket);
	if (IS_ERR(socket))
		return PTR_ERR(socket);
	device = mem_device_new();
	if (!device) {
		sockfd_put(socket);
		return -ENOMEM;
	}
	device->session.socket = socket;
	device->kind = attach->kind;
	device->read_only = attach->flags & NETVM_MEM_READ_ONLY;
	memcpy(device->board_key, attach->board_key, sizeof(device->board_key));
	memcpy(device->name, attach->name, sizeof(device->name));
	memcpy(device->peer, attach->peer, sizeof(device->peer));
	error = make_seals(&device->session, attach);
	memzero_explicit(attach->send_key, sizeof(attach->send_key));
	memzero_explicit(attach->receive_key, sizeof(attach->receive_key));
	if (!error)
		error = mem_session_start(&device->session, socket, attach->ops_max,
					  attach->window, &mem_device_session_ops);
	if (!error)
		error = attach->kind == NETVM_MEM_LENDER ? borrow(device, attach) :
							   import(device, attach);
	if (!error)
		error = mem_cache_make(device);
	/* From then on others may detach it, and the caller looks at it still. */
	get_device(&device->dev);
	if (!error)
		error = mem_device_show(device);
	if (error) {
		put_device(&device->dev);
		put_device(&device->dev);
		return error;
	}
	attach->bytes = device->bytes;
	attach->flags &= ~NETVM_MEM_READ_ONLY;
	attach->flags |= device->read_only ? NETVM_MEM_READ_ONLY : 0;
	attach->device = device->number;
	*made = device;
	return 0;
}
