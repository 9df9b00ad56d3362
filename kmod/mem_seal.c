// SPDX-License-Identifier: GPL-2.0
/* AES-256-GCM records, as crates/netvm/src/link/sealed.rs and auth.rs have them. */
#include <crypto/aead.h>
#include <linux/err.h>
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "mem_compat.h"
#include "mem_seal.h"

#define KEY_BYTES 32
#define NONCE_BYTES 12

/* context_bytes, then length bytes (and, to be opened, a tag) at bytes. */
static int run(struct mem_seal *seal, u64 number, u8 *bytes, u32 context_bytes,
	       u32 length, bool opens)
{
	DECLARE_CRYPTO_WAIT(wait);
	u8 nonce[NONCE_BYTES] = {};
	struct scatterlist list;
	int result;

	/* As in Noise with AESGCM. */
	put_unaligned_be64(number, nonce + 4);
	sg_init_one(&list, bytes, context_bytes + length + NETVM_TAG_BYTES);
	aead_request_set_callback(seal->request,
				  CRYPTO_TFM_REQ_MAY_BACKLOG | CRYPTO_TFM_REQ_MAY_SLEEP,
				  crypto_req_done, &wait);
	aead_request_set_ad(seal->request, context_bytes);
	if (opens) {
		aead_request_set_crypt(seal->request, &list, &list,
				       length + NETVM_TAG_BYTES, nonce);
		result = crypto_aead_decrypt(seal->request);
	} else {
		aead_request_set_crypt(seal->request, &list, &list, length, nonce);
		result = crypto_aead_encrypt(seal->request);
	}
	return crypto_wait_req(result, &wait);
}

/* As Noise's Rekey: the old key does not follow from the new one. */
static int replace_key(struct mem_seal *seal)
{
	u8 *bytes = kzalloc(KEY_BYTES + NETVM_TAG_BYTES, GFP_NOIO);
	int error;

	if (!bytes)
		return -ENOMEM;
	error = run(seal, U64_MAX, bytes, 0, KEY_BYTES, false);
	if (!error)
		error = crypto_aead_setkey(seal->aead, bytes, KEY_BYTES);
	kfree_sensitive(bytes);
	return error;
}

static int next(struct mem_seal *seal, u64 *number)
{
	int error = 0;

	/* The last number is the one that makes new keys. */
	if (seal->count == U64_MAX)
		return -EOVERFLOW;
	if (seal->count && seal->count % NETVM_REKEY_RECORDS == 0)
		error = replace_key(seal);
	*number = seal->count++;
	return error;
}

int mem_seal_close(struct mem_seal *seal)
{
	u64 number;
	int error = next(seal, &number);

	put_unaligned_le16(seal->end, seal->record);
	return error ? error : run(seal, number, seal->record, MEM_LENGTH_BYTES,
				   seal->end, false);
}

int mem_seal_open(struct mem_seal *seal, u32 length)
{
	u64 number;
	int error = next(seal, &number);

	return error ? error : run(seal, number, seal->record, MEM_LENGTH_BYTES,
				   length, true);
}

struct mem_seal *mem_seal_new(const u8 *key, u64 count)
{
	struct mem_seal *seal = kzalloc(sizeof(*seal), GFP_KERNEL);
	int error = -ENOMEM;

	if (!seal)
		return ERR_PTR(error);
	seal->count = count;
	seal->aead = crypto_alloc_aead("gcm(aes)", 0, 0);
	if (IS_ERR(seal->aead)) {
		error = PTR_ERR(seal->aead);
		seal->aead = NULL;
		/* Not to be mistaken for a segment that is not there. */
		if (error == -ENOENT)
			error = -ENOPKG;
		goto failed;
	}
	seal->request = aead_request_alloc(seal->aead, GFP_KERNEL);
	if (!seal->request)
		goto failed;
	error = crypto_aead_setkey(seal->aead, key, KEY_BYTES);
	if (!error)
		error = crypto_aead_setauthsize(seal->aead, NETVM_TAG_BYTES);
	if (!error)
		return seal;
failed:
	mem_seal_free(seal);
	return ERR_PTR(error);
}

void mem_seal_free(struct mem_seal *seal)
{
	if (!seal)
		return;
	if (seal->request)
		aead_request_free(seal->request);
	if (seal->aead)
		crypto_free_aead(seal->aead);
	kfree_sensitive(seal);
}
