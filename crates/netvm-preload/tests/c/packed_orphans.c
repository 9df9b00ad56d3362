/* Children whose parent is killed while it writes what all have packed. */
#define main one_by_one
#include "packed.c"
#undef main

static void orphans(int to) {
    memory = anonymous(PAGES * PAGE);
    for (size_t page = 0; page < PAGES; page++) write_page(page, 1);
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child) continue;
        usleep(100000 * i);
        change(3, 100 + i, 1);
        CHECK(write(to, "k", 1) == 1);
        _exit(0);
    }
    usleep(70000);
    raise(SIGKILL);
}

int main(void) {
    int ends[2], status;
    char ok, good = 0;
    CHECK(!pipe(ends));
    pid_t parent = fork();
    CHECK(parent >= 0);
    if (!parent) orphans(ends[1]);
    CHECK(waitpid(parent, &status, 0) == parent && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK(!close(ends[1]));
    while (read(ends[0], &ok, 1) == 1) good++;
    CHECK(good == CHILDREN);
    printf("ok\n");
    return 0;
}
