/* Children whose parent stands still while it writes what all have packed, for longer than they wait for it, and then goes on. */
#define main one_by_one
#include "packed.c"
#undef main

static void stop_for_a_while(pid_t who) {
    CHECK(!kill(who, SIGSTOP));
    usleep(2600000);
    CHECK(!kill(who, SIGCONT));
}

/* The parent says when it has forked. */
static int forked[2];

static void parent_and_children(void) {
    pid_t children[CHILDREN];
    memory = anonymous(PAGES * PAGE);
    for (size_t page = 0; page < PAGES; page++) write_page(page, 1);
    for (int i = 0; i < CHILDREN; i++) {
        CHECK((children[i] = fork()) >= 0);
        if (children[i]) continue;
        usleep(600000 * i);
        change(3, 100 + i, 1);
        /* What others write late is not where this one writes now. */
        usleep(3600000 - 600000 * i);
        for (size_t page = 0; page < PAGES; page++) check_page(page, page % 3 ? 1 : 100 + i);
        _exit(0);
    }
    CHECK(write(forked[1], "", 1) == 1);
    usleep(200000);
    change(2, 200, 1);
    for (int i = 0; i < CHILDREN; i++) await(children[i]);
    for (size_t page = 0; page < PAGES; page++) check_page(page, page % 2 ? 1 : 200);
    _exit(0);
}

int main(void) {
    CHECK(!pipe(forked));
    pid_t parent = fork();
    CHECK(parent >= 0);
    if (!parent) parent_and_children();
    close(forked[1]);
    char said;
    CHECK(read(forked[0], &said, 1) == 1);
    /* The first child writes, and the parent not yet. */
    usleep(100000);
    stop_for_a_while(parent);
    await(parent);
    printf("ok\n");
    return 0;
}
