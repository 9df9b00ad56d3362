/* SPDX-License-Identifier: GPL-2.0 */
/*
 * netvm's frames, as crates/netvm-core/src/wire.rs draws them. A test there
 * reads this file: each number and each field is compared with Rust's.
 */
#ifndef NETVM_MEM_WIRE_H
#define NETVM_MEM_WIRE_H

#include <linux/types.h>

/* A frame is this header, then payload_bytes bytes. */
struct netvm_header {
	__u8 kind;
	__u8 flags;
	__le16 status;
	__le32 payload_bytes;
	__le64 sequence;
	__le64 applied;
	__le64 token;
	__le32 handle;
	__le32 bytes;
	__le64 offset;
};

#define NETVM_HEADER_BYTES 48
#define NETVM_HELLO_BYTES 64
#define NETVM_VERSION 2

/* Kinds of frames. */
#define NETVM_WRITE 1
#define NETVM_READ 2
#define NETVM_READ_REPLY 3
#define NETVM_FLUSH 4
#define NETVM_FLUSH_ACK 5
#define NETVM_ACKNOWLEDGE 6
#define NETVM_IMPORT 7
#define NETVM_IMPORT_ACK 8
#define NETVM_UNIMPORT 9
#define NETVM_CALL 10
#define NETVM_CALL_REPLY 11
#define NETVM_ERROR 12
#define NETVM_GOODBYE 13
#define NETVM_ATOMIC 14
#define NETVM_ATOMIC_REPLY 15

/* Flags of writes, and of flushes. */
#define NETVM_FENCE 1
#define NETVM_COUNT 2
#define NETVM_POST 4
#define NETVM_QUEUE 8
#define NETVM_QUIET 1

/* How an operation ended. */
#define NETVM_OK 0
#define NETVM_NO_HANDLE 1
#define NETVM_OUT_OF_BOUNDS 2
#define NETVM_NO_RIGHTS 3
#define NETVM_NO_SEGMENT 4
#define NETVM_FULL 5
#define NETVM_NO_METHOD 6
#define NETVM_BAD_REQUEST 7
#define NETVM_BUSY 8
#define NETVM_STOPPING 9
#define NETVM_FAULT 10
#define NETVM_MISALIGNED 11
#define NETVM_UNSUPPORTED 12
#define NETVM_AWAY 13

/* Limits. */
#define NETVM_PAYLOAD_BYTES_MAX 1048576
#define NETVM_BODY_BYTES_MAX 65536
#define NETVM_ATOMIC_BYTES 16
#define NETVM_NAME_BYTES_MAX 255
#define NETVM_OPS_MAX 256
#define NETVM_WINDOW 4096
#define NETVM_ACKNOWLEDGE_EVERY 1024
#define NETVM_SLABS_MAX 1048576
#define NETVM_SLAB_BYTES_MAX 1073741824

/* Encrypted records. */
#define NETVM_RECORD_BYTES_MAX 16384
#define NETVM_TAG_BYTES 16
#define NETVM_REKEY_RECORDS 1048576

/* Tokens that stand for no operation of ours. */
#define NETVM_NO_SLOT (~0ULL)
#define NETVM_PULSE (~0ULL - 1)

/* When a silent peer is asked, and given up; milliseconds. */
#define NETVM_KEEP_ALIVE_INTERVAL_MS 1000
#define NETVM_KEEP_ALIVE_TIMEOUT_MS 4000

/* What a lender may be called for (crates/netvm/src/lender/protocol.rs). */
#define NETVM_METHOD_ATTACH 1
#define NETVM_METHOD_BORROW 2
#define NETVM_BORROW_ANSWER_BYTES 28

#endif
