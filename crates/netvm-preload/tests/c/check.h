/* What the test programs share. They know nothing of netvm. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <fcntl.h>

#define CHECK(what)                                                                    \
    do {                                                                               \
        if (!(what)) {                                                                 \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
            _exit(1);                                                                  \
        }                                                                              \
    } while (0)

#define PAGE 4096UL
#define MIB (1UL << 20)

static inline uint64_t mix(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

/* Random contents that only `seed` tells. */
static inline void fill(void *at, size_t bytes, uint64_t seed) {
    unsigned char *p = at;
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        uint64_t word = mix(&seed);
        memcpy(p + i, &word, 8);
    }
    for (; i < bytes; i++) p[i] = (unsigned char)mix(&seed);
}

static inline int holds(const void *at, size_t bytes, uint64_t seed) {
    const unsigned char *p = at;
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        uint64_t word = mix(&seed);
        if (memcmp(p + i, &word, 8)) return 0;
    }
    for (; i < bytes; i++)
        if (p[i] != (unsigned char)mix(&seed)) return 0;
    return 1;
}

/* The same that packs to a sixth: whole pages. */
static inline void fill_thin(void *at, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes; i += PAGE) {
        memset((char *)at + i, (int)(i / PAGE), PAGE);
        fill((char *)at + i, 512, seed + i);
    }
}

static inline int holds_thin(const void *at, size_t bytes, uint64_t seed) {
    const unsigned char *p = at;
    for (size_t i = 0; i < bytes; i += PAGE)
        if (!holds(p + i, 512, seed + i) || p[i + PAGE - 1] != (unsigned char)(i / PAGE)) return 0;
    return 1;
}

static inline int zero(const void *at, size_t bytes) {
    const unsigned char *p = at;
    for (size_t i = 0; i < bytes; i++)
        if (p[i]) return 0;
    return 1;
}

static inline void *anonymous(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}

/* Whether touching an address kills. Tried in a child. */
static inline int faults(volatile char *at, int write_to_it) {
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        if (write_to_it) *at = 1;
        else (void)*at;
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}
