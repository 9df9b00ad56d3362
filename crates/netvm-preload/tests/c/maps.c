#include "check.h"
#include <linux/perf_event.h>
#include <sys/syscall.h>

static void holes(void) {
    char *p = anonymous(8 * MIB);
    CHECK(zero(p, 8 * MIB));
    fill(p, 8 * MIB, 1);
    CHECK(holds(p, 8 * MIB, 1));
    fill(p, MIB, 2);
    fill(p + 3 * MIB, MIB, 3);
    CHECK(munmap(p + MIB, 2 * MIB) == 0);
    CHECK(munmap(p + MIB, 2 * MIB) == 0); /* again: not an error */
    CHECK(faults(p + MIB, 0) && faults(p + 3 * MIB - 1, 1) && !faults(p, 1));
    CHECK(holds(p, MIB, 2) && holds(p + 3 * MIB, MIB, 3));
    CHECK(madvise(p, 8 * MIB, MADV_DONTNEED) == -1 && errno == ENOMEM);
    CHECK(zero(p, MIB));
    CHECK(mprotect(p, 8 * MIB, PROT_READ) == -1 && errno == ENOMEM);
    CHECK(mmap(p + MIB, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p + MIB);
    CHECK(zero(p + MIB, 2 * MIB));
    CHECK(munmap(p, 8 * MIB) == 0 && faults(p, 0));
    CHECK(munmap(p + 1, PAGE) == -1 && errno == EINVAL);
    p = anonymous(MIB);
    *p = 7;
    CHECK(munmap(p, 1ul << 62) == -1 && errno == EINVAL && *p == 7); /* beyond all addresses */
    CHECK(munmap(p, MIB) == 0);
    /* Many, of all sizes, freed in another order. */
    enum { MANY = 200 };
    static char *many[MANY];
    for (int i = 0; i < MANY; i++) {
        many[i] = anonymous(MIB / 4 + i * PAGE);
        fill(many[i], 3 * PAGE, i);
    }
    for (int i = 0; i < MANY; i += 2) CHECK(munmap(many[i], MIB / 4 + i * PAGE) == 0);
    for (int i = 0; i < MANY; i += 2) {
        many[i] = anonymous(MIB / 4 + i * PAGE);
        CHECK(zero(many[i], MIB / 4));
        fill(many[i], 3 * PAGE, i);
    }
    for (int i = 0; i < MANY; i++) {
        CHECK(holds(many[i], 3 * PAGE, i));
        CHECK(munmap(many[i], MIB / 4 + i * PAGE) == 0);
    }
}

static void protections(void) {
    char *p = anonymous(2 * MIB);
    fill(p, 2 * MIB, 4);
    CHECK(mprotect(p + MIB, MIB, PROT_READ) == 0);
    CHECK(!faults(p, 1) && faults(p + MIB, 1) && holds(p + MIB, MIB - 8, 0) == 0);
    CHECK(mprotect(p, 2 * MIB, PROT_NONE) == 0 && faults(p, 0));
    CHECK(mprotect(p, 2 * MIB, PROT_READ | PROT_WRITE) == 0 && holds(p, 2 * MIB, 4));
    CHECK(munmap(p, 2 * MIB) == 0);
    /* A reservation, committed in two ways. */
    p = mmap(NULL, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(p != MAP_FAILED && faults(p, 0));
    CHECK(mprotect(p, MIB, PROT_READ | PROT_WRITE) == 0);
    CHECK(mmap(p + 8 * MIB, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p + 8 * MIB);
    fill(p, MIB, 5);
    fill(p + 8 * MIB, MIB, 6);
    CHECK(holds(p, MIB, 5) && holds(p + 8 * MIB, MIB, 6) && faults(p + MIB, 0));
    CHECK(mmap(p, MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == p);
    CHECK(mprotect(p, MIB, PROT_READ | PROT_WRITE) == 0 && zero(p, MIB));
    CHECK(mmap(p, MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED && errno == EEXIST);
    CHECK(munmap(p, 64 * MIB) == 0);
}

static void advice(void) {
    char *p = anonymous(4 * MIB);
    fill(p, 4 * MIB, 7);
    CHECK(madvise(p + MIB, MIB, MADV_DONTNEED) == 0 && zero(p + MIB, MIB));
    CHECK(madvise(p + 2 * MIB, MIB, MADV_WILLNEED) == 0 && madvise(p, 4 * MIB, MADV_HUGEPAGE) <= 0);
    CHECK(madvise(p, 4 * MIB, MADV_SEQUENTIAL) == 0 && madvise(p, 4 * MIB, 12345) == -1 && errno == EINVAL);
    fill(p, MIB, 8);
    CHECK(posix_madvise(p, MIB, POSIX_MADV_DONTNEED) == 0 && holds(p, MIB, 8));
    CHECK(madvise(p, MIB, MADV_FREE) == 0);
    p[0] = 1;
    CHECK(p[0] == 1);
    CHECK(munmap(p, 4 * MIB) == 0);
}

static void remaps(void) {
    char *p = anonymous(2 * MIB);
    fill(p, 2 * MIB, 9);
    char *q = mremap(p, 2 * MIB, MIB, 0);
    CHECK(q == p && faults(p + MIB, 0));
    q = mremap(p, MIB, 3 * MIB, MREMAP_MAYMOVE);
    CHECK(q != MAP_FAILED);
    fill(q + MIB, 2 * MIB, 10);
    CHECK(holds(q + MIB, 2 * MIB, 10));
    { uint64_t seed = 9, word = mix(&seed); CHECK(memcmp(q, &word, 8) == 0); }
    fill(q, 3 * MIB, 11);
    char *wall = anonymous(MIB); /* may block growth in place */
    char *r = mremap(q, 3 * MIB, 40 * MIB, MREMAP_MAYMOVE);
    CHECK(r != MAP_FAILED && holds(r, 3 * MIB, 11) && zero(r + 3 * MIB, 37 * MIB));
    if (r != q) CHECK(faults(q, 0));
    CHECK(munmap(wall, MIB) == 0);
    char *to = anonymous(40 * MIB);
    fill(to, MIB, 12);
    q = mremap(r, 40 * MIB, 4 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, to + 8 * MIB);
    CHECK(q == to + 8 * MIB && holds(q, 3 * MIB, 11) && zero(q + 3 * MIB, MIB) && holds(to, MIB, 12));
    CHECK(faults(r, 0) && faults(r + 39 * MIB, 0));
    CHECK(mremap(q, MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, q + PAGE) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(q, MIB, 2 * MIB, MREMAP_FIXED, to) == MAP_FAILED && errno == EINVAL);
    CHECK(mremap(q + 1, MIB, 2 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL);
    fill(q, MIB, 13);
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
    r = mremap(q, MIB, MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
    CHECK(r != MAP_FAILED && r != q && holds(r, MIB, 13) && zero(q, MIB));
    /* Read-only memory keeps its protection and contents on the way. */
    CHECK(mprotect(r, MIB, PROT_READ) == 0);
    q = mremap(r, MIB, 9 * MIB, MREMAP_MAYMOVE);
    CHECK(q != MAP_FAILED && holds(q, MIB, 13) && faults(q, 1) && !faults(q, 0));
    CHECK(munmap(q, 9 * MIB) == 0 && munmap(to, 40 * MIB) == 0);
}

static void files(void) {
    char name[] = "/tmp/netvm-preload-maps-XXXXXX";
    int fd = mkstemp(name);
    CHECK(fd >= 0 && unlink(name) == 0);
    static char contents[64 * PAGE];
    fill(contents, sizeof contents, 14);
    CHECK(write(fd, contents, sizeof contents) == sizeof contents);
    char *p = anonymous(4 * MIB);
    fill(p, 4 * MIB, 15);
    CHECK(mmap(p + MIB, sizeof contents, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) == p + MIB);
    CHECK(holds(p + MIB, sizeof contents, 14) && p[MIB + sizeof contents] != 0);
    CHECK(madvise(p, 4 * MIB, MADV_DONTNEED) == 0 && zero(p, MIB) && holds(p + MIB, sizeof contents, 14));
    CHECK(mprotect(p, 4 * MIB, PROT_READ) == 0 && faults(p + MIB, 1));
    CHECK(munmap(p, 4 * MIB) == 0 && faults(p + MIB, 0));
    char *again = anonymous(4 * MIB);
    CHECK(zero(again, 4 * MIB));
    /* read(2) and write(2) by the kernel straight into and out of far memory. */
    fill(again, MIB, 16);
    CHECK(pwrite(fd, again, MIB, 0) == (ssize_t)MIB);
    CHECK(madvise(again, 4 * MIB, MADV_DONTNEED) == 0);
    CHECK(pread(fd, again + 2 * MIB, MIB, 0) == (ssize_t)MIB && holds(again + 2 * MIB, MIB, 16));
    int ends[2];
    CHECK(pipe(ends) == 0);
    CHECK(write(ends[1], again + 2 * MIB, 10000) == 10000 && read(ends[0], again + 5, 10000) == 10000);
    CHECK(memcmp(again + 5, again + 2 * MIB, 10000) == 0);
    CHECK(munmap(again, 4 * MIB) == 0);
    close(fd);
}

/* A file with `bytes` of contents that only `seed` tells. */
static int a_file(size_t bytes, uint64_t seed) {
    char name[] = "/tmp/netvm-preload-maps-XXXXXX";
    int fd = mkstemp(name);
    CHECK(fd >= 0 && unlink(name) == 0 && ftruncate(fd, bytes) == 0);
    char *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(p != MAP_FAILED);
    fill(p, bytes, seed);
    CHECK(munmap(p, bytes) == 0);
    return fd;
}

/* From one place in far memory to another: one that is free, and one with contents. */
static void files_that_move(void) {
    int fd = a_file(MIB, 17);
    char *p = anonymous(16 * MIB);
    fill(p, 16 * MIB, 18);
    CHECK(munmap(p + 4 * MIB, MIB) == 0);
    char *file = mmap(p + MIB, MIB, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0);
    for (int i = 0; i < 2; i++) {
        char *to = p + (i == 0 ? 4 : 8) * MIB;
        CHECK(mremap(file, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
        CHECK(faults(file, 0));
        file = to;
        char *others[8];
        for (int k = 0; k < 8; k++) fill(others[k] = anonymous(MIB), MIB, 19 + k);
        CHECK(holds(file, MIB, 17) && faults(file, 1));
        pid_t pid = fork();
        if (pid == 0) _exit(!holds(file, MIB, 17));
        int status;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
        for (int k = 0; k < 8; k++) CHECK(holds(others[k], MIB, 19 + k) && munmap(others[k], MIB) == 0);
    }
    CHECK(munmap(p, 16 * MIB) == 0 && faults(file, 0));
    close(fd);
}

/* MAP_FIXED that fails leaves what was there, and its addresses are nobody else's. */
static void fixed_that_fails(void) {
    int fd = a_file(MIB, 20), written = open("/dev/null", O_WRONLY);
    char *p = anonymous(16 * MIB);
    fill(p, 16 * MIB, 21);
    CHECK(mmap(p + 2 * MIB, MIB, PROT_READ, MAP_SHARED | MAP_FIXED, 999, 0) == MAP_FAILED && errno == EBADF);
    CHECK(mmap(p + 4 * MIB, MIB, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 1) == MAP_FAILED && errno == EINVAL);
    CHECK(mmap(p + 6 * MIB, MIB, PROT_READ, MAP_FIXED, fd, 0) == MAP_FAILED && errno == EINVAL);
    CHECK(holds(p, 16 * MIB, 21));
    /* What a device refuses is the program's at least. */
    CHECK(mmap(p + 8 * MIB, MIB, PROT_READ, MAP_SHARED | MAP_FIXED, written, 0) == MAP_FAILED && errno == EACCES);
    fill(p + 8 * MIB, MIB, 22);
    for (int i = 0; i < 20; i++) {
        char *other = anonymous(MIB);
        CHECK(other + MIB <= p || other >= p + 16 * MIB);
    }
    CHECK(holds(p + 8 * MIB, MIB, 22) && !faults(p + 2 * MIB, 1));
    CHECK(mmap(p + 2 * MIB, MIB, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0) == p + 2 * MIB);
    CHECK(holds(p + 2 * MIB, MIB, 20) && munmap(p, 16 * MIB) == 0);
    close(fd);
    close(written);
}

/* A mapping as of a device, about whose children the kernel takes no advice; NULL where there is none to be had. */
static char *like_a_device(char *at) {
    struct perf_event_attr attributes = {.type = PERF_TYPE_SOFTWARE, .size = sizeof attributes, .config = PERF_COUNT_SW_DUMMY};
    attributes.exclude_kernel = 1;
    int fd = syscall(SYS_perf_event_open, &attributes, 0, -1, -1, 0);
    if (fd < 0) return NULL;
    char *p = mmap(at, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    close(fd);
    return p == MAP_FAILED ? NULL : p;
}

/* What is no far memory is inherited as the program says. */
static void files_and_children(void) {
    int fd = a_file(MIB, 23);
    char *p = anonymous(16 * MIB);
    fill(p, 16 * MIB, 24);
    for (int i = 1; i < 3; i++)
        CHECK(mmap(p + i * 2 * MIB, MIB, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == p + i * 2 * MIB);
    CHECK(madvise(p + 2 * MIB, MIB, MADV_DONTFORK) == 0);
    char *device = like_a_device(p + 8 * MIB);
    for (int i = 0; i < 3; i++) {
        CHECK(faults(p + 2 * MIB, 0) && !faults(p + 4 * MIB, 0) && !faults(p + 6 * MIB, 1) && !faults(p + 9 * MIB, 1));
        CHECK(holds(p + 2 * MIB, MIB, 23) && holds(p + 4 * MIB, MIB, 23));
    }
    CHECK(madvise(p + 2 * MIB, MIB, MADV_DOFORK) == 0 && !faults(p + 2 * MIB, 0));
    if (device != NULL) CHECK(faults(device, 0) && munmap(device, 2 * PAGE) == 0);
    CHECK(munmap(p, 16 * MIB) == 0);
    close(fd);
}

int main(void) {
    holes();
    protections();
    advice();
    remaps();
    files();
    files_that_move();
    fixed_that_fails();
    files_and_children();
    errno = 0;
    CHECK(mmap(NULL, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EINVAL);
    char *stack = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    CHECK(stack != MAP_FAILED && munmap(stack, MIB) == 0);
    puts("ok");
    return 0;
}
