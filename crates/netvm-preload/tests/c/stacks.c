/* Threads on stacks that malloc has given, or parts of what it has given, whatever the program does with these blocks before and afterwards. */
#include "check.h"

#define BYTES (24 * MIB)
#define STACK (64 * PAGE)
#define THREADS 4

static char *pressed;
static volatile int stop;

/* Pages leave all the time. */
static void *presses(void *ignored) {
    (void)ignored;
    for (uint64_t seed = 1; !stop;) pressed[mix(&seed) % BYTES]++;
    return NULL;
}

static void *uses_its_stack(void *own) {
    char block[8 * PAGE];
    fill(block, sizeof block, (uintptr_t)own);
    for (int i = 0; i < 3; i++) sched_yield();
    return holds(block, sizeof block, (uintptr_t)own) ? own : NULL;
}

static pthread_t on(void *stack, size_t bytes, uintptr_t own) {
    pthread_t thread;
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstack(&attributes, stack, bytes) == 0);
    CHECK(pthread_create(&thread, &attributes, uses_its_stack, (void *)own) == 0);
    CHECK(pthread_attr_destroy(&attributes) == 0);
    return thread;
}

static void ends(pthread_t thread, uintptr_t own) {
    void *result;
    CHECK(pthread_join(thread, &result) == 0 && result == (void *)own);
}

static void reads_zero(size_t bytes) {
    char *fresh = calloc(1, bytes);
    CHECK(fresh);
    for (size_t at = 0; at < bytes; at++) CHECK(fresh[at] == 0);
    fill(fresh, bytes, bytes);
    CHECK(holds(fresh, bytes, bytes));
    free(fresh);
}

static size_t mappings(void) {
    size_t count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    for (int c; (c = getc(maps)) != EOF;) count += c == '\n';
    fclose(maps);
    return count;
}

/* Several in one block, of which the rest is far, at addresses that are no page's. */
static void parts_of_a_block(uint64_t seed) {
    char *block = malloc((THREADS + 2) * STACK);
    pthread_t threads[THREADS];
    fill(block, STACK, seed);
    for (uintptr_t i = 0; i < THREADS; i++) threads[i] = on(block + (i + 1) * STACK + 16 * i, STACK - 64, i + 1);
    CHECK(holds(block, STACK, seed));
    for (uintptr_t i = 0; i < THREADS; i++) ends(threads[i], i + 1);
    /* What was a stack holds what is written there now, also when it moves. */
    fill(block, (THREADS + 2) * STACK, seed + 1);
    char *other = malloc(STACK); /* In the way. */
    CHECK((block = realloc(block, 9 * MIB)) != NULL && holds(block, (THREADS + 2) * STACK, seed + 1));
    free(other);
    ends(on(block, STACK, 7), 7);
    fill(block, 2 * STACK, seed + 2);
    CHECK((block = realloc(block, 2 * STACK)) != NULL && holds(block, 2 * STACK, seed + 2));
    free(block);
}

/* What the kernel would do to a part of it, malloc's blocks are not there for; protection is. */
static void not_mappings(void) {
    void *block;
    CHECK(posix_memalign(&block, 8 * PAGE, 2 * STACK) == 0);
    ends(on(block, STACK, 5), 5);
    fill(block, 2 * STACK, 11);
    CHECK(mprotect(block, PAGE, PROT_NONE) == 0 && mprotect(block, PAGE, PROT_READ | PROT_WRITE) == 0);
    if (getenv("NETVM_RUN")) {
        CHECK(munmap(block, PAGE) == -1 && errno == EINVAL);
        CHECK(mremap(block, PAGE, 2 * PAGE, MREMAP_MAYMOVE) == MAP_FAILED && errno == EFAULT);
    }
    CHECK(holds(block, 2 * STACK, 11));
    CHECK(madvise((char *)block + PAGE, PAGE, MADV_DONTNEED) == 0 && ((char *)block)[PAGE] == 0);
    free(block);
    reads_zero(2 * STACK);
}

/* A child has them as they were, may free them, and have threads on blocks of its own. */
static void forks(void) {
    char *block = malloc(2 * STACK);
    ends(on(block, STACK, 3), 3);
    fill(block, 2 * STACK, 12);
    for (int i = 0; i < 4; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            CHECK(holds(block, 2 * STACK, 12));
            if (i % 2) free(block);
            reads_zero(2 * STACK);
            char *own = malloc(STACK);
            ends(on(own, STACK, 4), 4);
            free(own);
            if (i % 2 == 0) {
                ends(on(block, STACK, 6), 6);
                CHECK(holds(block + STACK, STACK, 0) == 0);
            }
            parts_of_a_block(20);
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        CHECK(holds(block, 2 * STACK, 12));
    }
    free(block);
}

int main(void) {
    pthread_t thread;
    alarm(120);
    pressed = malloc(BYTES);
    memset(pressed, 1, BYTES);
    CHECK(pthread_create(&thread, NULL, presses, NULL) == 0);
    parts_of_a_block(1);
    size_t before = mappings();
    for (int round = 0; round < 100; round++) {
        parts_of_a_block(round);
        pthread_t threads[THREADS];
        char *stacks[THREADS];
        for (uintptr_t i = 0; i < THREADS; i++) threads[i] = on(stacks[i] = malloc(STACK), STACK, i + 1);
        for (uintptr_t i = 0; i < THREADS; i++) {
            ends(threads[i], i + 1);
            free(stacks[i]);
        }
    }
    reads_zero(STACK);
    CHECK(mappings() < before + 50);
    not_mappings();
    forks();
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    puts("ok");
    return 0;
}
