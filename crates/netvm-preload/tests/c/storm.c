/* Threads that write to pages of all protections, while they leave and the process forks; children that are killed, stopped, or become others. */
#include "check.h"

#define PAGES 4096UL /* twice the local memory */
#define BYTES (PAGES * PAGE)
#define THREADS 2

static char *memory;
static volatile int stop;
static uint64_t written[PAGES];

static uint64_t *word(size_t page) { return (uint64_t *)(memory + page * PAGE + 8 * (page % 512)); }

/* A page and a count. */
static uint64_t value(size_t page, uint64_t count) { return (uint64_t)(page + 1) << 32 | count; }

/* Of every 16 pages the last is only read. */
static int is_constant(size_t page) { return page % 16 == 15; }

static void *writes(void *number) {
    uint64_t state = (uintptr_t)number;
    size_t mine = (uintptr_t)number;
    while (!stop) {
        size_t page = mix(&state) % PAGES / THREADS * THREADS + mine;
        if (is_constant(page)) {
            CHECK(*word(page) == value(page, 0));
            continue;
        }
        for (int i = 0; i < 200; i++) {
            CHECK(*(volatile uint64_t *)word(page) == value(page, written[page]));
            *(volatile uint64_t *)word(page) = value(page, ++written[page]);
        }
    }
    return NULL;
}

/* What the parent's threads had written, each page at some moment of the fork. */
static void look(uint64_t seed) {
    for (int i = 0; i < 500; i++) {
        size_t page = mix(&seed) % PAGES;
        uint64_t there = *word(page);
        CHECK(there >> 32 == page + 1 && (!is_constant(page) || there == value(page, 0)));
        if (!is_constant(page))
            *word(page) = value(page, 7);
        CHECK(is_constant(page) || *word(page) == value(page, 7));
    }
}

int main(void) {
    memory = anonymous(BYTES);
    for (size_t page = 0; page < PAGES; page++)
        *word(page) = value(page, 0);
    for (size_t page = 0; page < PAGES; page += 16) {
        CHECK(mprotect(memory + (page + 15) * PAGE, PAGE, PROT_READ) == 0);
        if (page % 64 == 0)
            CHECK(mprotect(memory + page * PAGE, 4 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
    }
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, writes, (void *)i) == 0);
    for (int round = 0; round < 24; round++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            look(round);
            switch (round % 4) {
            case 0:
                exit(0);
            case 1:
                raise(SIGKILL);
                break;
            case 2:
                raise(SIGSTOP);
                break;
            case 3: {
                char *arguments[] = {"true", NULL};
                execvp("true", arguments);
            }
            }
            _exit(9);
        }
        int status;
        CHECK(waitpid(pid, &status, WUNTRACED) == pid);
        if (WIFSTOPPED(status)) {
            usleep(20000); /* it gives nothing back */
            CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid);
        }
        int killed = round % 4 == 1 || round % 4 == 2;
        CHECK(killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    stop = 1;
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    for (size_t page = 0; page < PAGES; page++)
        CHECK(*word(page) == value(page, written[page]));
    puts("ok");
    return 0;
}
