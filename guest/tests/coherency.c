// SPDX-License-Identifier: GPL-2.0
/*
 * Maps /dev/netvm_coherency and does what its arguments say, in their order:
 *
 *   map NAME FIRST PAGES         maps pages of the device
 *   fill NAME FROM PAGES SEED    writes them; FROM counts from the start of the mapping
 *   check NAME FROM PAGES SEED   they must be what fill wrote with this seed, through whatever mapping
 *   zero NAME FROM PAGES         they must be zero
 *   unmap NAME FROM PAGES
 *   grow NAME PAGES              mremap(2), to this many pages, anywhere
 *   bus NAME PAGE                touching it must raise SIGBUS
 *   private FIRST PAGES          mapping them privately must be refused
 *   write NAME FROM PAGES        they must be writable to a file as they are, by direct I/O
 *   fork ... join                a child does this; it must succeed
 *   exec COMMAND                 must succeed
 *
 * The end is not unmapped: that is the kernel's work.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEVICE "/dev/netvm_coherency"

static long page;
static struct mapping {
	char *at;
	long first, pages;
} mappings[26];
static char **word;
static sigjmp_buf after_bus;

static void fail(const char *what)
{
	fprintf(stderr, "coherency: %s: %s\n", what, strerror(errno));
	exit(1);
}

static char *next(void)
{
	if (!*word) {
		errno = EINVAL;
		fail("an argument is missing");
	}
	return *word++;
}

static long number(void)
{
	return strtol(next(), NULL, 0);
}

static struct mapping *mapping(void)
{
	int letter = next()[0];

	if (letter < 'a' || letter > 'z') {
		errno = EINVAL;
		fail("mappings are called a to z");
	}
	return &mappings[letter - 'a'];
}

/* The words of a page tell which page of the device it is. */
static uint64_t pattern(long device_page, long i, long seed)
{
	return ((uint64_t)device_page << 20 ^ (uint64_t)i ^ (uint64_t)seed << 48) * 0x9e3779b97f4a7c15ull + 1;
}

static void touch(const char *how)
{
	struct mapping *m = mapping();
	long from = number(), pages = number(), seed = strcmp(how, "zero") ? number() : 0;

	for (long p = from; p < from + pages; p++) {
		volatile uint64_t *words = (uint64_t *)(m->at + p * page);

		for (long i = 0; i < page / 8; i++) {
			uint64_t want = pattern(m->first + p, i, seed);

			if (!strcmp(how, "fill")) {
				words[i] = want;
			} else if (words[i] != (strcmp(how, "zero") ? want : 0)) {
				fprintf(stderr, "coherency: %s: page %ld of the device is wrong at word %ld\n", how, m->first + p, i);
				exit(1);
			}
		}
	}
}

static void map(int fd)
{
	struct mapping *m = mapping();

	m->first = number();
	m->pages = number();
	m->at = mmap(NULL, m->pages * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, m->first * page);
	if (m->at == MAP_FAILED)
		fail("mmap");
}

static void on_bus(int signal)
{
	(void)signal;
	siglongjmp(after_bus, 1);
}

static void bus(void)
{
	struct mapping *m = mapping();
	volatile char *at = m->at + number() * page;

	signal(SIGBUS, on_bus);
	if (!sigsetjmp(after_bus, 1)) {
		*at = 1;
		errno = 0;
		fail("SIGBUS did not come");
	}
	signal(SIGBUS, SIG_DFL);
}

static void write_out(void)
{
	struct mapping *m = mapping();
	char *from = m->at + number() * page, *back;
	long bytes = number() * page;
	int fd = open("/tmp/disk/out", O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);

	if (fd < 0 || write(fd, from, bytes) != bytes)
		fail("direct write");
	back = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
	if (back == MAP_FAILED)
		fail("mmap of the file");
	if (memcmp(back, from, bytes))
		fail("the file has other bytes");
	munmap(back, bytes);
	close(fd);
}

int main(int argc, char **argv)
{
	int fd = open(DEVICE, O_RDWR), status;
	(void)argc;

	if (fd < 0)
		fail(DEVICE);
	page = sysconf(_SC_PAGESIZE);
	word = argv + 1;
	while (*word) {
		char *what = *word++;

		if (!strcmp(what, "map")) {
			map(fd);
		} else if (!strcmp(what, "fill") || !strcmp(what, "check") || !strcmp(what, "zero")) {
			touch(what);
		} else if (!strcmp(what, "unmap")) {
			struct mapping *m = mapping();
			char *from = m->at + number() * page;

			if (munmap(from, number() * page))
				fail("munmap");
		} else if (!strcmp(what, "grow")) {
			struct mapping *m = mapping();
			long pages = number();

			m->at = mremap(m->at, m->pages * page, pages * page, MREMAP_MAYMOVE);
			m->pages = pages;
			if (m->at == MAP_FAILED)
				fail("mremap");
		} else if (!strcmp(what, "bus")) {
			bus();
		} else if (!strcmp(what, "private")) {
			long first = number(), pages = number();

			errno = 0;
			if (mmap(NULL, pages * page, PROT_READ, MAP_PRIVATE, fd, first * page) != MAP_FAILED || errno != EINVAL)
				fail("a private mapping was not refused with EINVAL");
		} else if (!strcmp(what, "write")) {
			write_out();
		} else if (!strcmp(what, "fork")) {
			pid_t child = fork();

			if (child < 0)
				fail("fork");
			if (!child)
				continue;
			if (waitpid(child, &status, 0) != child || status)
				fail("the child has failed");
			while (strcmp(next(), "join"))
				;
		} else if (!strcmp(what, "join")) {
			exit(0);
		} else if (!strcmp(what, "exec")) {
			if (system(next()))
				fail("exec");
		} else {
			errno = EINVAL;
			fail(what);
		}
	}
	return 0;
}
