// SPDX-License-Identifier: GPL-2.0
/*
 * pages MIB: fills memory with numbers and says "filled"; then, for each line of standard input, looks whether all of it is what was
 * written last, writes something else, and says "wrong N", how many pages were not.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t *memory;
static size_t words;

static uint64_t word(size_t page, size_t at, uint64_t turn)
{
	return (page * 0x9E3779B97F4A7C15u) ^ (turn << 48) ^ at;
}

static void fill(size_t page, uint64_t turn)
{
	for (size_t at = 0; at < words; at++)
		memory[page * words + at] = word(page, at, turn);
}

static int is_wrong(size_t page, uint64_t turn)
{
	for (size_t at = 0; at < words; at++)
		if (memory[page * words + at] != word(page, at, turn))
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	size_t bytes = argc > 1 ? strtoul(argv[1], NULL, 10) << 20 : 0;
	size_t pages = bytes / getpagesize();
	char line[16];

	words = getpagesize() / sizeof(*memory);
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!bytes || memory == MAP_FAILED) {
		perror("pages");
		return 2;
	}
	for (size_t page = 0; page < pages; page++)
		fill(page, 0);
	puts("filled");
	fflush(stdout);
	for (uint64_t turn = 0; fgets(line, sizeof(line), stdin); turn++) {
		size_t wrong = 0;

		for (size_t page = 0; page < pages; page++) {
			wrong += is_wrong(page, turn);
			fill(page, turn + 1);
		}
		printf("wrong %zu\n", wrong);
		fflush(stdout);
	}
	return 0;
}
