/* Two threads name pages here and there and look them up, while others drop and rewrite, move, unmap and protect what is named, and children are forked. */
#include "../../../netvm-preload/tests/c/check.h"
#include <sys/syscall.h>
#include <sys/uio.h>

enum { PAGES = 4096, ROUNDS = 500, BATCH = 64 };

static int self;
static char *table, *shifting;
static size_t shifting_bytes = 8 * MIB;
static volatile int ends;

static uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

static uint64_t *word(uint64_t page) { return (uint64_t *)(table + page * PAGE + page % 500 * 8); }

/* Names as the kernel takes them; whatever of it is gone by then is an error, and nothing else. */
static void name(char *start, size_t pages, uint64_t from, int advice) {
    struct iovec parts[BATCH];
    for (uint64_t i = 0; i < BATCH; i++) parts[i] = (struct iovec){start + mixed(from + i) % pages * PAGE, PAGE};
    if (advice == MADV_WILLNEED) syscall(SYS_process_madvise, self, parts, (long)BATCH, advice, 0);
    else for (int i = 0; i < 8; i++) madvise(parts[i].iov_base, 4 * PAGE, advice);
}

static void *looker(void *seed) {
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint64_t from = (uint64_t)(uintptr_t)seed * 1000003 + round * BATCH;
        name(table, PAGES, from, MADV_WILLNEED);
        name(__atomic_load_n(&shifting, __ATOMIC_SEQ_CST), shifting_bytes / PAGE, from, round % 2 ? MADV_WILLNEED : MADV_POPULATE_READ);
        for (uint64_t i = 0; i < BATCH; i++) {
            uint64_t page = mixed(from + i) % PAGES;
            CHECK(*word(page) == mixed(page + 1));
        }
    }
    return NULL;
}

/* What is its own comes and goes. */
static void *shifter(void *none) {
    for (int round = 0; !ends; round++) {
        char *now = shifting;
        fill(now, shifting_bytes, round);
        CHECK(holds(now, shifting_bytes, round));
        CHECK(madvise(now, shifting_bytes / 2, MADV_DONTNEED) == 0 && zero(now, shifting_bytes / 2));
        CHECK(mprotect(now, shifting_bytes, PROT_READ) == 0 && mprotect(now, shifting_bytes, PROT_READ | PROT_WRITE) == 0);
        char *place = mmap(NULL, shifting_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(place != MAP_FAILED);
        fill(now, shifting_bytes, round + 1);
        CHECK(mremap(now, shifting_bytes, shifting_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
        __atomic_store_n(&shifting, place, __ATOMIC_SEQ_CST);
        CHECK(holds(place, shifting_bytes, round + 1));
    }
    return none;
}

/* Lists of names that are far memory themselves, have left, or end where nothing is. Few of them are read at a time, or all 1024. */
static void lists(void) {
    enum { MOST = 1024 };
    size_t bytes = MOST * sizeof(struct iovec);
    /* That far memory knows of the list is seen where it drops what has left: the kernel would find nothing there, and old contents came back. */
    char *list = anonymous(2 * MIB), *dropped = anonymous(MOST * PAGE);
    int in_run = getenv("NETVM_RUN") != NULL;
    CHECK(mprotect(list + MIB, MIB, PROT_NONE) == 0);
    for (int round = 0; round < 6; round++) {
        struct iovec *parts = (struct iovec *)(list + MIB - bytes);
        for (uint64_t i = 0; i < MOST; i++) parts[i] = (struct iovec){table + mixed(round * MOST + i) % PAGES * PAGE, PAGE};
        long count = round % 2 ? MOST : 65;
        if (round % 3) CHECK(madvise(list, MIB, MADV_PAGEOUT) == 0);
        long named = syscall(SYS_process_madvise, self, parts, count, MADV_WILLNEED, 0);
        CHECK(named == (long)(count * PAGE) || (named == -1 && !in_run && (errno == EPERM || errno == ESRCH)));
        fill(dropped, MOST * PAGE, round);
        CHECK(madvise(dropped, MOST * PAGE, MADV_PAGEOUT) == 0);
        for (int i = 0; i < MOST; i++) parts[i] = (struct iovec){dropped + i * PAGE, PAGE};
        named = syscall(SYS_process_madvise, self, parts, count, MADV_DONTNEED, 0);
        CHECK(named == (long)(count * PAGE) || (named == -1 && !in_run));
        CHECK(!in_run || zero(dropped, count * PAGE));
        /* One more than there is, and one that only begins. */
        CHECK(syscall(SYS_process_madvise, self, parts + 1, (long)MOST, MADV_WILLNEED, 0) == -1 && errno == EFAULT);
        CHECK(syscall(SYS_process_madvise, self, (char *)(parts + MOST) - 8, 1L, MADV_WILLNEED, 0) == -1 && errno == EFAULT);
        CHECK(syscall(SYS_process_madvise, self, parts, (long)MOST + 1, MADV_WILLNEED, 0) == -1 && errno == EINVAL);
        for (uint64_t i = 0; i < MOST; i++) CHECK(parts[i].iov_len == PAGE);
    }
    CHECK(munmap(list, 2 * MIB) == 0 && munmap(dropped, MOST * PAGE) == 0);
}

/* The process has no memory by its own number any more. */
static void *without_the_first_thread(void *none) {
    char from = 1, to = 0;
    struct iovec local = {&to, 1}, remote = {&from, 1};
    while (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1) usleep(1000);
    CHECK(errno == ESRCH || errno == EPERM);
    lists();
    /* Far memory goes on, here and in children. */
    for (uint64_t page = 0; page < PAGES; page++) CHECK(*word(page) == mixed(page + 1));
    pid_t pid = fork();
    CHECK(pid >= 0);
    for (uint64_t page = 0; page < PAGES; page++) CHECK(*word(page) == mixed(page + 1));
    for (uint64_t page = 0; page < PAGES; page++) *word(page) = mixed(page + 2);
    for (uint64_t page = 0; page < PAGES; page++) CHECK(*word(page) == mixed(page + 2));
    if (pid == 0) _exit(0);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    puts("ok");
    exit(0);
    return none;
}

int main(void) {
    self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    table = anonymous((size_t)PAGES * PAGE), shifting = anonymous(shifting_bytes);
    CHECK(syscall(SYS_process_madvise, self, (void *)8, 3L, MADV_WILLNEED, 0) == -1 && errno == EFAULT);
    for (uint64_t page = 0; page < PAGES; page++) *word(page) = mixed(page + 1);
    lists();
    pthread_t threads[3];
    CHECK(pthread_create(&threads[2], NULL, shifter, NULL) == 0);
    for (uintptr_t i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, looker, (void *)(i + 1)) == 0);
    for (int child = 0; child < 12; child++) {
        name(table, PAGES, (uint64_t)child * 77, MADV_WILLNEED);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            self = (int)syscall(SYS_pidfd_open, getpid(), 0);
            lists();
            for (uint64_t from = 0; from < 10 * BATCH; from += BATCH) name(table, PAGES, from, MADV_WILLNEED);
            for (uint64_t page = 0; page < PAGES; page++)
                if (*word(page) != mixed(page + 1)) _exit(9);
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    ends = 1;
    CHECK(pthread_join(threads[2], NULL) == 0);
    for (uint64_t page = 0; page < PAGES; page++) CHECK(*word(page) == mixed(page + 1));
    CHECK(pthread_create(&threads[0], NULL, without_the_first_thread, NULL) == 0);
    syscall(SYS_exit, 0);
}
