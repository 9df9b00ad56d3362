/* SPDX-License-Identifier: GPL-2.0 */
/* One session with a lender or a node, over one socket. */
#ifndef NETVM_MEM_SESSION_H
#define NETVM_MEM_SESSION_H

#include <linux/atomic.h>
#include <linux/bitmap.h>
#include <linux/bvec.h>
#include <linux/completion.h>
#include <linux/list.h>
#include <linux/net.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "mem_seal.h"
#include "mem_wire.h"

/* Answers to the peer that wait to be sent; an honest peer asks for less. */
#define MEM_ANSWERS_MAX 1024
/* Most bytes of a body that is sent: a key, or a ticket, and a name. */
#define MEM_BODY_BYTES_MAX (NETVM_NAME_BYTES_MAX + 32)

struct mem_request;
struct mem_session;

/*
 * Ends a request: error is 0, what the peer's refusal means, or why the session
 * is over. Called once for each that was posted, in process context, by a
 * thread of the session.
 */
typedef void (*mem_done_t)(struct mem_request *request, int error);

/* An operation. Its memory is the poster's until it is done. */
struct mem_request {
	struct list_head list;
	mem_done_t done;
	/* kind, flags, status (of a write), handle, bytes and offset are the poster's. */
	struct netvm_header header;
	/* A write's bytes, or places for those of a read. */
	struct bio_vec *vecs;
	unsigned int vec_count;
	/* Bytes of vecs. */
	u32 bytes;
	/* A body to send, in place of vecs, and room for that of the answer. */
	const u8 *body;
	u32 body_bytes;
	u8 *reply;
	u32 reply_room;
	u32 reply_bytes;
	/* The answer's header. */
	struct netvm_header answer;
	/* When it was sent. */
	unsigned long since;
};

/* A request that somebody waits for. */
struct mem_question {
	struct mem_request request;
	struct completion ended;
	int error;
};

/* Whether the peer is alive, as in netvm-core's pulse.rs. Milliseconds. */
struct mem_pulse {
	u64 heard;
	u64 looked;
	bool begun;
	bool asked;
};

/* A frame without payload that answers the peer. */
struct mem_answer {
	struct list_head list;
	struct netvm_header header;
};

/* What a session tells whoever has it. Called by threads of the session. */
struct mem_session_ops {
	/* The peer imports a segment of ours: 0, or a status. */
	u16 (*import)(struct mem_session *session, const u8 *key,
		      const char *name, u32 name_bytes);
	/* The peer notifies us, after it has imported that: 0, or a status. */
	u16 (*notify)(struct mem_session *session, u16 number, u32 value);
	/* The session has failed; nothing of it is under way any more. In a worker. */
	void (*ended)(struct mem_session *session);
};

struct mem_session {
	const struct mem_session_ops *ops;
	struct socket *socket;
	u32 ops_max;
	u32 window;

	/* Protects what follows, up to the socket's threads. */
	spinlock_t lock;
	/* Why everything fails, once it does. */
	int error;
	char reason[160];
	/* Not sent: what was posted, in order, and what goes first. */
	struct list_head posted;
	struct list_head answers;
	unsigned int answer_count;
	/* Sent, and waiting for an answer, by slot. */
	struct mem_request *slots[NETVM_OPS_MAX];
	u16 generations[NETVM_OPS_MAX];
	DECLARE_BITMAP(used, NETVM_OPS_MAX);
	unsigned int in_flight;
	/* Our writes: sent, and applied by the peer. */
	u64 written;
	u64 applied;
	/* The peer has applied something, or there was nothing to apply. */
	unsigned long applied_since;
	/* Signs of life that we have asked for. */
	unsigned int asked_for_life;
	/* A sign of life has been asked for because the window is full. */
	bool asked_for_room;

	/* If it is encrypted; the sender's, and the receiver's. */
	struct mem_seal *seal;
	struct mem_seal *open;
	/* What the sender sends: who posted it may be gone by then. */
	u8 body[MEM_BODY_BYTES_MAX];
	/* It waits until the socket takes more. */
	bool sending;

	/* The sender waits for something to send, and for room. */
	wait_queue_head_t sender_waits;
	struct task_struct *sender;
	struct task_struct *receiver;
	/* The peer's writes: only the receiver changes them. */
	u64 taken;
	u64 told;
	bool imported;
	/* Whatever moved, in bytes: signs of life. */
	atomic64_t received;
	atomic64_t sent;

	struct mem_pulse pulse;
	u64 pulse_moved;
	struct delayed_work look;
	struct work_struct end;
	struct completion over;
	bool started;
};

int mem_session_start(struct mem_session *session, struct socket *socket,
		      u32 ops_max, u32 window,
		      const struct mem_session_ops *ops);
/* Ends it, if it has not ended, and waits until nothing of it is left. */
void mem_session_stop(struct mem_session *session);
/* Ends it soon. Any context that may sleep; of several errors the first counts. */
__printf(3, 4)
void mem_session_fail(struct mem_session *session, int error,
		      const char *reason, ...);

/* Posts a request, which is done even if it fails. */
void mem_post(struct mem_session *session, struct mem_request *request);
/* Posts a question and waits for its end. */
int mem_ask(struct mem_session *session, struct mem_question *question);
/* Says goodbye; nothing can be posted any more. */
void mem_goodbye(struct mem_session *session);

/* For the receiver. */
int mem_receive_thread(void *session);
void mem_answer(struct mem_session *session, const struct netvm_header *header);
int mem_status_error(u16 status);

static inline int mem_session_error(const struct mem_session *session)
{
	return READ_ONCE(session->error);
}

#endif
