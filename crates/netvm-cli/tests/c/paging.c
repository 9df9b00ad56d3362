/* Programs that page by themselves, move memory away, advise and drop it while others use it. */
#include "../../../netvm-preload/tests/c/check.h"
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#define BYTES (16 * MIB)

static void push_out(void) {
    static char *other;
    if (!other) other = anonymous(BYTES);
    fill(other, BYTES, 77);
    CHECK(holds(other, BYTES, 77));
}

static int uffd;
static volatile long served, protected_faults;

/* Gives every missing page its own contents, from memory that is itself far; lifts protection. */
static void *pager(void *source) {
    struct pollfd entry = {uffd, POLLIN, 0};
    for (;;) {
        struct uffd_msg message;
        if (poll(&entry, 1, -1) < 0 || read(uffd, &message, sizeof message) != sizeof message) continue;
        if (message.event != UFFD_EVENT_PAGEFAULT) continue;
        uint64_t at = message.arg.pagefault.address & ~(PAGE - 1);
        if (message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) {
            struct uffdio_writeprotect lift = {{at, PAGE}, 0};
            protected_faults++;
            CHECK(ioctl(uffd, UFFDIO_WRITEPROTECT, &lift) == 0);
            continue;
        }
        struct uffdio_copy copy = {at, (uint64_t)((char *)source + served % 1000 * PAGE), PAGE, 0, 0};
        fill((char *)copy.src, PAGE, at);
        served++;
        CHECK(ioctl(uffd, UFFDIO_COPY, &copy) == 0 || errno == EEXIST);
    }
    return NULL;
}

static void own_userfaultfd(void) {
    uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    if (uffd < 0) {
        puts("no userfaultfd here");
        return;
    }
    struct uffdio_api api = {UFFD_API, UFFD_FEATURE_PAGEFAULT_FLAG_WP, 0};
    CHECK(ioctl(uffd, UFFDIO_API, &api) == 0);
    char *p = anonymous(BYTES), *source = anonymous(8 * MIB);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, pager, source));
    /* Missing pages. */
    struct uffdio_register missing = {{(uint64_t)p, BYTES}, UFFDIO_REGISTER_MODE_MISSING, 0};
    CHECK(ioctl(uffd, UFFDIO_REGISTER, &missing) == 0 && missing.ioctls & 1 << _UFFDIO_COPY);
    for (size_t at = 0; at < BYTES; at += PAGE) CHECK(holds(p + at, PAGE, (uint64_t)(p + at)));
    push_out();
    for (size_t at = 0; at < BYTES; at += PAGE) CHECK(holds(p + at, PAGE, (uint64_t)(p + at)));
    CHECK(served == BYTES / PAGE);
    CHECK(madvise(p, MIB, MADV_DONTNEED) == 0 && holds(p, PAGE, (uint64_t)p) && served == BYTES / PAGE + 1);
    /* Write protection of memory that has contents already, most of it elsewhere; others use it all the time. */
    char *q = anonymous(BYTES);
    fill(q, BYTES, 2);
    push_out();
    struct uffdio_register protect = {{(uint64_t)q + MIB, BYTES - 2 * MIB}, UFFDIO_REGISTER_MODE_WP, 0};
    CHECK(ioctl(uffd, UFFDIO_REGISTER, &protect) == 0);
    CHECK(holds(q, BYTES, 2));
    struct uffdio_writeprotect all = {{(uint64_t)q + MIB, 4 * MIB}, UFFDIO_WRITEPROTECT_MODE_WP};
    CHECK(ioctl(uffd, UFFDIO_WRITEPROTECT, &all) == 0);
    for (size_t at = MIB; at < 5 * MIB; at += 16 * PAGE) q[at] ^= 1;
    CHECK(protected_faults == 4 * MIB / PAGE / 16);
    for (size_t at = MIB; at < 5 * MIB; at += 16 * PAGE) q[at] ^= 1;
    push_out();
    CHECK(holds(q, BYTES, 2));
    pid_t pid = fork();
    if (pid == 0) _exit(holds(q, BYTES, 2) ? 0 : 1);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    struct uffdio_range range = {(uint64_t)q + MIB, BYTES - 2 * MIB};
    CHECK(ioctl(uffd, UFFDIO_UNREGISTER, &range) == 0);
    fill(q, BYTES, 3);
    push_out();
    CHECK(holds(q, BYTES, 3) && munmap(q, BYTES) == 0 && munmap(p, BYTES) == 0);
    struct uffdio_register wrong = {{(uint64_t)source + 1, PAGE}, UFFDIO_REGISTER_MODE_MISSING, 0};
    CHECK(ioctl(uffd, UFFDIO_REGISTER, &wrong) == -1 && errno == EINVAL);
    CHECK(ioctl(uffd, UFFDIO_REGISTER, (void *)8) == -1 && errno == EFAULT);
}

/* mremap to where the program wants it, which is not where far memory is. */
static void moves_away(void) {
    char *out = mmap(NULL, BYTES, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char *p = anonymous(BYTES);
    CHECK(out != MAP_FAILED);
    fill(p, BYTES / 2, 4);
    push_out();
    CHECK(mremap(p, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, out) == out);
    CHECK(holds(out, BYTES / 2, 4) && zero(out + BYTES / 2, BYTES / 2) && faults(p, 0) && faults(p + BYTES - 1, 0));
    fill(out, BYTES, 5);
    push_out();
    CHECK(holds(out, BYTES, 5));
    char *again = anonymous(BYTES);
    CHECK(zero(again, BYTES));
    fill(again, BYTES, 6);
    /* And into it. */
    CHECK(mremap(out, 4 * MIB, 4 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, again + MIB) == again + MIB);
    push_out();
    CHECK(holds(again + MIB, 4 * MIB, 5) && faults(out, 0));
    pid_t pid = fork();
    if (pid == 0) _exit(holds(again + MIB, 4 * MIB, 5) ? 0 : 1);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    /* A part, with what is read-only, and grown on the way. */
    CHECK(mprotect(again + 8 * MIB, 2 * MIB, PROT_READ) == 0);
    char *small = mmap(NULL, 6 * MIB, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    uint64_t word;
    memcpy(&word, again + 8 * MIB, 8);
    CHECK(mremap(again + 8 * MIB, 2 * MIB, 6 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, small) == small);
    CHECK(memcmp(small, &word, 8) == 0 && zero(small + 2 * MIB, 4 * MIB) && faults(small, 1) && !faults(small, 0));
    CHECK(munmap(small, 6 * MIB) == 0 && munmap(again, BYTES) == 0 && munmap(out + 4 * MIB, BYTES - 4 * MIB) == 0);
}

/* Pages that are here. */
static int in_core(char *at, size_t bytes) {
    static unsigned char pages[BYTES / PAGE];
    int here = 0;
    CHECK(mincore(at, bytes, pages) == 0);
    for (size_t page = 0; page < bytes / PAGE; page++) here += pages[page] & 1;
    return here;
}

/* Memory with a key of its own, where the processor has such. */
static void keys(void) {
    char *p = anonymous(BYTES);
    fill(p, BYTES, 9);
    push_out();
    CHECK(pkey_mprotect(p, MIB, PROT_READ, -1) == 0 && holds(p, MIB, 9) && faults(p, 1) && !faults(p, 0));
    CHECK(syscall(SYS_pkey_mprotect, p, (long)MIB, PROT_READ | PROT_WRITE, -1) == 0 && !faults(p, 1));
    errno = 0;
    CHECK(pkey_mprotect(p + MIB, 2 * MIB, PROT_READ | PROT_WRITE, 14) == -1 && errno == EINVAL);
    push_out();
    if (getenv("NETVM_RUN")) CHECK(in_core(p + MIB, 2 * MIB) < 256); /* it is as it was */
    int key = pkey_alloc(0, 0);
    if (key < 0) {
        puts("keys: skipped (no memory protection keys)");
    } else {
        CHECK(pkey_mprotect(p + 4 * MIB, 4 * MIB, PROT_READ | PROT_WRITE, key) == 0);
        CHECK(holds(p, BYTES, 9));
        CHECK(pkey_set(key, PKEY_DISABLE_WRITE) == 0 && faults(p + 4 * MIB, 1) && !faults(p + 4 * MIB, 0) && !faults(p, 1));
        push_out();
        CHECK(pkey_set(key, 0) == 0);
    }
    CHECK(holds(p, BYTES, 9));
    fill(p, BYTES, 10);
    push_out();
    CHECK(holds(p, BYTES, 10));
    errno = 0;
    CHECK(mmap(NULL, BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 5) == MAP_FAILED && errno == EINVAL);
    CHECK(munmap(p, BYTES) == 0 && (key < 0 || pkey_free(key) == 0));
}

static void advice(void) {
    char *p = anonymous(BYTES);
    fill(p, BYTES, 7);
    push_out();
    CHECK(madvise(p, 4 * MIB, MADV_POPULATE_READ) == 0 && madvise(p, 4 * MIB, MADV_POPULATE_WRITE) == 0);
    CHECK(madvise(p, 4 * MIB, MADV_COLD) == 0 && madvise(p, 4 * MIB, MADV_PAGEOUT) == 0);
    if (getenv("NETVM_RUN")) {
        CHECK(holds(p, MIB, 7) && madvise(p, MIB, MADV_PAGEOUT) == 0 && in_core(p, MIB) == 0);
    }
    CHECK(holds(p, 4 * MIB, 7));
    CHECK(madvise(p, BYTES, MADV_RANDOM) == 0 && holds(p, BYTES, 7));
    CHECK(madvise(p, BYTES, MADV_SEQUENTIAL) == 0 && holds(p, BYTES, 7));
    CHECK(madvise(p, BYTES, MADV_NORMAL) == 0);
    CHECK(mlock(p, 4 * MIB) == 0 && munlock(p, 4 * MIB) == 0);
    CHECK(madvise(p, 4 * MIB, MADV_REMOVE) == -1 && errno == EINVAL);
    CHECK(holds(p, BYTES, 7));
    for (size_t at = 0; at < BYTES; at += 2 * MIB) CHECK(madvise(p + at, MIB, MADV_DONTNEED) == 0);
    push_out();
    for (size_t at = 0; at < BYTES; at += 2 * MIB) CHECK(zero(p + at, MIB) && !zero(p + at + MIB, MIB));
    /* Freed: what is written afterwards stays. */
    fill(p, BYTES, 8);
    CHECK(madvise(p, BYTES, MADV_FREE) == 0);
    for (size_t at = 0; at < BYTES; at += MIB) fill(p + at, PAGE, at);
    push_out();
    for (size_t at = 0; at < BYTES; at += MIB) CHECK(holds(p + at, PAGE, at));
    CHECK(munmap(p, BYTES) == 0);
    /* Locked from the beginning, or not at all: local, or refused. */
    p = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0);
    if (p != MAP_FAILED) {
        fill(p, MIB, 8);
        CHECK(holds(p, MIB, 8) && munmap(p, MIB) == 0);
    }
}

/* A very large mapping, of which little is used. */
static void sparse(void) {
    size_t huge = 200UL << 30;
    char *p = mmap(NULL, huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(p != MAP_FAILED);
    uint64_t state = 9;
    for (int i = 0; i < 6000; i++) {
        size_t at = mix(&state) % (huge / PAGE) * PAGE;
        memcpy(p + at, &at, sizeof at);
    }
    state = 9;
    for (int i = 0; i < 6000; i++) {
        size_t at = mix(&state) % (huge / PAGE) * PAGE;
        CHECK(memcmp(p + at, &at, sizeof at) == 0);
    }
    CHECK(munmap(p, huge) == 0);
}

static char *shared;
static volatile int end;

static void *reads(void *argument) {
    uint64_t state = (uintptr_t)argument;
    while (!end) {
        size_t at = mix(&state) % (BYTES / PAGE) * PAGE;
        uint64_t word, other;
        memcpy(&word, shared + at, 8);
        memcpy(&other, shared + at + 64, 8);
        /* Either is what was written, or has been dropped. */
        CHECK((word == at || word == 0) && (other == at || other == 0));
    }
    return argument;
}

/* Pages are dropped, also while they are on their way to somebody who waits for them. */
static void drops_under_readers(void) {
    shared = anonymous(BYTES);
    pthread_t threads[3];
    uint64_t state = 10;
    for (uintptr_t i = 0; i < 3; i++) CHECK(!pthread_create(&threads[i], NULL, reads, (void *)(i + 1)));
    for (int round = 0; round < 4; round++) {
        for (size_t at = 0; at < BYTES; at += PAGE) memcpy(shared + at, &at, 8), memcpy(shared + at + 64, &at, 8);
        for (int i = 0; i < 1500; i++) {
            size_t at = mix(&state) % (BYTES / PAGE - 64) * PAGE;
            CHECK(madvise(shared + at, (1 + mix(&state) % 64) * PAGE, MADV_DONTNEED) == 0);
        }
    }
    end = 1;
    for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], NULL));
    CHECK(munmap(shared, BYTES) == 0);
}

static char *hinted;

/* Hints of all kinds, of ranges of all lengths, until the end. */
static void *hints(void *argument) {
    static const int all[] = {MADV_PAGEOUT, MADV_WILLNEED, MADV_RANDOM, MADV_SEQUENTIAL, MADV_NORMAL, MADV_POPULATE_READ};
    uint64_t state = (uintptr_t)argument;
    while (!end) {
        size_t at = mix(&state) % (BYTES / PAGE), pages = 1 + mix(&state) % (BYTES / PAGE - at);
        CHECK(madvise(hinted + at * PAGE, pages * PAGE, all[mix(&state) % 6]) == 0);
    }
    return argument;
}

/* While others hint, memory is mapped, grows, and is forked: contents stay, and nothing stands still. */
static void hints_beside_forks(void) {
    pthread_t threads[3];
    hinted = anonymous(BYTES);
    fill(hinted, BYTES, 12);
    end = 0;
    for (uintptr_t i = 0; i < 3; i++) CHECK(!pthread_create(&threads[i], NULL, hints, (void *)(i + 11)));
    for (int round = 0; round < 12; round++) {
        char *other = anonymous(MIB);
        fill(other, MIB, round);
        other = mremap(other, MIB, 2 * MIB, MREMAP_MAYMOVE);
        CHECK(other != MAP_FAILED && madvise(other, 2 * MIB, MADV_PAGEOUT) == 0);
        pid_t pid = fork();
        if (pid == 0) _exit(holds(hinted, BYTES, 12) && holds(other, MIB, round) ? 0 : 1);
        int status;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
        CHECK(holds(other, MIB, round) && zero(other + MIB, MIB) && munmap(other, 2 * MIB) == 0);
    }
    end = 1;
    for (int i = 0; i < 3; i++) CHECK(!pthread_join(threads[i], NULL));
    CHECK(holds(hinted, BYTES, 12) && munmap(hinted, BYTES) == 0);
}

int main(void) {
    drops_under_readers();
    sparse();
    advice();
    keys();
    hints_beside_forks();
    moves_away();
    own_userfaultfd();
    puts("ok");
    fflush(stdout);
    _exit(0);
}
