/* Forks while what the program has freed here and there is collected. */
#include "check.h"

#define PAGES (24 * 1024UL)
#define KEPT 8

static unsigned char *memory;

static void check(uint64_t seed) {
    for (size_t page = 0; page < PAGES; page++) {
        if (page % KEPT == 0) CHECK(holds(memory + page * PAGE, PAGE, seed + page));
        else CHECK(zero(memory + page * PAGE, PAGE));
    }
}

int main(void) {
    memory = anonymous(PAGES * PAGE);
    for (size_t page = 0; page < PAGES; page++) fill(memory + page * PAGE, PAGE, 7 + page);
    for (size_t page = 0; page < PAGES; page++)
        if (page % KEPT) CHECK(!madvise(memory + page * PAGE, PAGE, MADV_DONTNEED));
    /* It begins after a second. */
    usleep(1100000);
    for (int i = 0; i < 30; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            if (i % 3 == 0) check(7);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
        usleep(20000);
    }
    usleep(1500000);
    check(7);
    printf("ok\n");
    return 0;
}
