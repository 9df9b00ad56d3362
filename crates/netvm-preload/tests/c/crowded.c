/* No room for another mapping: what is refused leaves all contents, also those that are far away. */
#include "check.h"

#define PAGES 64UL

static size_t mappings_max(void) {
    char line[32] = "";
    int fd = open("/proc/sys/vm/max_map_count", O_RDONLY);
    CHECK(fd >= 0 && read(fd, line, sizeof line - 1) > 0);
    close(fd);
    return strtoul(line, NULL, 10);
}

int main(void) {
    size_t most = mappings_max() + 1000;
    char *p = anonymous(PAGES * PAGE), *others = anonymous(24 * MIB);
    char *q = anonymous(PAGES * PAGE), *moving = anonymous(1024 * PAGE);
    char *outside = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(outside != MAP_FAILED);
    fill(p, PAGES * PAGE, 1);
    fill(q, PAGES * PAGE, 4);
    for (size_t i = 0; i < 1024; i += 16) fill(moving + i * PAGE, 16 * PAGE, 10 + (int)i);
    fill(others, 24 * MIB, 2);
    if (most > 200000) { /* It would take too long. */
        CHECK(holds(p, PAGES * PAGE, 1) && holds(others, 24 * MIB, 2));
        puts("ok");
        return 0;
    }
    char *crowd = anonymous(most * PAGE);
    size_t at = 1;
    while (at < most && mprotect(crowd + at * PAGE, PAGE, PROT_READ) == 0) at += 2;
    CHECK(at < most && errno == ENOMEM);
    alarm(60);
    CHECK(munmap(p + 31 * PAGE, PAGE) == -1 && errno == ENOMEM);
    CHECK(holds(p, PAGES * PAGE, 1));
    fill(others, 24 * MIB, 3);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    CHECK(mmap(p + 40 * PAGE, PAGE, PROT_NONE, flags, -1, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK(holds(p, PAGES * PAGE, 1));
    /* What leaves far memory is copied first; with room for the copy there may be none to move it. */
    int refused = 0;
    while (mremap(q, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, outside) == MAP_FAILED) {
        CHECK(errno == ENOMEM && refused < 32 && holds(q, PAGES * PAGE, 4));
        fill(others, 24 * MIB, 3);
        refused++;
        at -= 2;
        CHECK(mprotect(crowd + at * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
    }
    CHECK(refused > 0 && holds(outside, PAGES * PAGE, 4));
    /* From the middle of a mapping, with room for none, one and more mappings: as it was, or moved as a whole. */
    while (mprotect(crowd + at * PAGE, PAGE, PROT_READ) == 0) at += 2;
    for (size_t from = 16; from < 1008; from += 32) {
        char *old = moving + from * PAGE;
        char *new = mremap(old, 16 * PAGE, 32 * PAGE, MREMAP_MAYMOVE);
        CHECK(new != MAP_FAILED || errno == ENOMEM);
        CHECK(holds(new == MAP_FAILED ? old : new, 16 * PAGE, 10 + (int)from));
        if (new != MAP_FAILED && from > 512) break;
        at -= 2;
        CHECK(mprotect(crowd + at * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
    }
    CHECK(munmap(crowd, most * PAGE) == 0 && munmap(p + 31 * PAGE, PAGE) == 0);
    CHECK(faults(p + 31 * PAGE, 0) && !faults(p + 32 * PAGE, 1) && holds(others, 24 * MIB, 3));
    puts("ok");
    return 0;
}
