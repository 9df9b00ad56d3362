// SPDX-License-Identifier: GPL-2.0
/*
 * What a session receives. Nothing the peer sends is believed: each length is
 * checked before a byte is taken, each answer must have been asked for, and
 * whatever makes no sense ends the session, and nothing else.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kthread.h>
#include <linux/net.h>
#include <linux/slab.h>
#include <linux/socket.h>
#include <linux/uio.h>

#include "mem_compat.h"
#include "mem_session.h"
#include "netvm_mem.h"

/* The handle of what the peer may import: a segment without bytes. */
#define BOARD_HANDLE 1

/* Bytes of a body that are thrown away in one step. */
#define CHUNK_BYTES 512

static int violation(struct mem_session *session, const char *what, u64 number)
{
	mem_session_fail(session, -EPROTO, "the peer %s (%llu)", what, number);
	return -EPROTO;
}

static int receive_message(struct mem_session *session, struct msghdr *message)
{
	while (msg_data_left(message)) {
		/* As it comes: on a slow link, too, bytes are signs of life. */
		int got = sock_recvmsg(session->socket, message, 0);

		if (got > 0) {
			atomic64_add(got, &session->received);
			continue;
		}
		if (mem_session_error(session))
			return mem_session_error(session);
		if (got == -EAGAIN || got == -EINTR || got == -ERESTARTSYS)
			continue;
		if (got)
			mem_session_fail(session, -EIO, "the connection failed: error %d", -got);
		else
			mem_session_fail(session, -EIO, "the peer has ended the connection");
		return -EIO;
	}
	return 0;
}

static int receive_plain(struct mem_session *session, void *bytes, size_t length)
{
	struct msghdr message = {};
	struct kvec vec = { .iov_base = bytes, .iov_len = length };

	iov_iter_kvec(&message.msg_iter, ITER_DEST, &vec, 1, length);
	return receive_message(session, &message);
}

static int receive_record(struct mem_session *session)
{
	struct mem_seal *seal = session->open;
	u32 length;
	int error;

	error = receive_plain(session, seal->record, MEM_LENGTH_BYTES);
	if (error)
		return error;
	length = get_unaligned_le16(seal->record);
	if (!length || length > NETVM_RECORD_BYTES_MAX)
		return violation(session, "sends a record of wrong length", length);
	error = receive_plain(session, seal->record + MEM_LENGTH_BYTES,
			      length + NETVM_TAG_BYTES);
	if (error)
		return error;
	error = mem_seal_open(seal, length);
	if (error) {
		mem_session_fail(session, -EIO,
				 "encrypted bytes were altered on the way (error %d)",
				 -error);
		return -EIO;
	}
	seal->start = 0;
	seal->end = length;
	return 0;
}

/* Until the message is full. */
static int receive(struct mem_session *session, struct msghdr *message)
{
	struct iov_iter *bytes = &message->msg_iter;
	struct mem_seal *seal = session->open;

	if (!seal)
		return receive_message(session, message);
	while (iov_iter_count(bytes)) {
		u32 part = min_t(size_t, iov_iter_count(bytes), seal->end - seal->start);
		u8 *from = seal->record + MEM_LENGTH_BYTES + seal->start;
		int error;

		if (copy_to_iter(from, part, bytes) != part)
			return -EFAULT;
		seal->start += part;
		if (!iov_iter_count(bytes))
			break;
		error = receive_record(session);
		if (error)
			return error;
	}
	return 0;
}

static int receive_bytes(struct mem_session *session, void *bytes, size_t length)
{
	struct msghdr message = {};
	struct kvec vec = { .iov_base = bytes, .iov_len = length };

	iov_iter_kvec(&message.msg_iter, ITER_DEST, &vec, 1, length);
	return receive(session, &message);
}

static int receive_vecs(struct mem_session *session, struct mem_request *request)
{
	struct msghdr message = {};

	iov_iter_bvec(&message.msg_iter, ITER_DEST, request->vecs,
		      request->vec_count, request->bytes);
	return receive(session, &message);
}

static int discard(struct mem_session *session, u32 length)
{
	u8 chunk[CHUNK_BYTES];

	while (length) {
		u32 part = min_t(u32, length, sizeof(chunk));
		int error = receive_bytes(session, chunk, part);

		if (error)
			return error;
		length -= part;
	}
	return 0;
}

static u32 payload_bytes_max(u8 kind)
{
	switch (kind) {
	case NETVM_WRITE:
	case NETVM_READ_REPLY:
		return NETVM_PAYLOAD_BYTES_MAX;
	case NETVM_IMPORT:
	case NETVM_CALL:
	case NETVM_CALL_REPLY:
	case NETVM_GOODBYE:
		return NETVM_BODY_BYTES_MAX;
	case NETVM_ATOMIC:
		return NETVM_ATOMIC_BYTES;
	default:
		return 0;
	}
}

/* The request that an answer is for, which keeps its slot; or NULL. */
static struct mem_request *find(struct mem_session *session,
				const struct netvm_header *header)
{
	u64 token = le64_to_cpu(header->token);
	unsigned int slot = token & 0xffff;
	struct mem_request *request = NULL;

	spin_lock(&session->lock);
	if (slot < NETVM_OPS_MAX && test_bit(slot, session->used) &&
	    token >> 16 == session->generations[slot])
		request = session->slots[slot];
	spin_unlock(&session->lock);
	return request;
}

static void finish(struct mem_session *session, struct mem_request *request,
		   const struct netvm_header *header, int error)
{
	unsigned int slot = le64_to_cpu(header->token) & 0xffff;

	request->answer = *header;
	spin_lock(&session->lock);
	__clear_bit(slot, session->used);
	session->slots[slot] = NULL;
	session->generations[slot]++;
	session->in_flight--;
	spin_unlock(&session->lock);
	wake_up(&session->sender_waits);
	request->done(request, error);
}

static int refuse(struct mem_session *session, const struct netvm_header *header,
		  u16 status)
{
	struct netvm_header answer = {
		.kind = NETVM_ERROR,
		.status = cpu_to_le16(status),
		.token = header->token,
	};

	mem_answer(session, &answer);
	return 0;
}

/* ---- answers ---- */

static int take_read_reply(struct mem_session *session,
			   const struct netvm_header *header, u32 length)
{
	struct mem_request *request = find(session, header);
	int error;

	if (!request || request->header.kind != NETVM_READ ||
	    request->bytes != length)
		return violation(session, "sends bytes that nobody asked for", length);
	/* If they do not all come, the session's end is the request's. */
	error = receive_vecs(session, request);
	if (!error)
		finish(session, request, header, 0);
	return error;
}

static int take_call_reply(struct mem_session *session,
			   const struct netvm_header *header, u32 length)
{
	struct mem_request *request = find(session, header);
	int error;

	if (!request || request->header.kind != NETVM_CALL)
		return violation(session, "answers a call that nobody made", length);
	if (length > request->reply_room)
		return violation(session, "answers a call with too much", length);
	error = receive_bytes(session, request->reply, length);
	if (error)
		return error;
	request->reply_bytes = length;
	finish(session, request, header, 0);
	return 0;
}

static int take_flush_ack(struct mem_session *session,
			  const struct netvm_header *header)
{
	struct mem_request *request;
	bool asked;

	if (le64_to_cpu(header->token) == NETVM_PULSE) {
		spin_lock(&session->lock);
		asked = session->asked_for_life > 0;
		session->asked_for_life -= asked;
		session->asked_for_room = false;
		spin_unlock(&session->lock);
		wake_up(&session->sender_waits);
		return asked ? 0 : violation(session, "gives a sign of life unasked", 0);
	}
	request = find(session, header);
	if (!request || request->header.kind != NETVM_FLUSH)
		return violation(session, "answers a flush that nobody made", 0);
	finish(session, request, header,
	       mem_status_error(le16_to_cpu(header->status)));
	return 0;
}

static int take_import_ack(struct mem_session *session,
			   const struct netvm_header *header)
{
	struct mem_request *request = find(session, header);

	if (!request || request->header.kind != NETVM_IMPORT)
		return violation(session, "answers an import that nobody made", 0);
	finish(session, request, header, 0);
	return 0;
}

static int take_error(struct mem_session *session,
		      const struct netvm_header *header)
{
	struct mem_request *request = find(session, header);
	u16 status = le16_to_cpu(header->status);

	if (!request) {
		/* A write: its pages are clean by now, so its bytes are lost. */
		mem_session_fail(session, -EIO,
				 "the peer refused a write (status %u): data is missing",
				 status);
		return -EIO;
	}
	if (!status)
		return violation(session, "refuses with status", status);
	finish(session, request, header, mem_status_error(status));
	return 0;
}

static int take_goodbye(struct mem_session *session, u32 length)
{
	char text[100];
	u32 part = min_t(u32, length, sizeof(text) - 1);
	int error = receive_bytes(session, text, part);
	u32 i;

	if (error)
		return error;
	/* It goes to the log and to sysfs. */
	for (i = 0; i < part; i++)
		if (text[i] < ' ' || text[i] > '~')
			text[i] = '?';
	text[part] = 0;
	mem_session_fail(session, -EIO, "the peer said goodbye: %s", text);
	return -EIO;
}

/* ---- requests ---- */

static int take_import(struct mem_session *session,
		       const struct netvm_header *header, u32 length)
{
	struct netvm_header answer = {
		.kind = NETVM_IMPORT_ACK,
		.token = header->token,
		.handle = cpu_to_le32(BOARD_HANDLE),
		/* Rights to read and write, of no bytes. */
		.bytes = cpu_to_le32(3),
		.sequence = cpu_to_le64(NETVM_MEM_NOTIFICATIONS),
	};
	u8 body[16 + NETVM_NAME_BYTES_MAX + 1];
	u32 part = min_t(u32, length, sizeof(body));
	u16 status = NETVM_NO_SEGMENT;
	int error;

	if (length < 16)
		return violation(session, "imports without a key", length);
	error = receive_bytes(session, body, part);
	if (!error)
		error = discard(session, length - part);
	if (error)
		return error;
	if (part == length)
		status = session->ops->import(session, body, (char *)body + 16,
					      part - 16);
	if (status)
		return refuse(session, header, status);
	session->imported = true;
	mem_answer(session, &answer);
	return 0;
}

/* On one connection writes come in the order of their numbers. */
static int take_write(struct mem_session *session,
		      const struct netvm_header *header, u32 length)
{
	u16 number = le16_to_cpu(header->status);
	u32 value = le32_to_cpu(header->bytes);
	u16 status = NETVM_OK;
	int error;

	if (le64_to_cpu(header->sequence) != session->taken)
		return violation(session, "writes out of order",
				 le64_to_cpu(header->sequence));
	error = discard(session, length);
	if (error)
		return error;
	if (!session->imported || le32_to_cpu(header->handle) != BOARD_HANDLE)
		status = NETVM_NO_HANDLE;
	else if (length || header->offset)
		status = NETVM_OUT_OF_BOUNDS;
	else if ((header->flags & ~NETVM_FENCE) == NETVM_COUNT)
		status = session->ops->notify(session, number, 0);
	else if ((header->flags & ~NETVM_FENCE) == NETVM_POST && value)
		status = session->ops->notify(session, number, value);
	else if (header->flags & ~NETVM_FENCE)
		status = NETVM_UNSUPPORTED;
	/* The sender tells it. */
	WRITE_ONCE(session->taken, session->taken + 1);
	if (session->taken - session->told >= NETVM_ACKNOWLEDGE_EVERY) {
		struct netvm_header answer = { .kind = NETVM_ACKNOWLEDGE };

		session->told = session->taken;
		mem_answer(session, &answer);
	}
	return status ? refuse(session, header, status) : 0;
}

static int take_flush(struct mem_session *session,
		      const struct netvm_header *header)
{
	struct netvm_header answer = {
		.kind = NETVM_FLUSH_ACK,
		.token = header->token,
	};

	if (le64_to_cpu(header->token) != NETVM_PULSE &&
	    le64_to_cpu(header->sequence) > session->taken)
		return violation(session, "flushes what it has not written",
				 le64_to_cpu(header->sequence));
	mem_answer(session, &answer);
	return 0;
}

static int take_frame(struct mem_session *session)
{
	struct netvm_header header;
	bool applied_is_sane;
	u64 applied;
	u32 length;
	int error;

	error = receive_bytes(session, &header, sizeof(header));
	if (error)
		return error;
	length = le32_to_cpu(header.payload_bytes);
	if (length > payload_bytes_max(header.kind))
		return violation(session, "sends a frame that is too long", length);
	applied = le64_to_cpu(header.applied);
	spin_lock(&session->lock);
	applied_is_sane = applied <= session->written;
	if (applied_is_sane && applied > session->applied) {
		session->applied = applied;
		session->applied_since = jiffies;
	}
	spin_unlock(&session->lock);
	if (!applied_is_sane)
		return violation(session, "has applied what was not sent", applied);
	wake_up(&session->sender_waits);

	switch (header.kind) {
	case NETVM_READ_REPLY:
		return take_read_reply(session, &header, length);
	case NETVM_CALL_REPLY:
		return take_call_reply(session, &header, length);
	case NETVM_FLUSH_ACK:
		return take_flush_ack(session, &header);
	case NETVM_IMPORT_ACK:
		return take_import_ack(session, &header);
	case NETVM_ERROR:
		return take_error(session, &header);
	case NETVM_GOODBYE:
		return take_goodbye(session, length);
	case NETVM_ACKNOWLEDGE:
		return 0;
	case NETVM_IMPORT:
		return take_import(session, &header, length);
	case NETVM_WRITE:
		return take_write(session, &header, length);
	case NETVM_FLUSH:
		return take_flush(session, &header);
	case NETVM_CALL:
		/* Shared memory, locks and so on: a peer does without. */
		error = discard(session, length);
		return error ? error : refuse(session, &header, NETVM_NO_METHOD);
	case NETVM_READ:
	case NETVM_ATOMIC:
	case NETVM_UNIMPORT:
		error = discard(session, length);
		return error ? error : refuse(session, &header, NETVM_NO_HANDLE);
	default:
		return violation(session, "sends a frame of no kind", header.kind);
	}
}

int mem_receive_thread(void *data)
{
	struct mem_session *session = data;

	while (!kthread_should_stop() && !take_frame(session))
		cond_resched();
	while (!kthread_should_stop()) {
		set_current_state(TASK_IDLE);
		if (!kthread_should_stop())
			schedule();
		__set_current_state(TASK_RUNNING);
	}
	return 0;
}
