// SPDX-License-Identifier: GPL-2.0
/*
 * A lender and a node for tests of netvm_mem: memory_peer PORT. It does what a
 * real one does, one frame after the other, and what no real one does to whom
 * imports a segment that is named after it:
 *
 *   grid          1000003 bytes that live as long as the program, key 16 times 'k'
 *   fixed         the same bytes, which cannot be written
 *   notify        4096 bytes; whoever notifies it of N is notified of N + 1 (a count) and N + 2 (what was posted, plus one)
 *   evil-WHAT     reads are answered with WHAT
 *   evil-slow     the first read's bytes come slowly, for longer than a peer may be silent
 *   evil-window   everything is answered, and nothing is ever said to be applied
 *
 * A lender's slabs have 64 KiB, of which it has 256. Whom it shows as evil-slab-BYTES
 * is told that they have BYTES.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../kmod/mem_wire.h"
#include "../../kmod/netvm_mem.h"

#define GRID_BYTES 1000003u
#define SLAB_BYTES 65536u
#define SLABS 256u

static const unsigned char magic[8] = "netvm\r\n\x1a";
static int fd;
static unsigned char *grid;
static unsigned char *memory;
static uint64_t memory_bytes, taken, written;
static uint32_t lent;
static char evil[64];
static int writable, is_lender;
static uint32_t board;

static void get(void *bytes, size_t length)
{
	char *at = bytes;

	while (length) {
		ssize_t got = read(fd, at, length);

		if (got <= 0)
			exit(0);
		at += got;
		length -= got;
	}
}

static void put(const void *bytes, size_t length)
{
	const char *at = bytes;

	while (length) {
		ssize_t sent = write(fd, at, length);

		if (sent <= 0)
			exit(0);
		at += sent;
		length -= sent;
	}
}

static void frame(struct netvm_header header, const void *payload, uint32_t length)
{
	header.payload_bytes = length;
	header.applied = strcmp(evil, "window") ? taken : 0;
	put(&header, sizeof(header));
	put(payload, length);
}

static void refuse(const struct netvm_header *asked, int status)
{
	frame((struct netvm_header){ .kind = NETVM_ERROR, .status = status, .token = asked->token }, NULL, 0);
}

static void notify(int number, uint32_t value)
{
	struct netvm_header header = { .kind = NETVM_WRITE, .status = number, .bytes = value, .handle = board,
				       .flags = value ? NETVM_POST : NETVM_COUNT, .sequence = written++,
				       .token = NETVM_NO_SLOT };

	frame(header, NULL, 0);
}

/* Where the bytes are; NULL when it was refused. */
static unsigned char *place(const struct netvm_header *header, uint32_t length)
{
	uint64_t most = is_lender ? SLAB_BYTES : memory_bytes;
	uint64_t base = is_lender ? (uint64_t)header->handle * SLAB_BYTES : 0;

	if (is_lender ? header->handle >= lent : header->handle != 7) {
		refuse(header, NETVM_NO_HANDLE);
		return NULL;
	}
	if (header->offset > most || most - header->offset < length) {
		refuse(header, NETVM_OUT_OF_BOUNDS);
		return NULL;
	}
	return memory + base + header->offset;
}

static void answer_badly(const struct netvm_header *asked)
{
	static unsigned char junk[2 << 20];
	struct netvm_header reply = { .kind = NETVM_READ_REPLY, .token = asked->token, .applied = taken,
				      .payload_bytes = asked->bytes };
	const char *text = "over\x1b[2J\n";

	if (!strcmp(evil, "kind")) {
		reply.kind = 99;
		reply.payload_bytes = 0;
		put(&reply, sizeof(reply));
	} else if (!strcmp(evil, "long")) {
		reply.payload_bytes = sizeof(junk);
		put(&reply, sizeof(reply));
		put(junk, sizeof(junk));
	} else if (!strcmp(evil, "short")) {
		frame(reply, junk, asked->bytes - 1);
	} else if (!strcmp(evil, "token")) {
		reply.token ^= 1ull << 16;
		frame(reply, junk, asked->bytes);
	} else if (!strcmp(evil, "slot")) {
		reply.token = 0xfffe;
		frame(reply, junk, asked->bytes);
	} else if (!strcmp(evil, "twice")) {
		frame(reply, junk, asked->bytes);
		frame(reply, junk, asked->bytes);
	} else if (!strcmp(evil, "applied")) {
		reply.applied = 1000;
		put(&reply, sizeof(reply));
		put(junk, asked->bytes);
	} else if (!strcmp(evil, "alive")) {
		frame((struct netvm_header){ .kind = NETVM_FLUSH_ACK, .token = NETVM_PULSE }, NULL, 0);
	} else if (!strcmp(evil, "call")) {
		frame((struct netvm_header){ .kind = NETVM_CALL_REPLY, .token = asked->token }, junk, 60000);
	} else if (!strcmp(evil, "import")) {
		frame((struct netvm_header){ .kind = NETVM_IMPORT_ACK, .token = asked->token }, NULL, 0);
	} else if (!strcmp(evil, "order")) {
		frame((struct netvm_header){ .kind = NETVM_WRITE, .sequence = 5 }, junk, 9);
	} else if (!strcmp(evil, "wait")) {
		frame((struct netvm_header){ .kind = NETVM_FLUSH, .sequence = 5 }, NULL, 0);
	} else if (!strcmp(evil, "slow")) {
		uint32_t at, part;

		put(&reply, sizeof(reply));
		for (at = 0; at < asked->bytes; at += part) {
			part = asked->bytes - at < 2048 ? asked->bytes - at : 2048;
			usleep(800000);
			put(grid + asked->offset + at, part);
		}
		/* Once: what the kernel reads ahead would take as long. */
		evil[0] = 0;
	} else if (!strcmp(evil, "cut")) {
		put(&reply, sizeof(reply));
		put(junk, 1000);
		exit(0);
	} else if (!strcmp(evil, "goodbye")) {
		frame((struct netvm_header){ .kind = NETVM_GOODBYE, .status = NETVM_STOPPING }, text, strlen(text));
	} else if (!strcmp(evil, "error")) {
		refuse(asked, NETVM_AWAY);
	} else if (!strcmp(evil, "flood")) {
		for (;;)
			frame((struct netvm_header){ .kind = NETVM_FLUSH }, NULL, 0);
	} else if (!strcmp(evil, "requests")) {
		/* All of these are refused, and then it is honest. */
		frame((struct netvm_header){ .kind = NETVM_CALL, .handle = 5, .token = 1 }, junk, 60000);
		frame((struct netvm_header){ .kind = NETVM_ATOMIC, .bytes = 8, .token = 2 }, junk, 16);
		frame((struct netvm_header){ .kind = NETVM_READ, .bytes = 8, .token = 3 }, NULL, 0);
		frame((struct netvm_header){ .kind = NETVM_UNIMPORT, .token = 4 }, NULL, 0);
		frame((struct netvm_header){ .kind = NETVM_IMPORT, .token = 5 }, junk, 60000);
		frame((struct netvm_header){ .kind = NETVM_IMPORT, .token = 6 }, junk, 16 + 9);
		frame((struct netvm_header){ .kind = NETVM_WRITE, .sequence = written++, .token = 7 }, junk, 70000);
		frame(reply, memory + asked->offset, asked->bytes);
	} else {
		/* mute: nothing more, not even a sign of life. */
		sleep(1000);
	}
}

static void serve_import(const struct netvm_header *header, const unsigned char *body, uint32_t length)
{
	struct netvm_header answer = { .kind = NETVM_IMPORT_ACK, .token = header->token, .handle = 7, .sequence = 64 };
	char name[256] = "";
	int i;

	if (length < 16 || length > 16 + 255)
		exit(1);
	memcpy(name, body + 16, length - 16);
	for (i = 0; i < 16; i++) {
		if (body[i] != 'k') {
			refuse(header, NETVM_NO_SEGMENT);
			return;
		}
	}
	memory = grid;
	memory_bytes = GRID_BYTES;
	writable = strcmp(name, "fixed") && strcmp(name, "evil-refuse");
	if (!strcmp(name, "notify")) {
		memory_bytes = 4096;
	} else if (!strncmp(name, "evil-", 5)) {
		snprintf(evil, sizeof(evil), "%.60s", name + 5);
	} else if (strcmp(name, "grid") && strcmp(name, "fixed")) {
		refuse(header, NETVM_NO_SEGMENT);
		return;
	}
	if (!strcmp(name, "fixed") || !strcmp(name, "grid"))
		answer.sequence = 0;
	answer.offset = memory_bytes;
	answer.bytes = strcmp(name, "fixed") ? 3 : 1;
	frame(answer, NULL, 0);
	if (!strcmp(name, "notify")) {
		struct netvm_header ask = { .kind = NETVM_IMPORT, .token = 77 };
		char text[16 + sizeof(NETVM_MEM_BOARD) - 1];

		memset(text, 'b', 16);
		memcpy(text + 16, NETVM_MEM_BOARD, sizeof(NETVM_MEM_BOARD) - 1);
		frame(ask, text, sizeof(text));
	}
}

static void serve_call(const struct netvm_header *header, const unsigned char *body, uint32_t length)
{
	struct netvm_header answer = { .kind = NETVM_CALL_REPLY, .token = header->token };
	uint64_t slab_bytes = SLAB_BYTES;
	struct {
		uint32_t had, slab;
		uint64_t size, used;
		uint32_t quota;
	} given = { 0, 0, (uint64_t)SLABS * SLAB_BYTES, 0, 0 };

	if (header->handle == NETVM_METHOD_ATTACH) {
		char name[256] = "";

		if (length < 22 || length > 22 + 255)
			exit(1);
		memcpy(name, body + 22, length - 22);
		if (!strncmp(name, "evil-slab-", 10))
			slab_bytes = strtoull(name + 10, NULL, 0);
		is_lender = 1;
		writable = 1;
		memory = calloc(SLABS, SLAB_BYTES);
		if (!memory)
			exit(1);
		frame(answer, &slab_bytes, sizeof(slab_bytes));
	} else if (header->handle == NETVM_METHOD_BORROW) {
		if (lent < SLABS) {
			given.had = 1;
			given.slab = lent++;
		}
		given.used = (uint64_t)lent * SLAB_BYTES;
		/* Without what the compiler puts behind it. */
		frame(answer, &given, NETVM_BORROW_ANSWER_BYTES);
	} else {
		refuse(header, NETVM_NO_METHOD);
	}
}

static void serve_write(const struct netvm_header *header, const unsigned char *body, uint32_t length)
{
	unsigned char *to;

	/* On one connection they come in order. */
	if (header->sequence != taken++)
		exit(2);
	if (header->flags) {
		notify(header->status + 1, 0);
		notify(header->status + 2, header->bytes + 1);
	}
	if (!writable) {
		refuse(header, NETVM_NO_RIGHTS);
		return;
	}
	to = place(header, length);
	if (to)
		memcpy(to, body, length);
	if (taken % NETVM_ACKNOWLEDGE_EVERY == 0)
		frame((struct netvm_header){ .kind = NETVM_ACKNOWLEDGE }, NULL, 0);
}

static void serve(void)
{
	static unsigned char body[NETVM_PAYLOAD_BYTES_MAX];
	unsigned char hello[64];
	struct netvm_header header;
	unsigned char *from;

	get(hello, sizeof(hello));
	if (memcmp(hello, magic, 8))
		exit(1);
	/* The answer is the same with another role. */
	hello[12] = hello[12] == 1 ? 4 : 3;
	put(hello, sizeof(hello));
	for (;;) {
		uint32_t length;

		get(&header, sizeof(header));
		length = header.payload_bytes;
		if (length > sizeof(body))
			exit(1);
		get(body, length);
		switch (header.kind) {
		case NETVM_READ:
			if (header.sequence != taken)
				exit(3);
			if (evil[0] && strcmp(evil, "window")) {
				answer_badly(&header);
				break;
			}
			from = place(&header, header.bytes);
			if (from)
				frame((struct netvm_header){ .kind = NETVM_READ_REPLY, .token = header.token }, from,
				      header.bytes);
			break;
		case NETVM_WRITE:
			serve_write(&header, body, length);
			break;
		case NETVM_FLUSH:
			frame((struct netvm_header){ .kind = NETVM_FLUSH_ACK, .token = header.token }, NULL, 0);
			break;
		case NETVM_IMPORT:
			serve_import(&header, body, length);
			break;
		case NETVM_CALL:
			serve_call(&header, body, length);
			break;
		case NETVM_IMPORT_ACK:
			board = header.handle;
			break;
		case NETVM_GOODBYE:
			exit(0);
		case NETVM_ERROR:
		case NETVM_FLUSH_ACK:
		case NETVM_ACKNOWLEDGE:
			break;
		default:
			exit(4);
		}
	}
}

int main(int count, char **arguments)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;

	if (count != 2)
		return 1;
	signal(SIGCHLD, SIG_IGN);
	signal(SIGPIPE, SIG_IGN);
	grid = mmap(NULL, GRID_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	address.sin_port = htons(atoi(arguments[1]));
	if (grid == MAP_FAILED || bind(listener, (void *)&address, sizeof(address)) || listen(listener, 16)) {
		perror("memory_peer");
		return 1;
	}
	for (;;) {
		fd = accept(listener, NULL, NULL);
		if (fd < 0)
			return 1;
		if (fork() == 0) {
			close(listener);
			serve();
		}
		close(fd);
	}
}
