// SPDX-License-Identifier: GPL-2.0
/*
 * Uses netvm_mem. Without a secret: the real handshake is `netvm device attach`.
 *
 *   memory attach HOST PORT lender BYTES
 *   memory attach HOST PORT NAME KEYLETTER [read-only]    prints the number of the device
 *   memory detach N [force]
 *   memory attaching HOST PORT          everything that must be refused
 *   memory bound HOST PORT              devices that go with a descriptor
 *   memory edges N                      positions, ends, ioctls
 *   memory random N SEED STEPS          random operations, compared with a model
 *   memory share N                      mappings of two processes, and private ones
 *   memory pages N                      page descriptors
 *   memory keep N COMMAND               maps it, and has it open, while COMMAND runs
 *   memory lost N COMMAND               COMMAND ends the peer, with dirty pages mapped
 *   memory notified N                   notifications both ways
 *   memory beyond N COUNT               a peer of so many notifications is not asked for more
 *   memory asks N TEXT                  a request to examples/device_service.rs, and its answer
 *   memory fails N                      the first read must fail, and everything after it
 *   memory writes N                     page after page is written and synced, until that fails with EIO; how many were
 *   memory refused N                    reads fail one by one, and it lives
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../kmod/mem_wire.h"
#include "../../kmod/netvm_mem.h"

#define CONTROL "/dev/netvm_mem_control"

static sigjmp_buf after_bus;
static long page;
/* The compiler must not know. */
static char *volatile nowhere = (char *)8;

static void __attribute__((noreturn)) fail(const char *what, long number)
{
	fprintf(stderr, "memory: %s: %ld, %s\n", what, number, strerror(errno));
	exit(1);
}

#define must(condition) do { if (!(condition)) fail(#condition, __LINE__); } while (0)

/* The call must fail so. */
#define fails(call, error)                                                                                             \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		if ((call) != -1 || errno != (error))                                                                  \
			fail(#call " should have failed with " #error, __LINE__);                                      \
	} while (0)

static void on_bus(int number)
{
	(void)number;
	siglongjmp(after_bus, 1);
}

/* Whether a byte can be read, or written. */
static int touches(volatile char *at, int write)
{
	if (sigsetjmp(after_bus, 1))
		return 0;
	if (write)
		*at = 1;
	else
		(void)*at;
	return 1;
}

static uint64_t random_state;

static uint64_t below(uint64_t bound)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state % bound;
}

static int open_device(long number, int flags)
{
	char path[64];
	int fd;

	snprintf(path, sizeof(path), "/dev/netvm_mem%ld", number);
	fd = open(path, flags);
	if (fd < 0)
		fail(path, number);
	return fd;
}

static uint64_t bytes_of(int fd)
{
	struct netvm_mem_info info;

	must(ioctl(fd, NETVM_MEM_INFO, &info) == 0);
	return info.bytes;
}

/* ---- attaching ---- */

static int greet(const char *host, const char *port, int role)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(atoi(port)) };
	unsigned char hello[64] = "netvm\r\n\x1a\x02\0\x02";
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	size_t got = 0;

	inet_pton(AF_INET, host, &address.sin_addr);
	hello[12] = role;
	hello[25] = 1;		/* 256 operations */
	hello[29] = 16;		/* 4096 writes */
	hello[49] = 1;		/* rails */
	hello[54] = 16;		/* 1 MiB */
	if (connect(fd, (void *)&address, sizeof(address)) || write(fd, hello, 64) != 64)
		fail("cannot connect", 0);
	while (got < 64) {
		ssize_t part = read(fd, hello + got, 64 - got);

		if (part <= 0)
			fail("no hello", part);
		got += part;
	}
	return fd;
}

static int control(unsigned long command, void *argument)
{
	int fd = open(CONTROL, O_RDWR);
	int result, error;

	if (fd < 0)
		fail(CONTROL, fd);
	result = ioctl(fd, command, argument);
	error = errno;
	close(fd);
	errno = error;
	return result;
}

static struct netvm_mem_attach attachment(int socket)
{
	struct netvm_mem_attach attach = { .struct_bytes = sizeof(attach), .socket = socket, .ops_max = 256,
					   .window = 4096, .peer = "test", .pid = getpid() };

	memset(attach.board_key, 'b', 16);
	return attach;
}

static struct netvm_mem_attach segment(const char *host, const char *port, const char *name, int letter)
{
	struct netvm_mem_attach attach = attachment(greet(host, port, 3));

	attach.kind = NETVM_MEM_SEGMENT;
	snprintf(attach.name, sizeof(attach.name), "%s", name);
	memset(attach.key, letter, 16);
	return attach;
}

static struct netvm_mem_attach lender(const char *host, const char *port, uint64_t bytes)
{
	struct netvm_mem_attach attach = attachment(greet(host, port, 1));

	attach.kind = NETVM_MEM_LENDER;
	attach.bytes = bytes;
	strcpy(attach.name, "test");
	return attach;
}

static void attach(char **word)
{
	struct netvm_mem_attach with;

	if (!strcmp(word[2], "lender")) {
		with = lender(word[0], word[1], strtoull(word[3], NULL, 0));
	} else {
		with = segment(word[0], word[1], word[2], word[3][0]);
		with.flags = word[4] ? NETVM_MEM_READ_ONLY : 0;
	}
	if (control(NETVM_MEM_ATTACH, &with))
		fail("attach", errno);
	printf("%u\n", with.device);
}

static void attaching(char **word)
{
	const char *host = word[0], *port = word[1];
	struct netvm_mem_detach none = { .device = 200 };
	struct netvm_mem_attach with;
	int plain = open("/dev/null", O_RDWR), unconnected = socket(AF_INET, SOCK_STREAM, 0);
	int datagrams = socket(AF_INET, SOCK_DGRAM, 0);

	with = segment(host, port, "grid", 'x');
	fails(control(NETVM_MEM_ATTACH, &with), ENOENT);
	with = segment(host, port, "no-such", 'k');
	fails(control(NETVM_MEM_ATTACH, &with), ENOENT);
	with = lender(host, port, 1 << 30);
	fails(control(NETVM_MEM_ATTACH, &with), ENOSPC);
	with = lender(host, port, 1ull << 62);
	fails(control(NETVM_MEM_ATTACH, &with), EFBIG);
	with = lender(host, port, 1ull << 63);
	fails(control(NETVM_MEM_ATTACH, &with), EFBIG);
	/* A divisor that is 0 in 32 bits, and a sum that is 0 in 64. */
	with = lender(host, port, 100000);
	strcpy(with.name, "evil-slab-0x100000000");
	fails(control(NETVM_MEM_ATTACH, &with), EPROTO);
	with = lender(host, port, 100000);
	strcpy(with.name, "evil-slab-0xffffffffffff0000");
	fails(control(NETVM_MEM_ATTACH, &with), EPROTO);
	with = lender(host, port, 0);
	fails(control(NETVM_MEM_ATTACH, &with), EINVAL);
	with = segment(host, port, "grid", 'k');
	with.bytes = 4096;
	fails(control(NETVM_MEM_ATTACH, &with), EINVAL);
	with.bytes = 0;
	with.kind = 3;
	fails(control(NETVM_MEM_ATTACH, &with), EINVAL);
	with.kind = NETVM_MEM_SEGMENT;
	with.flags = 8;
	fails(control(NETVM_MEM_ATTACH, &with), EINVAL);
	with.flags = 0;
	with.struct_bytes--;
	fails(control(NETVM_MEM_ATTACH, &with), EINVAL);
	with.struct_bytes++;
	memset(with.name, 'n', sizeof(with.name));
	fails(control(NETVM_MEM_ATTACH, &with), EINVAL);
	strcpy(with.name, "grid");
	with.window = 1;
	fails(control(NETVM_MEM_ATTACH, &with), EINVAL);
	with.window = 4096;
	with.ops_max = 0;
	fails(control(NETVM_MEM_ATTACH, &with), EINVAL);
	with.ops_max = 256;
	with.socket = plain;
	fails(control(NETVM_MEM_ATTACH, &with), ENOTSOCK);
	with.socket = -1;
	fails(control(NETVM_MEM_ATTACH, &with), EBADF);
	with.socket = unconnected;
	fails(control(NETVM_MEM_ATTACH, &with), ENOTCONN);
	with.socket = datagrams;
	fails(control(NETVM_MEM_ATTACH, &with), ENOTCONN);
	fails(control(NETVM_MEM_ATTACH, (void *)8), EFAULT);
	fails(control(NETVM_MEM_DETACH, (void *)8), EFAULT);
	fails(control(NETVM_MEM_DETACH, &none), ENODEV);
	none.flags = 2;
	fails(control(NETVM_MEM_DETACH, &none), EINVAL);
	fails(control(_IO(0xd7, 99), NULL), ENOTTY);
}

static void detach(char **word)
{
	struct netvm_mem_detach with = { .device = atoi(word[0]), .flags = word[1] ? NETVM_MEM_FORCE : 0 };

	if (control(NETVM_MEM_DETACH, &with))
		fail("detach", errno);
}

/* ---- using ---- */

static void edges(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR), other;
	uint64_t bytes = bytes_of(fd);
	struct netvm_mem_range range = { bytes, 0 };
	struct netvm_mem_notify notify = { 1 << 16, 0 };
	struct netvm_mem_notified notified = { NETVM_MEM_NOTIFICATIONS, 0, 0 };
	char block[8192], back[8192];
	char *map;

	must(lseek(fd, 0, SEEK_END) == (off_t)bytes);
	fails(lseek(fd, -1, SEEK_SET), EINVAL);
	fails(lseek(fd, -(off_t)bytes - 1, SEEK_END), EINVAL);
	fails(lseek(fd, INT64_MAX, SEEK_CUR), EINVAL);
	fails(lseek(fd, 1, SEEK_END), EINVAL);
	fails(lseek(fd, 0, 77), EINVAL);
	must(lseek(fd, -10, SEEK_END) == (off_t)bytes - 10);
	memset(block, 'e', sizeof(block));
	must(write(fd, block, 100) == 10);
	fails(write(fd, block, 1), ENOSPC);
	must(write(fd, block, 0) == 0);
	must(read(fd, back, 10) == 0);
	must(lseek(fd, -10, SEEK_CUR) == (off_t)bytes - 10);
	must(read(fd, back, 100) == 10 && !memcmp(back, block, 10));
	fails(pread(fd, back, 1, -1), EINVAL);
	fails(pwrite(fd, back, 1, -1), EINVAL);
	must(pread(fd, back, 1, INT64_MAX - 1) == 0);
	fails(pwrite(fd, back, 1, INT64_MAX - 1), ENOSPC);
	fails(pwrite(fd, block, 1, bytes), ENOSPC);
	fails(write(fd, nowhere, 10), ENOSPC);
	fails(pwrite(fd, nowhere, 10, 0), EFAULT);
	fails(pread(fd, nowhere, 10, 0), EFAULT);
	fails(ftruncate(fd, 0), EINVAL);
	must(fsync(fd) == 0 && fdatasync(fd) == 0);

	other = open_device(atoi(word[0]), O_RDWR | O_APPEND);
	fails(write(other, block, 1), ENOSPC);
	must(pread(other, back, 10, bytes - 10) == 10 && !memcmp(back, block, 10));
	close(other);
	other = open_device(atoi(word[0]), O_RDONLY);
	fails(write(other, block, 1), EBADF);
	fails(ioctl(other, NETVM_MEM_NOTIFY, &notify), EBADF);
	must(mmap(NULL, page, PROT_WRITE, MAP_SHARED, other, 0) == MAP_FAILED && errno == EACCES);
	close(other);
	other = open_device(atoi(word[0]), O_RDWR | O_SYNC);
	must(pwrite(other, block, 5000, 1000) == 5000);
	must(pread(fd, back, 5000, 1000) == 5000 && !memcmp(back, block, 5000));
	close(other);

	fails(ioctl(fd, _IO(0xd7, 99), NULL), ENOTTY);
	fails(ioctl(fd, NETVM_MEM_INFO, 8), EFAULT);
	fails(ioctl(fd, NETVM_MEM_INVALIDATE, 8), EFAULT);
	fails(ioctl(fd, NETVM_MEM_INVALIDATE, &range), EINVAL);
	range = (struct netvm_mem_range){ 0, UINT64_MAX };
	must(ioctl(fd, NETVM_MEM_INVALIDATE, &range) == 0);
	fails(ioctl(fd, NETVM_MEM_NOTIFIED, &notified), EINVAL);
	fails(ioctl(fd, NETVM_MEM_NOTIFIED, 8), EFAULT);
	must(ioctl(fd, NETVM_MEM_NOTIFY, &notify) == -1 && (errno == EINVAL || errno == EOPNOTSUPP));
	fails(ioctl(fd, NETVM_MEM_PAGE, 8), EFAULT);

	/* Behind the last page there is nothing. */
	map = mmap(NULL, (bytes / page + 3) * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	must(map != MAP_FAILED);
	must(touches(map + bytes - 1, 1));
	must(!touches(map + (bytes + page - 1) / page * page, 0));
	must(!touches(map + (bytes + page - 1) / page * page, 1));
	must(msync(map, page, MS_SYNC) == 0 && munmap(map, (bytes / page + 3) * page) == 0);
}

static char *model;

/* A device full of zeros, or of what an earlier run with the same seed left. */
static void randomly(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR);
	uint64_t bytes = bytes_of(fd), steps = strtoull(word[2], NULL, 0), step;
	static char block[300000], got[300000];
	char *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	random_state = strtoull(word[1], NULL, 0) * 2 + 0x9e3779b97f4a7c15ull;
	model = malloc(bytes);
	must(model && map != MAP_FAILED);
	for (step = 0; step < bytes; step += sizeof(block)) {
		size_t part = bytes - step < sizeof(block) ? bytes - step : sizeof(block);

		must(pread(fd, model + step, part, step) == (ssize_t)part);
	}
	for (step = 0; step < steps; step++) {
		size_t length = below(8) ? below(9000) + 1 : below(sizeof(block)) + 1;
		uint64_t at = below(bytes);
		size_t i;

		if (length > bytes - at)
			length = bytes - at;
		switch (below(12)) {
		case 0:
		case 1:
		case 2:
			for (i = 0; i < length; i++)
				block[i] = below(256);
			must(pwrite(fd, block, length, at) == (ssize_t)length);
			memcpy(model + at, block, length);
			break;
		case 3:
		case 4:
			for (i = 0; i < length; i += 1 + below(300))
				map[at + i] = model[at + i] = below(256);
			break;
		case 5:
		case 6:
		case 7:
			must(pread(fd, got, length, at) == (ssize_t)length);
			must(!memcmp(got, model + at, length));
			break;
		case 8:
			must(!memcmp(map + at, model + at, length));
			break;
		case 9:
			must(below(2) ? !fsync(fd) : !msync(map + at / page * page, length, MS_SYNC));
			break;
		case 10:
			/* What is clean leaves the cache, and comes back from the peer. */
			must(posix_fadvise(fd, at, length, POSIX_FADV_DONTNEED) == 0);
			break;
		default: {
			struct netvm_mem_range range = { at, length };

			must(ioctl(fd, NETVM_MEM_INVALIDATE, &range) == 0);
		}
		}
	}
	must(fsync(fd) == 0);
	must(ioctl(fd, NETVM_MEM_INVALIDATE, &(struct netvm_mem_range){ 0, 0 }) == 0);
	must(!memcmp(map, model, bytes));
}

static void share(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR), status;
	uint64_t bytes = bytes_of(fd) / page * page;
	char *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	char *private = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	char byte;

	must(shared != MAP_FAILED && private != MAP_FAILED);
	shared[5] = 'a';
	must(private[5] == 'a');
	private[page + 5] = 'p';
	must(shared[page + 5] != 'p');
	if (fork() == 0) {
		/* A file and a mapping of its own, somewhere else in the device. */
		int own = open_device(atoi(word[0]), O_RDWR);
		char *map = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, own, 2 * page);

		must(map != MAP_FAILED && shared[5] == 'a' && private[page + 5] == 'p');
		map[7] = 'c';
		shared[5] = 'b';
		must(pwrite(own, "w", 1, 3 * page + 9) == 1);
		must(msync(map, page, MS_SYNC) == 0);
		_exit(0);
	}
	must(wait(&status) > 0 && status == 0);
	must(shared[5] == 'b' && private[5] == 'b' && shared[2 * page + 7] == 'c' && shared[3 * page + 9] == 'w');
	must(pread(fd, &byte, 1, page + 5) == 1 && byte != 'p');
	/* A private copy stays, whatever happens to the device. */
	private[2 * page] = 'q';
	must(ioctl(fd, NETVM_MEM_INVALIDATE, &(struct netvm_mem_range){ 0, 0 }) == 0);
	must(private[2 * page] == 'q' && private[page + 5] == 'p' && shared[5] == 'b');
	/* Moved, and grown into what follows. */
	shared = mremap(shared, 2 * page, page, 0);
	must(shared != MAP_FAILED && shared[5] == 'b');
}

static uint64_t pagemap(const void *at)
{
	int fd = open("/proc/self/pagemap", O_RDONLY);
	uint64_t entry;

	must(fd >= 0 && pread(fd, &entry, 8, (uintptr_t)at / page * 8) == 8);
	close(fd);
	return entry;
}

static void pages(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR);
	char *map = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, page);
	struct netvm_mem_page at = { .address = (uintptr_t)map + page + 123 };
	int level;

	must(map != MAP_FAILED);
	must(madvise(map, 4 * page, MADV_RANDOM) == 0);
	must(ioctl(fd, NETVM_MEM_PAGE, &at) == 0);
	must(!(at.flags & NETVM_MEM_PAGE_PRESENT) && at.physical == 0);
	must(at.flags & NETVM_MEM_PAGE_DEVICE && at.offset == (uint64_t)2 * page + 123);
	must(touches(map + page + 123, 0));
	must(ioctl(fd, NETVM_MEM_PAGE, &at) == 0);
	must(at.flags & NETVM_MEM_PAGE_PRESENT && !(at.flags & NETVM_MEM_PAGE_WRITABLE));
	map[page + 123] = 1;
	must(ioctl(fd, NETVM_MEM_PAGE, &at) == 0);
	must(at.flags & NETVM_MEM_PAGE_WRITABLE && at.flags & NETVM_MEM_PAGE_DIRTY && at.flags & NETVM_MEM_PAGE_ACCESSED);
	must(at.leaf == NETVM_MEM_PTE && at.page_bytes == (uint64_t)page && at.levels >= 3 && at.levels <= 5);
	must(at.physical % page == 123 && at.physical / page == (pagemap(map + page) & ((1ull << 55) - 1)));
	for (level = 0; level < NETVM_MEM_LEVELS; level++)
		must(at.entries[level] != 0);
	printf("levels %u, entries", at.levels);
	for (level = 0; level < NETVM_MEM_LEVELS; level++)
		printf(" %llx", (unsigned long long)at.entries[level]);
	printf(", physical %llx\n", (unsigned long long)at.physical);
	/* After fsync the first write is noticed again. */
	must(fsync(fd) == 0 && ioctl(fd, NETVM_MEM_PAGE, &at) == 0 && !(at.flags & NETVM_MEM_PAGE_WRITABLE));
	/* What is no mapping of the device, and what is no mapping. */
	at = (struct netvm_mem_page){ .address = (uintptr_t)&at };
	must(ioctl(fd, NETVM_MEM_PAGE, &at) == 0);
	must(!(at.flags & NETVM_MEM_PAGE_DEVICE) && at.offset == 0);
	must(at.physical / page == (pagemap(&at) & ((1ull << 55) - 1)));
	at = (struct netvm_mem_page){ .address = 0 };
	fails(ioctl(fd, NETVM_MEM_PAGE, &at), EFAULT);
	at = (struct netvm_mem_page){ .address = UINT64_MAX };
	fails(ioctl(fd, NETVM_MEM_PAGE, &at), EFAULT);
	at = (struct netvm_mem_page){ .address = (uintptr_t)map, .reserved = 1 };
	fails(ioctl(fd, NETVM_MEM_PAGE, &at), EINVAL);
	if (fork() == 0) {
		at = (struct netvm_mem_page){ .address = (uintptr_t)map };
		must(setuid(1000) == 0);
		fails(ioctl(fd, NETVM_MEM_PAGE, &at), EPERM);
		_exit(0);
	}
	must(wait(&level) > 0 && level == 0);
}

static void keep(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR);
	char *map = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	must(map != MAP_FAILED);
	close(fd);
	map[1] = 'k';
	must(system(word[1]) == 0);
	must(touches(map + 1, 0) && map[1] == 'k');
}

static void all_fails(int fd, char *map)
{
	struct pollfd polled = { .fd = fd, .events = POLLIN };
	struct netvm_mem_info info;
	char block[100];

	must(!touches(map, 0) && !touches(map + page, 1));
	fails(fsync(fd), EIO);
	fails(fsync(fd), EIO);
	fails(pread(fd, block, 10, 0), EIO);
	fails(pwrite(fd, block, 10, 0), EIO);
	fails(pwrite(fd, block, 10, 3 * page + 5), EIO);
	must(mmap(NULL, page, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EIO);
	fails(ioctl(fd, NETVM_MEM_INVALIDATE, &(struct netvm_mem_range){ 0, 0 }), EIO);
	must(poll(&polled, 1, 0) == 1 && polled.revents & POLLERR && polled.revents & POLLHUP);
	must(ioctl(fd, NETVM_MEM_INFO, &info) == 0 && info.error);
}

/* Until the session has ended. */
static void wait_for_end(int fd)
{
	struct pollfd polled = { .fd = fd, .events = 0 };

	must(poll(&polled, 1, 20000) == 1 && polled.revents & POLLHUP);
	usleep(300000);
}

static void lost(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR);
	char *map = mmap(NULL, 64 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	char *private = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	int i;

	must(map != MAP_FAILED && private != MAP_FAILED);
	private[3] = 'p';
	for (i = 0; i < 64; i++)
		map[i * page] = i;
	must(system(word[1]) == 0);
	wait_for_end(fd);
	all_fails(fd, map);
	/* What is this process's own is still there. */
	must(private[3] == 'p');
}

static void notified(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR), other = open_device(atoi(word[0]), O_RDONLY);
	struct pollfd polled = { .fd = fd, .events = POLLPRI };
	struct netvm_mem_notified came = { .number = 6 };
	struct netvm_mem_notify tell = { .number = 5, .value = 41 };

	must(poll(&polled, 1, 0) == 0);
	must(pwrite(fd, "x", 1, 0) == 1);
	must(ioctl(fd, NETVM_MEM_NOTIFY, &tell) == 0);
	must(poll(&polled, 1, 10000) == 1 && polled.revents == POLLPRI);
	/* Both come; the second was behind the first. */
	came.number = 7;
	do {
		must(ioctl(fd, NETVM_MEM_NOTIFIED, &came) == 0);
	} while (!came.count);
	must(came.count == 1 && came.value == 42);
	came.number = 6;
	must(ioctl(fd, NETVM_MEM_NOTIFIED, &came) == 0 && came.count == 1 && came.value == 0);
	must(poll(&polled, 1, 0) == 0);
	/* Another file has not seen them. */
	polled.fd = other;
	must(poll(&polled, 1, 0) == 1);
	must(ioctl(other, NETVM_MEM_NOTIFIED, &came) == 0 && poll(&polled, 1, 0) == 0);
	tell.value = 0;
	must(ioctl(fd, NETVM_MEM_NOTIFY, &tell) == 0);
	must(poll(&polled, 1, 10000) == 1 && polled.revents == POLLPRI);
}

/* The peer's refusal would end the session. */
static void beyond(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR), count = atoi(word[1]);
	struct netvm_mem_notify tell = { .number = count };
	struct netvm_mem_info info;

	fails(ioctl(fd, NETVM_MEM_NOTIFY, &tell), count ? ERANGE : EOPNOTSUPP);
	tell.number = UINT16_MAX;
	tell.value = 1;
	fails(ioctl(fd, NETVM_MEM_NOTIFY, &tell), count ? ERANGE : EOPNOTSUPP);
	/* Whatever was sent, the peer has it now. */
	must(pwrite(fd, "x", 1, 0) == 1 && fsync(fd) == 0);
	must(ioctl(fd, NETVM_MEM_INFO, &info) == 0 && info.error == 0);
}

static void asks(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR);
	struct pollfd polled = { .fd = fd, .events = POLLPRI };
	struct netvm_mem_notify tell = { .number = 0 };
	struct netvm_mem_notified came = { .number = 1 };
	char line[100] = "";
	size_t length = snprintf(line, sizeof(line), "%s\n", word[1]), i;

	/* It is in the page cache before the answer comes. */
	must(pread(fd, line + length, 1, 4096) == 1);
	must(pwrite(fd, line, length, 0) == (ssize_t)length);
	must(ioctl(fd, NETVM_MEM_NOTIFY, &tell) == 0);
	must(poll(&polled, 1, 20000) == 1 && polled.revents & POLLPRI);
	must(ioctl(fd, NETVM_MEM_NOTIFIED, &came) == 0 && came.count > 0);
	must(ioctl(fd, NETVM_MEM_INVALIDATE, &(struct netvm_mem_range){ 4096, 4096 }) == 0);
	must(pread(fd, line, sizeof(line), 4096) == sizeof(line));
	for (i = 0; i < strlen(word[1]); i++)
		must(line[i] == word[1][strlen(word[1]) - 1 - i]);
	printf("%.*s\n", (int)strlen(word[1]), line);
}

static void failing(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR);
	char *map = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	char block[10];

	must(map != MAP_FAILED);
	/* Of a reply that comes twice, or with more behind it, the first may be good. */
	if (pread(fd, block, 10, 0) == -1)
		must(errno == EIO);
	wait_for_end(fd);
	all_fails(fd, map);
}

static void writes(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR);
	uint64_t pages = bytes_of(fd) / page;
	unsigned int done = 0;

	/* More than any window, if that should be without end. */
	while (done < 10000 && pwrite(fd, "x", 1, done % pages * page) == 1 && fsync(fd) == 0)
		done++;
	must(done == 10000 || errno == EIO);
	printf("%u\n", done);
}

static void refused(char **word)
{
	int fd = open_device(atoi(word[0]), O_RDWR);
	char *map = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	char block[100000] = "";
	struct netvm_mem_info info;

	must(map != MAP_FAILED);
	fails(pread(fd, block, 10, 0), EIO);
	fails(pread(fd, block, 10, 0), EIO);
	must(!touches(map, 0));
	/* Whole pages need no read. */
	must(pwrite(fd, block, 8 * page, 0) == 8 * page);
	fails(pwrite(fd, block, 10, 9 * page), EIO);
	must(fsync(fd) == 0 && touches(map, 0));
	must(ioctl(fd, NETVM_MEM_INFO, &info) == 0 && info.error == 0);
}

static int is_there(unsigned int number)
{
	char path[64];

	snprintf(path, sizeof(path), "/sys/class/netvm_mem/netvm_mem%u", number);
	return access(path, F_OK) == 0;
}

static struct netvm_mem_attach attach_bound(int control_fd, const char *host, const char *port)
{
	struct netvm_mem_attach with = segment(host, port, "grid", 'k');

	with.flags = NETVM_MEM_BOUND;
	if (ioctl(control_fd, NETVM_MEM_ATTACH, &with))
		fail("attach", errno);
	close(with.socket);
	return with;
}

static void bound(char **word)
{
	int fd = open(CONTROL, O_RDWR), device, status;
	struct netvm_mem_attach first = attach_bound(fd, word[0], word[1]), other;
	struct netvm_mem_detach away = { .flags = 0 };
	char *map;
	pid_t child;

	must(is_there(first.device));
	other = segment(word[0], word[1], "grid", 'k');
	other.flags = NETVM_MEM_BOUND;
	fails(ioctl(fd, NETVM_MEM_ATTACH, &other), EBUSY);
	/* One that is not bound, by the same file, stays. */
	other.flags = 0;
	must(ioctl(fd, NETVM_MEM_ATTACH, &other) == 0);

	device = open_device(first.device, O_RDWR);
	map = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, device, 0);
	must(map != MAP_FAILED);
	map[0] = 'd';
	child = fork();
	if (!child) {
		pause();
		_exit(0);
	}
	close(fd);
	/* The child has the descriptor, too. */
	must(is_there(first.device) && touches(map, 0));
	kill(child, SIGKILL);
	must(waitpid(child, &status, 0) == child);
	must(!is_there(first.device) && !touches(map, 0));
	fails(fsync(device), EIO);
	fails(pread(device, map, 1, 0), EIO);
	must(is_there(other.device));
	away.device = other.device;
	must(control(NETVM_MEM_DETACH, &away) == 0);

	/* Detached by number meanwhile, and the number is another's: that one stays. */
	fd = open(CONTROL, O_RDWR);
	first = attach_bound(fd, word[0], word[1]);
	away.device = first.device;
	must(control(NETVM_MEM_DETACH, &away) == 0);
	other = segment(word[0], word[1], "grid", 'k');
	must(control(NETVM_MEM_ATTACH, &other) == 0 && other.device == first.device);
	close(fd);
	must(is_there(other.device));
	must(control(NETVM_MEM_DETACH, &away) == 0);
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(char **word);
		int words;
	} commands[] = {
		{ "attach", attach, 4 },     { "attaching", attaching, 2 }, { "detach", detach, 1 },
		{ "edges", edges, 1 },	     { "random", randomly, 3 },	    { "share", share, 1 },
		{ "pages", pages, 1 },	     { "keep", keep, 2 },	    { "lost", lost, 2 },
		{ "notified", notified, 1 }, { "fails", failing, 1 },	    { "refused", refused, 1 },
		{ "asks", asks, 2 },	     { "bound", bound, 2 },	    { "beyond", beyond, 2 },
		{ "writes", writes, 1 },
	};
	size_t i;

	page = sysconf(_SC_PAGESIZE);
	signal(SIGBUS, on_bus);
	for (i = 0; count > 1 && i < sizeof(commands) / sizeof(commands[0]); i++) {
		if (!strcmp(arguments[1], commands[i].name) && count - 2 >= commands[i].words) {
			commands[i].run(arguments + 2);
			return 0;
		}
	}
	fprintf(stderr, "memory: what?\n");
	return 1;
}
