/* System calls by syscall(2): six arguments, results, errno, threads, children. */
#include "../../../netvm-preload/tests/c/check.h"
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define BYTES (32 * MIB)

static int word;

static void *waker(void *argument) {
    usleep(20000);
    __atomic_store_n(&word, 1, __ATOMIC_SEQ_CST);
    /* Nobody, if the other one has seen the word before it slept. */
    CHECK(syscall(SYS_futex, &word, FUTEX_WAKE, 1, 0, 0, 0) >= 0);
    return argument;
}

static volatile sig_atomic_t hits;

static void on_signal(int signal) { hits += signal == SIGUSR1; }

/* How a child of a raw call ends that reads far memory: it may die, but never reads something else. */
static void child_of(long child, const char *p) {
    CHECK(child >= 0);
    if (child == 0) _exit(holds(p, BYTES, 5) ? 0 : 9);
    int status;
    CHECK(waitpid((pid_t)child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : WEXITSTATUS(status) == 0);
}

/* What far memory holds is dropped and moved as by the functions of these names, also where it is on a lender. */
static void by_number(char *far) {
    CHECK(syscall(SYS_madvise, far, BYTES / 4, MADV_DONTNEED) == 0 && zero(far, BYTES / 4));
    CHECK(syscall(SYS_mprotect, far, BYTES / 4, PROT_READ) == 0 && syscall(SYS_mprotect, far, BYTES / 4, PROT_READ | PROT_WRITE) == 0);
    fill(far, BYTES, 6);
    struct iovec parts[] = {{far, BYTES / 8}, {far + BYTES / 2, BYTES / 8}};
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    CHECK(self >= 0);
    /* For every program, and to drop one's own memory, only since Linux 6.13, and under netvm. */
    int in_run = getenv("NETVM_RUN") != NULL;
    long dropped = syscall(SYS_process_madvise, self, parts, 2L, MADV_DONTNEED, 0);
    if (in_run || dropped != -1) CHECK(dropped == (long)BYTES / 4 && zero(far, BYTES / 8) && zero(far + BYTES / 2, BYTES / 8));
    errno = 0;
    CHECK(syscall(SYS_process_madvise, self, parts, 2L, 12345, 0) == -1 && errno == EINVAL);
    /* Pages here and there that are needed soon, as many as the kernel takes; and what is nowhere ends it. */
    struct iovec named[1000];
    for (long index = 0; index < 1000; index++) named[index] = (struct iovec){far + index * 37 % (long)(BYTES / 4096) * 4096, 4096};
    long willing = syscall(SYS_process_madvise, self, named, 1000L, MADV_WILLNEED, 0);
    int may = in_run || willing != -1 || errno != EPERM;
    CHECK(!may || willing == 1000 * 4096);
    char *gone = anonymous(1 << 20);
    CHECK(munmap(gone, 1 << 20) == 0);
    named[500].iov_base = gone;
    CHECK(!may || syscall(SYS_process_madvise, self, named, 1000L, MADV_WILLNEED, 0) == 500 * 4096);
    errno = 0;
    CHECK(!may || (syscall(SYS_process_madvise, self, named + 500, 1L, MADV_WILLNEED, 0) == -1 && errno == ENOMEM));
    CHECK(close(self) == 0);
    fill(far, BYTES, 7);
    char *moved = (char *)syscall(SYS_mremap, far, (long)BYTES, 2L * BYTES, MREMAP_MAYMOVE, 0L);
    CHECK(moved != MAP_FAILED && holds(moved, BYTES, 7) && zero(moved + BYTES, BYTES));
    char *over = (char *)syscall(SYS_mmap, moved, (long)MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0L);
    CHECK(over == moved && zero(moved, MIB));
    CHECK(syscall(SYS_mlock, moved, 2L * BYTES) == 0);
    errno = 0;
    if (getenv("NETVM_RUN")) CHECK(syscall(SYS_mlockall, MCL_CURRENT) == -1 && errno == ENOMEM);
    CHECK(syscall(SYS_munmap, moved, 2L * BYTES) == 0);
    char *again = anonymous(2 * BYTES);
    CHECK(zero(again, 2 * BYTES));
    fill(again, 2 * BYTES, 8);
    CHECK(holds(again, 2 * BYTES, 8));
}

int main(void) {
    CHECK(syscall(SYS_getpid) == getpid());
    errno = 0;
    CHECK(syscall(SYS_close, -1) == -1 && errno == EBADF);
    char *p = (char *)syscall(SYS_mmap, NULL, (size_t)MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);
    CHECK(p != MAP_FAILED);
    fill(p, MIB, 3);
    CHECK(holds(p, MIB, 3) && syscall(SYS_munmap, p, (size_t)MIB) == 0);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, waker, NULL) == 0);
    while (!__atomic_load_n(&word, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &word, FUTEX_WAIT, 0, NULL, NULL, 0);
    CHECK(pthread_join(thread, NULL) == 0);
    signal(SIGUSR1, on_signal);
    CHECK(syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), SIGUSR1) == 0 && hits == 1);
    char *far = anonymous(BYTES);
    fill(far, BYTES, 5);
    child_of(syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL), far);
#ifdef SYS_fork
    child_of(syscall(SYS_fork), far);
#endif
    CHECK(holds(far, BYTES, 5));
    /* A pipe by far memory at both ends. */
    int ends[2];
    CHECK(syscall(SYS_pipe2, ends, 0) == 0 && syscall(SYS_write, ends[1], far + 4096, 4096) == 4096);
    char *back = anonymous(MIB);
    CHECK(syscall(SYS_read, ends[0], back, 4096) == 4096 && memcmp(back, far + 4096, 4096) == 0);
    by_number(far);
    puts("ok");
    fflush(stdout);
    syscall(SYS_exit_group, 0);
    return 3;
}
