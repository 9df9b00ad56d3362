/* What the C library allocates for itself, and uses in the middle of fork(2). */
#include "check.h"
#include <pthread.h>
#include <pwd.h>

#define FILES 40
#define KEYS 100
#define BYTES (24 * MIB)

static volatile int stop;
static pthread_key_t keys[KEYS];

/* Its table of values is read in the child, where this thread is not. */
static void *has_values(void *unused) {
    (void)unused;
    for (int i = 0; i < KEYS; i++)
        CHECK(pthread_setspecific(keys[i], &keys[i]) == 0);
    while (!stop)
        usleep(1000);
    for (int i = 0; i < KEYS; i++)
        CHECK(pthread_getspecific(keys[i]) == &keys[i]);
    return NULL;
}

static void *uses_its_stack(void *seed) {
    char local[20000];
    fill(local, sizeof local, (uintptr_t)seed);
    usleep(1000);
    CHECK(holds(local, sizeof local, (uintptr_t)seed));
    return seed;
}

#define STACK 200000
#define THREADS 8

/* When a thread ends, the kernel writes to its stack. */
static void threads_on_blocks(char *p) {
    pthread_t threads[THREADS];
    char *stacks[THREADS];
    pthread_attr_t attributes;
    for (int round = 0; round < 4; round++) {
        for (uintptr_t i = 0; i < THREADS; i++) {
            stacks[i] = malloc(STACK);
            CHECK(pthread_attr_init(&attributes) == 0);
            CHECK(pthread_attr_setstack(&attributes, stacks[i], STACK) == 0);
            CHECK(pthread_create(&threads[i], &attributes, uses_its_stack, (void *)i) == 0);
        }
        fill(p, BYTES, round);
        for (uintptr_t i = 0; i < THREADS; i++) {
            void *result;
            CHECK(pthread_join(threads[i], &result) == 0 && result == (void *)i);
            stacks[i][STACK / 2] = 7;
            /* Half of them grow before they are freed. */
            if (i % 2) CHECK((stacks[i] = realloc(stacks[i], 3 * STACK)) != NULL && stacks[i][STACK / 2] == 7);
            free(stacks[i]);
        }
        for (uintptr_t i = 0; i < THREADS; i++) {
            stacks[i] = calloc(1, STACK);
            for (size_t at = 0; at < STACK; at++) CHECK(stacks[i][at] == 0);
            fill(stacks[i], STACK, round + i);
        }
        fill(p, BYTES, round);
        for (uintptr_t i = 0; i < THREADS; i++) {
            CHECK(holds(stacks[i], STACK, round + i));
            free(stacks[i]);
        }
    }
}

static int handled;

static void before(void) { handled += *(volatile char *)malloc(3 * MIB) == 0; }
static void after(void) { handled += *(volatile char *)malloc(3 * MIB) == 0; }

int main(void) {
    FILE *files[FILES];
    pthread_t thread;
    CHECK(pthread_atfork(before, after, after) == 0);
    for (int i = 0; i < KEYS; i++)
        CHECK(pthread_key_create(&keys[i], NULL) == 0);
    CHECK(pthread_create(&thread, NULL, has_values, NULL) == 0);
    for (int i = 0; i < FILES; i++)
        CHECK((files[i] = fopen("/proc/self/exe", "r")) != NULL);
    getpwuid(getuid()); /* reads /etc/nsswitch.conf, and keeps what it says */
    char *p = malloc(BYTES), *texts[1000];
    for (int i = 0; i < 1000; i++)
        CHECK((texts[i] = strdup("a copy")) != NULL);
    for (int round = 0; round < 3; round++) {
        fill(p, BYTES, round); /* all else leaves */
        pid_t pid = fork();
        if (pid == 0) {
            for (int i = 0; i < FILES; i++)
                CHECK(fgetc(files[i]) != EOF && fclose(files[i]) == 0);
            getpwuid(getuid());
            CHECK(holds(p, BYTES, round) && handled == 2 * (round + 1));
            exit(0);
        }
        int status;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(holds(p, BYTES, round));
    }
    char *copy = strndup("another copy", 7);
    CHECK(strcmp(copy, "another") == 0 && strcmp(texts[999], "a copy") == 0);
#ifdef MAP_32BIT /* of x86 */
    void *low = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    CHECK((uintptr_t)low + MIB <= (uintptr_t)1 << 32);
#endif
    threads_on_blocks(p);
    stop = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    puts("ok");
    return 0;
}
