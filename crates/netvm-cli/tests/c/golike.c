// As a program in Go with cgo: it maps memory by way of libc, and gives pages of it back by system calls of its own.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define BYTES (40ul << 20)

// What such a program exports.
void _cgo_topofstack(void) {}

static unsigned long noise(unsigned long x) {
    x ^= x << 13;
    x ^= x >> 7;
    return x ^ x << 17;
}

int main(void) {
    unsigned long *map = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned long *heap = malloc(BYTES);
    if (map == MAP_FAILED || !heap)
        return 2;
    for (int round = 0; round < 2; round++) {
        for (unsigned long i = 0; i < BYTES / 8; i++)
            map[i] = noise(i + 1);
        // Pages of the mapping would be gone from here by now.
        for (unsigned long i = 0; i < BYTES / 8; i++)
            heap[i] = noise(i + 7);
        for (unsigned long i = 0; i < BYTES / 8; i++)
            if (map[i] != noise(i + 1) || heap[i] != noise(i + 7))
                return puts("wrong"), 3;
        if (syscall(SYS_madvise, map, BYTES, MADV_DONTNEED))
            return 4;
        for (unsigned long i = 0; i < BYTES / 8; i++)
            if (map[i])
                return puts("not zero"), 5;
    }
    puts("ok");
    return 0;
}
