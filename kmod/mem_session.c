// SPDX-License-Identifier: GPL-2.0
/*
 * A session: what is sent, when a peer has failed, and how everything ends. Who
 * posts something never touches the socket, whatever signals he gets: a thread
 * sends all frames, and another one receives (mem_receive.c).
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/net.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/socket.h>
#include <linux/tcp.h>
#include <linux/uio.h>
#include <net/sock.h>

#include "mem_compat.h"
#include "mem_session.h"

/* How often to look whether the peer is alive. */
#define LOOK_EVERY_MS 500
/* A peer that lives and does not answer has failed, */
#define ANSWER_TIMEOUT_MS 30000
/* and who sends looks up as often, however little the link takes. */
#define SEND_EVERY_MS 500

int mem_status_error(u16 status)
{
	switch (status) {
	case NETVM_OK:
		return 0;
	case NETVM_NO_HANDLE:
		return -ESTALE;
	case NETVM_OUT_OF_BOUNDS:
		return -ERANGE;
	case NETVM_NO_RIGHTS:
		return -EACCES;
	case NETVM_NO_SEGMENT:
		return -ENOENT;
	case NETVM_FULL:
		return -ENOSPC;
	case NETVM_NO_METHOD:
	case NETVM_UNSUPPORTED:
		return -EOPNOTSUPP;
	case NETVM_BUSY:
		return -EBUSY;
	case NETVM_STOPPING:
		return -ESHUTDOWN;
	default:
		return -EIO;
	}
}

void mem_session_fail(struct mem_session *session, int error,
		      const char *reason, ...)
{
	char text[sizeof(session->reason)];
	bool first;
	va_list args;

	va_start(args, reason);
	vscnprintf(text, sizeof(text), reason, args);
	va_end(args);
	spin_lock(&session->lock);
	first = !session->error;
	if (first) {
		memcpy(session->reason, text, sizeof(text));
		WRITE_ONCE(session->error, error);
	}
	spin_unlock(&session->lock);
	if (!first)
		return;
	/* Whoever sends or receives comes back. */
	kernel_sock_shutdown(session->socket, SHUT_RDWR);
	wake_up_all(&session->sender_waits);
	queue_work(system_unbound_wq, &session->end);
}

/* Sends all of a message; 0 or an error. Only the sender may wait here. */
static int send_message(struct mem_session *session, struct msghdr *message)
{
	int sent = 0;

	WRITE_ONCE(session->sending, true);
	while (sent >= 0 && msg_data_left(message)) {
		sent = sock_sendmsg(session->socket, message);
		if (sent > 0)
			atomic64_add(sent, &session->sent);
		else if (sent == -EAGAIN)
			sent = mem_session_error(session);
	}
	WRITE_ONCE(session->sending, false);
	return min(sent, 0);
}

static int send_record(struct mem_session *session, bool more)
{
	struct msghdr message = { .msg_flags = MSG_NOSIGNAL };
	struct mem_seal *seal = session->seal;
	struct kvec vec = { .iov_base = seal->record };
	int error = mem_seal_close(seal);

	if (error)
		return error;
	vec.iov_len = MEM_LENGTH_BYTES + seal->end + NETVM_TAG_BYTES;
	seal->end = 0;
	if (more)
		message.msg_flags |= MSG_MORE;
	iov_iter_kvec(&message.msg_iter, ITER_SOURCE, &vec, 1, vec.iov_len);
	return send_message(session, &message);
}

/* If more follows, the rest of an encrypted session's last record waits for it. */
static int send(struct mem_session *session, struct msghdr *message, bool more)
{
	struct iov_iter *bytes = &message->msg_iter;
	struct mem_seal *seal = session->seal;

	if (!seal) {
		if (more)
			message->msg_flags |= MSG_MORE;
		return send_message(session, message);
	}
	while (iov_iter_count(bytes) || (seal->end && !more)) {
		u32 part = min_t(size_t, iov_iter_count(bytes),
				 NETVM_RECORD_BYTES_MAX - seal->end);
		int error;

		if (!copy_from_iter_full(seal->record + MEM_LENGTH_BYTES + seal->end,
					 part, bytes))
			return -EFAULT;
		seal->end += part;
		if (seal->end < NETVM_RECORD_BYTES_MAX && more)
			return 0;
		error = send_record(session, more || iov_iter_count(bytes));
		if (error)
			return error;
	}
	return 0;
}

static int send_bytes(struct mem_session *session, const void *bytes,
		      size_t length, bool more)
{
	struct msghdr message = { .msg_flags = MSG_NOSIGNAL };
	struct kvec vec = { .iov_base = (void *)bytes, .iov_len = length };

	iov_iter_kvec(&message.msg_iter, ITER_SOURCE, &vec, 1, length);
	return send(session, &message, more);
}

static int send_vecs(struct mem_session *session, struct mem_request *request,
		     bool more)
{
	struct msghdr message = { .msg_flags = MSG_NOSIGNAL };

	iov_iter_bvec(&message.msg_iter, ITER_SOURCE, request->vecs,
		      request->vec_count, request->bytes);
	return send(session, &message, more);
}

static bool needs_slot(const struct mem_request *request)
{
	return request->header.kind != NETVM_WRITE &&
	       request->header.kind != NETVM_GOODBYE;
}

static bool can_send(struct mem_session *session)
{
	const struct mem_request *first;

	if (!list_empty(&session->answers))
		return true;
	first = list_first_entry_or_null(&session->posted, struct mem_request,
					 list);
	if (!first)
		return false;
	if (needs_slot(first))
		return session->in_flight < session->ops_max;
	/* A full window is no reason to sleep until we have asked for room. */
	return session->written - session->applied < session->window ||
	       !session->asked_for_room;
}

/*
 * Takes the next frame off its queue, numbers it, and fills in its header.
 * Returns the request it is for, if any; *is_answer tells of the others.
 */
static struct mem_request *take_next(struct mem_session *session,
				     struct netvm_header *header,
				     struct mem_answer **answer)
{
	struct mem_request *request;
	unsigned int slot;

	*answer = list_first_entry_or_null(&session->answers,
					   struct mem_answer, list);
	if (*answer) {
		list_del(&(*answer)->list);
		session->answer_count--;
		*header = (*answer)->header;
		return NULL;
	}
	request = list_first_entry_or_null(&session->posted, struct mem_request,
					   list);
	if (!request)
		return NULL;
	if (request->header.kind == NETVM_WRITE &&
	    session->written - session->applied >= session->window) {
		/* Its answer tells what has been applied. */
		session->asked_for_room = true;
		session->asked_for_life++;
		memset(header, 0, sizeof(*header));
		header->kind = NETVM_FLUSH;
		header->flags = NETVM_QUIET;
		header->token = cpu_to_le64(NETVM_PULSE);
		return NULL;
	}
	list_del_init(&request->list);
	request->since = jiffies;
	*header = request->header;
	header->payload_bytes = 0;
	header->sequence = cpu_to_le64(session->written);
	header->token = cpu_to_le64(NETVM_NO_SLOT);
	if (request->header.kind == NETVM_WRITE) {
		header->payload_bytes = cpu_to_le32(request->bytes);
		if (session->written == session->applied)
			session->applied_since = jiffies;
		session->written++;
	} else if (request->body) {
		header->payload_bytes = cpu_to_le32(request->body_bytes);
		memcpy(session->body, request->body, request->body_bytes);
	}
	if (needs_slot(request)) {
		slot = find_first_zero_bit(session->used, NETVM_OPS_MAX);
		__set_bit(slot, session->used);
		session->slots[slot] = request;
		session->in_flight++;
		header->token = cpu_to_le64(slot | (u64)session->generations[slot] << 16);
	}
	return request;
}

static void send_next(struct mem_session *session)
{
	struct mem_request *request;
	struct mem_answer *answer;
	struct netvm_header header;
	bool more, waits;
	int error;

	memset(&header, 0, sizeof(header));
	spin_lock(&session->lock);
	if (session->error || !can_send(session)) {
		spin_unlock(&session->lock);
		return;
	}
	request = take_next(session, &header, &answer);
	more = can_send(session);
	waits = request && needs_slot(request);
	spin_unlock(&session->lock);

	header.applied = cpu_to_le64(READ_ONCE(session->taken));
	kfree(answer);
	/* What has a slot may have been answered already, and be gone. */
	if (request && header.kind == NETVM_WRITE && header.payload_bytes) {
		error = send_bytes(session, &header, sizeof(header), true);
		if (!error)
			error = send_vecs(session, request, more);
	} else if (header.payload_bytes) {
		error = send_bytes(session, &header, sizeof(header), true);
		if (!error)
			error = send_bytes(session, session->body,
					   le32_to_cpu(header.payload_bytes), more);
	} else {
		error = send_bytes(session, &header, sizeof(header), more);
	}
	if (error)
		mem_session_fail(session, -EIO, "cannot send: error %d", -error);
	/* Who has a slot is done when the answer comes, or the session ends. */
	if (request && !waits)
		request->done(request, error ? -EIO : 0);
}

static bool sender_has_work(struct mem_session *session)
{
	bool has;

	spin_lock(&session->lock);
	has = kthread_should_stop() || (!session->error && can_send(session));
	spin_unlock(&session->lock);
	return has;
}

static int send_thread(void *data)
{
	struct mem_session *session = data;
	unsigned int flags = memalloc_noreclaim_save();

	while (!kthread_should_stop()) {
		wait_event_idle(session->sender_waits, sender_has_work(session));
		send_next(session);
		cond_resched();
	}
	memalloc_noreclaim_restore(flags);
	return 0;
}

void mem_post(struct mem_session *session, struct mem_request *request)
{
	int error;

	spin_lock(&session->lock);
	error = session->error;
	if (!error)
		list_add_tail(&request->list, &session->posted);
	spin_unlock(&session->lock);
	if (error)
		request->done(request, error);
	else
		wake_up(&session->sender_waits);
}

void mem_answer(struct mem_session *session, const struct netvm_header *header)
{
	struct mem_answer *answer = kmalloc(sizeof(*answer), GFP_NOIO);
	bool too_many;

	if (!answer) {
		mem_session_fail(session, -ENOMEM, "no memory for an answer");
		return;
	}
	answer->header = *header;
	spin_lock(&session->lock);
	too_many = session->answer_count >= MEM_ANSWERS_MAX;
	if (!too_many) {
		list_add_tail(&answer->list, &session->answers);
		session->answer_count++;
	}
	spin_unlock(&session->lock);
	if (too_many) {
		kfree(answer);
		mem_session_fail(session, -EPROTO,
				 "the peer asks and does not take the answers");
		return;
	}
	wake_up(&session->sender_waits);
}

static void question_done(struct mem_request *request, int error)
{
	struct mem_question *question =
		container_of(request, struct mem_question, request);

	question->error = error;
	complete(&question->ended);
}

int mem_ask(struct mem_session *session, struct mem_question *question)
{
	init_completion(&question->ended);
	question->request.done = question_done;
	mem_post(session, &question->request);
	/* Bounded by the time that the peer has to answer. */
	wait_for_completion(&question->ended);
	return question->error;
}

void mem_goodbye(struct mem_session *session)
{
	static const u8 reason[] = "the device was detached";
	struct mem_question question = {
		.request = {
			.header.kind = NETVM_GOODBYE,
			.body = reason,
			.body_bytes = sizeof(reason) - 1,
		},
	};

	mem_ask(session, &question);
}

enum verdict { FINE, ASK, FAILED };

/* As netvm-core's Pulse::look(). */
static enum verdict look(struct mem_pulse *pulse, u64 now, bool heard)
{
	/* Who comes so late was stopped himself. */
	bool late = now - pulse->looked >= NETVM_KEEP_ALIVE_TIMEOUT_MS / 2;
	bool first = !pulse->begun;
	u64 silent;

	pulse->looked = now;
	pulse->begun = true;
	if (heard || late || first) {
		pulse->heard = now;
		pulse->asked = false;
		if (heard || first || !late)
			return FINE;
	}
	silent = now - pulse->heard;
	if (silent >= NETVM_KEEP_ALIVE_TIMEOUT_MS)
		return FAILED;
	if (!pulse->asked && (late || silent >= NETVM_KEEP_ALIVE_INTERVAL_MS)) {
		pulse->asked = true;
		return ASK;
	}
	return FINE;
}

static bool answer_is_late(struct mem_session *session)
{
	unsigned long limit = msecs_to_jiffies(ANSWER_TIMEOUT_MS);
	bool late = false;
	unsigned int slot;

	spin_lock(&session->lock);
	for_each_set_bit(slot, session->used, NETVM_OPS_MAX)
		late |= time_after(jiffies, session->slots[slot]->since + limit);
	/* Writes have no slots; it may take them and never open its window. */
	if (session->written - session->applied >= session->window)
		late |= time_after(jiffies, session->applied_since + limit);
	spin_unlock(&session->lock);
	return late;
}

/*
 * Who ends the session sets the error under the lock before he cancels the look:
 * so none is queued behind his back.
 */
static void look_in(struct mem_session *session, unsigned int ms)
{
	spin_lock(&session->lock);
	if (!session->error)
		queue_delayed_work(system_unbound_wq, &session->look,
				   msecs_to_jiffies(ms));
	spin_unlock(&session->lock);
}

static void look_at_peer(struct work_struct *work)
{
	struct mem_session *session =
		container_of(work, struct mem_session, look.work);
	u64 moved = atomic64_read(&session->received);
	struct netvm_header header = {
		.kind = NETVM_FLUSH,
		.flags = NETVM_QUIET,
		.token = cpu_to_le64(NETVM_PULSE),
	};

	/* Bytes that were stuck and have moved are a sign of life, too. */
	if (READ_ONCE(session->sending))
		moved += atomic64_read(&session->sent);
	switch (look(&session->pulse, ktime_to_ms(ktime_get()),
		     moved != session->pulse_moved)) {
	case ASK:
		spin_lock(&session->lock);
		session->asked_for_life++;
		spin_unlock(&session->lock);
		mem_answer(session, &header);
		break;
	case FAILED:
		mem_session_fail(session, -EIO, "no sign of life for %u ms",
				 NETVM_KEEP_ALIVE_TIMEOUT_MS);
		return;
	case FINE:
		break;
	}
	session->pulse_moved = moved;
	if (answer_is_late(session)) {
		mem_session_fail(session, -EIO, "no answer for %u ms",
				 ANSWER_TIMEOUT_MS);
		return;
	}
	look_in(session, LOOK_EVERY_MS);
}

static void end_session(struct work_struct *work)
{
	struct mem_session *session =
		container_of(work, struct mem_session, end);
	struct mem_answer *answer, *next_answer;
	struct mem_request *request, *next;
	unsigned int slot;
	LIST_HEAD(left);

	cancel_delayed_work_sync(&session->look);
	kthread_stop(session->sender);
	kthread_stop(session->receiver);
	/* Nothing is posted any more, and nobody looks at slots. */
	spin_lock(&session->lock);
	list_splice_init(&session->posted, &left);
	for_each_set_bit(slot, session->used, NETVM_OPS_MAX)
		list_add_tail(&session->slots[slot]->list, &left);
	bitmap_zero(session->used, NETVM_OPS_MAX);
	session->in_flight = 0;
	spin_unlock(&session->lock);
	list_for_each_entry_safe(request, next, &left, list)
		request->done(request, session->error);
	list_for_each_entry_safe(answer, next_answer, &session->answers, list)
		kfree(answer);
	session->ops->ended(session);
	complete_all(&session->over);
}

int mem_session_start(struct mem_session *session, struct socket *socket,
		      u32 ops_max, u32 window,
		      const struct mem_session_ops *ops)
{
	struct task_struct *sender, *receiver;

	session->ops = ops;
	session->socket = socket;
	session->ops_max = min_t(u32, ops_max, NETVM_OPS_MAX);
	session->window = min_t(u32, window, NETVM_WINDOW);
	spin_lock_init(&session->lock);
	INIT_LIST_HEAD(&session->posted);
	INIT_LIST_HEAD(&session->answers);
	init_waitqueue_head(&session->sender_waits);
	init_completion(&session->over);
	INIT_DELAYED_WORK(&session->look, look_at_peer);
	INIT_WORK(&session->end, end_session);
	netvm_sock_of_memory(socket->sk);
	socket->sk->sk_sndtimeo = msecs_to_jiffies(SEND_EVERY_MS);
	/* Frames say themselves what comes right after them. */
	if (sk_is_tcp(socket->sk))
		tcp_sock_set_nodelay(socket->sk);
	sender = kthread_create(send_thread, session, "netvm_mem_send");
	if (IS_ERR(sender))
		return PTR_ERR(sender);
	receiver = kthread_create(mem_receive_thread, session, "netvm_mem_recv");
	if (IS_ERR(receiver)) {
		kthread_stop(sender);
		return PTR_ERR(receiver);
	}
	session->sender = sender;
	session->receiver = receiver;
	session->started = true;
	/* Nothing ends before the receiver runs: then the threads may be gone. */
	wake_up_process(sender);
	wake_up_process(receiver);
	look_in(session, 0);
	return 0;
}

void mem_session_stop(struct mem_session *session)
{
	if (!session->started)
		return;
	mem_session_fail(session, -ENODEV, "it was detached");
	wait_for_completion(&session->over);
	flush_work(&session->end);
}
