/* Forks while most pages are packed: a child has its parent's, and each changes its own. */
#include "check.h"

#define PAGES (6 * 1024UL)
#define CHILDREN 6
#ifndef ONLY_END
#define ONLY_END 0
#endif

static unsigned char *memory;

/* An eighth of it is random. */
static void write_page(size_t page, uint64_t seed) {
    unsigned char *at = memory + page * PAGE;
    for (size_t i = 0; i < PAGE; i += 512) memset(at + i, (int)(page + i / 512), 512);
    fill(at + page % 7 * 512, 512, seed + page);
}

static void check_page(size_t page, uint64_t seed) {
    const unsigned char *at = memory + page * PAGE;
    CHECK(holds(at + page % 7 * 512, 512, seed + page));
    CHECK(at[4095] == (unsigned char)(page + 7));
}

static void await(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
}

/* Every `step`th page is written anew by `seed`, the others are as `before` wrote them. */
static void change(size_t step, uint64_t seed, uint64_t before) {
    for (size_t page = 0; page < PAGES; page++)
        if (page % step == 0) write_page(page, seed);
        else check_page(page, before);
    for (size_t page = PAGES; page-- > 0;) check_page(page, page % step ? before : seed);
}

int main(void) {
    memory = anonymous(PAGES * PAGE);
    for (size_t page = 0; page < PAGES; page++) write_page(page, 1);
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (ONLY_END) {
            if (!child) _exit(0);
            /* Who forks again at once has several. */
            usleep(60000);
        }
        if (!child) {
            change(3, 100, 1);
            /* Of what the child has packed, and of what it has from its parent. */
            pid_t grandchild = fork();
            CHECK(grandchild >= 0);
            if (!grandchild) {
                for (size_t page = 0; page < PAGES; page++) check_page(page, page % 3 ? 1 : 100);
                _exit(0);
            }
            for (size_t page = 0; page < PAGES; page++) write_page(page, 200);
            await(grandchild);
            for (size_t page = 0; page < PAGES; page++) check_page(page, 200);
            _exit(0);
        }
        if (!ONLY_END) {
            /* Meanwhile: what the child shares, and has left behind. */
            change(2, 1000, 1);
            for (size_t page = 0; page < PAGES; page += 2) write_page(page, 1);
        }
        await(child);
    }
    for (size_t page = 0; page < PAGES; page++) check_page(page, 1);
    printf("ok\n");
    return 0;
}
