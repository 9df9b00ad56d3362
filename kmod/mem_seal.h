/* SPDX-License-Identifier: GPL-2.0 */
/* Encrypted records: one direction of a session (docs/security.md). */
#ifndef NETVM_MEM_SEAL_H
#define NETVM_MEM_SEAL_H

#include <linux/types.h>

#include "mem_wire.h"

#define MEM_LENGTH_BYTES 2

/* Belongs to the thread that sends, or the one that receives. */
struct mem_seal {
	struct crypto_aead *aead;
	struct aead_request *request;
	/* The number of the next record. */
	u64 count;
	/* Of the bytes in it: filled so far (sending), or not yet taken. */
	u32 start, end;
	/* Length, bytes, tag. */
	u8 record[MEM_LENGTH_BYTES + NETVM_RECORD_BYTES_MAX + NETVM_TAG_BYTES];
};

struct mem_seal *mem_seal_new(const u8 *key, u64 count);
void mem_seal_free(struct mem_seal *seal);
/* Encrypts the bytes up to end, and puts length and tag around them. */
int mem_seal_close(struct mem_seal *seal);
/* Decrypts so many bytes, which are there with length and tag. */
int mem_seal_open(struct mem_seal *seal, u32 length);

#endif
