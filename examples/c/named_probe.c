/* Looks rows of a table up at random, and names each a little before: process_madvise(2) of MADV_WILLNEED, as for any memory that may be swapped out.
 * Nothing of netvm's is needed to build it.
 *
 *     cc -O2 -o named_probe named_probe.c
 *     netvm run --local 64M --lender big:7070 -- ./named_probe 256 1000000        looks up 1000000 rows of 256 MiB
 *     netvm run --local 64M --lender big:7070 -- ./named_probe 256 1000000 no     without naming them
 *
 * Rows come many at a time, while those before them are used. Linux 6.13 lets a process say this of itself without privileges.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 64, PAGE = 4096 };

typedef struct {
    uint64_t key, values[7];
} row;

/* SplitMix64. */
static uint64_t mixed(uint64_t z) {
    z += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Tells the kernel, or netvm, which rows the probes from `first` on will touch. A hint: what becomes of it is not looked at. */
static void name(int self, const row *table, uint64_t rows, uint64_t first) {
    struct iovec pages[BATCH];
    for (uint64_t i = 0; i < BATCH; i++) {
        uintptr_t at = (uintptr_t)&table[mixed(first + i) % rows];
        pages[i] = (struct iovec){(void *)(at & -(uintptr_t)PAGE), PAGE};
    }
    syscall(SYS_process_madvise, self, pages, (long)BATCH, MADV_WILLNEED, 0);
}

int main(int count, char **arguments) {
    if (count < 3) return fprintf(stderr, "usage: named_probe MIB PROBES [no]\n"), 2;
    uint64_t rows = strtoull(arguments[1], NULL, 10) * (1 << 20) / sizeof(row);
    uint64_t probes = strtoull(arguments[2], NULL, 10) / BATCH * BATCH;
    int names = count == 3, self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    row *table = rows > 0 ? aligned_alloc(PAGE, rows * sizeof(row)) : NULL;
    if (!table || self < 0) return fprintf(stderr, "named_probe: no memory, or no descriptor of this process\n"), 1;
    for (uint64_t i = 0; i < rows; i++) {
        table[i].key = i;
        for (int v = 0; v < 7; v++) table[i].values[v] = mixed(i * 7 + (uint64_t)v);
    }
    uint64_t sum = 0;
    double start = seconds();
    if (names) name(self, table, rows, 0);
    for (uint64_t first = 0; first < probes; first += BATCH) {
        /* The next ones are on their way while these are used. */
        if (names && first + BATCH < probes) name(self, table, rows, first + BATCH);
        for (uint64_t i = first; i < first + BATCH; i++) {
            const row *found = &table[mixed(i) % rows];
            if (found->key != mixed(i) % rows) return fprintf(stderr, "named_probe: a row is wrong\n"), 1;
            sum = sum * 31 + found->values[i % 7];
        }
    }
    double us = (seconds() - start) / (double)(probes ? probes : 1) * 1e6;
    printf("%016llx\n", (unsigned long long)sum);
    fprintf(stderr, "%.2f us a probe%s\n", us, names ? ", each named before" : "");
    return 0;
}
