/* Pages that are only read, at random: they may leave without anybody looking at them. What is written to them meanwhile, by whom ever, counts. */
#include "check.h"
#include <sys/syscall.h>

#define PAGES (24 * MIB / PAGE)

static unsigned char *memory;
static uint64_t model[PAGES];

static uint64_t *first(size_t page) {
    return (uint64_t *)(memory + page * PAGE);
}

static void read_some(uint64_t seed, int times) {
    for (int i = 0; i < times; i++) {
        size_t page = mix(&seed) % PAGES;
        CHECK(*first(page) == model[page]);
    }
}

static void write_some(uint64_t seed, int times) {
    for (int i = 0; i < times; i++) {
        size_t page = mix(&seed) % PAGES;
        CHECK(*first(page) == model[page]);
        *first(page) = model[page] = mix(&seed);
        read_some(seed, 16);
    }
}

static void check_all(void) {
    for (size_t page = 0; page < PAGES; page++) CHECK(*first(page) == model[page]);
}

static void *reader(void *argument) {
    read_some((uintptr_t)argument, 8000);
    return NULL;
}

/* A system call that no library sees. */
static long drop_unseen(void *at, size_t bytes) {
#if defined(__x86_64__)
    register long advice __asm__("rdx") = MADV_DONTNEED;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(SYS_madvise), "D"(at), "S"(bytes), "r"(advice) : "rcx", "r11", "memory");
    return result;
#else
    return syscall(SYS_madvise, at, bytes, MADV_DONTNEED);
#endif
}

/* Parent and child both read and write what both had; each sees its own. */
static void generations(int left) {
    read_some(left, 6000);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        write_some(100 + left, 300);
        read_some(left, 4000);
        if (left > 0) generations(left - 1);
        write_some(200 + left, 300);
        check_all();
        _exit(0);
    }
    write_some(300 + left, 300);
    check_all();
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_all();
}

int main(void) {
    memory = anonymous(PAGES * PAGE);
    uint64_t seed = 1;
    for (size_t page = 0; page < PAGES; page++) *first(page) = model[page] = mix(&seed);
    pthread_t threads[2];
    for (uintptr_t i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, reader, (void *)(i + 5)) == 0);
    for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    write_some(7, 500);
    generations(2);

    int ends[2];
    CHECK(pipe(ends) == 0);
    for (int i = 0; i < 300; i++) {
        size_t page = mix(&seed) % PAGES;
        CHECK(*first(page) == model[page]);
        model[page] = mix(&seed);
        CHECK(write(ends[1], &model[page], 8) == 8 && read(ends[0], first(page), 8) == 8);
        read_some(seed, 16);
    }
    check_all();

    for (int i = 0; i < 100; i++) {
        size_t page = mix(&seed) % PAGES;
        CHECK(*first(page) == model[page]);
        CHECK(drop_unseen(first(page), PAGE) == 0);
        model[page] = 0;
        read_some(seed, 200);
    }
    check_all();
    puts("ok");
    return 0;
}
