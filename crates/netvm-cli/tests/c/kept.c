/* Calls by which the kernel keeps pages of a program, or reads and writes them by itself. All on memory that is mostly elsewhere. */
#include "../../../netvm-preload/tests/c/check.h"
#include <aio.h>
#include <arpa/inet.h>
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0)
#endif
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define BYTES (16 * MIB)

/* Whether pages travel by copy: before Linux 6.8, or where netvm was told so. */
static int by_copy(void) {
    const char *without = getenv("NETVM_WITHOUT");
    if (!getenv("NETVM_RUN")) return 0;
    struct uffdio_api api = {.api = UFFD_API};
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    if (without && strstr(without, "move")) return 1;
    if (fd < 0) fd = ioctl(open("/dev/userfaultfd", O_RDWR | O_CLOEXEC), USERFAULTFD_IOC_NEW, O_CLOEXEC);
    CHECK(fd >= 0 && ioctl(fd, UFFDIO_API, &api) == 0 && close(fd) == 0);
    return !(api.features & 1 << 16);
}

static int pressed, by_copy_here;

/* Uses as much memory as there is local memory, so that everything else leaves. */
static void push_out(void) {
    static char *other;
    if (!other) other = anonymous(BYTES);
    fill(other, BYTES, 77);
    CHECK(holds(other, BYTES, 77));
}

/* What a pipe refers to stays as it was when it was given away, whatever happens to the pages. */
static void splices(void) {
    char *p = anonymous(BYTES);
    int ends[2];
    CHECK(pipe(ends) == 0);
    static char out[64 * 1024];
    for (int round = 0; round < 3; round++) {
        fill(p, BYTES, round);
        push_out();
        for (size_t at = 0; at < BYTES; at += 5 * MIB) {
            /* More than there is room for: as much as fits, without waiting for the rest. */
            struct iovec parts[2] = {{p + at + 100, 10000}, {p + at + 5 * PAGE, MIB}};
            ssize_t given = vmsplice(ends[1], parts, 2, round == 2 ? SPLICE_F_GIFT : 0);
            CHECK(given > 10000 && given <= 65536);
            CHECK(vmsplice(ends[1], parts, 2, SPLICE_F_NONBLOCK) == -1 && errno == EAGAIN);
            push_out();
            for (ssize_t got = 0; got < given;) {
                ssize_t some = read(ends[0], out + got, given - got);
                CHECK(some > 0);
                got += some;
            }
            CHECK(memcmp(out, p + at + 100, 10000) == 0);
            CHECK(memcmp(out + 10000, p + at + 5 * PAGE, given - 10000) == 0);
        }
        CHECK(holds(p, BYTES, round));
    }
    /* Out of a pipe into memory, and the errors. */
    CHECK(write(ends[1], p, 5000) == 5000);
    push_out();
    struct iovec in = {p + 3 * MIB + 7, 5000};
    CHECK(vmsplice(ends[0], &in, 1, 0) == 5000 && memcmp(p + 3 * MIB + 7, p, 5000) == 0);
    CHECK(vmsplice(99, &in, 1, 0) == -1 && errno == EBADF);
    CHECK(vmsplice(ends[1], (struct iovec *)8, 1, 0) == -1 && errno == EFAULT && vmsplice(ends[1], &in, 0, 0) == 0);
    int null = open("/dev/null", O_WRONLY);
    CHECK(vmsplice(null, &in, 1, 0) == -1 && errno == EBADF);
    close(null);
    signal(SIGPIPE, SIG_IGN);
    close(ends[0]);
    CHECK(vmsplice(ends[1], &in, 1, 0) == -1 && errno == EPIPE);
    close(ends[1]);
    CHECK(munmap(p, BYTES) == 0);
}

static void *presses(void *pages) {
    for (int round = 0; !__atomic_load_n(&pressed, __ATOMIC_RELAXED); round++)
        for (size_t at = 0; at < BYTES; at += PAGE) ((char *)pages)[at] = round;
    return NULL;
}

/* The device writes while another thread needs the memory for other pages. */
static void direct_under_pressure(int fd, char *p, size_t bytes) {
    char *other = anonymous(BYTES);
    pthread_t thread;
    pressed = 0;
    CHECK(pthread_create(&thread, NULL, presses, other) == 0);
    for (int round = 0; round < 24; round++) {
        memset(p, 0, bytes);
        CHECK(pread(fd, p, bytes, 0) == (ssize_t)bytes && holds(p, bytes, 3));
    }
    __atomic_store_n(&pressed, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0 && munmap(other, BYTES) == 0);
}

ssize_t __read_chk(int, void *, size_t, size_t);
ssize_t __pread_chk(int, void *, size_t, off_t, size_t);

/* Two read from where the file is: each has what it has as a whole. */
static void *share(void *file) {
    char *p = anonymous(4 * MIB);
    for (int round = 0; round < 4; round++) {
        uint64_t first;
        CHECK(read(*(int *)file, p, 2 * MIB) == (ssize_t)(2 * MIB));
        memcpy(&first, p, 8);
        for (size_t at = 0; at < 2 * MIB; at += PAGE) CHECK(*(uint64_t *)(p + at) == first + at / PAGE);
    }
    CHECK(munmap(p, 4 * MIB) == 0);
    return NULL;
}

static void *read_on(void *file) {
    static char *p;
    p = anonymous(MIB);
    for (;;) CHECK(pread(*(int *)file, p, MIB, 0) == (ssize_t)MIB);
    return NULL;
}

/* What read(2) is beside what it reads. */
static void direct_as_ever(int fd, char *p) {
    for (size_t at = 0; at < BYTES; at += PAGE) *(uint64_t *)(p + at) = at / PAGE;
    CHECK(pwrite(fd, p, BYTES, 0) == (ssize_t)BYTES && lseek(fd, 0, SEEK_SET) == 0);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, share, &fd) == 0);
    for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(lseek(fd, 0, SEEK_CUR) == BYTES);
    /* Built with checks, at less than the bytes and at more. */
    for (size_t at = MIB; at <= 4 * MIB; at += 3 * MIB) {
        memset(p, 0, BYTES);
        CHECK(__pread_chk(fd, p, 2 * MIB, at, BYTES) == (ssize_t)(2 * MIB));
        CHECK(*(uint64_t *)p == at / PAGE && *(uint64_t *)(p + MIB) == (at + MIB) / PAGE);
    }
    CHECK(lseek(fd, 0, SEEK_SET) == 0 && __read_chk(fd, p + MIB, MIB, MIB) == (ssize_t)MIB && *(uint64_t *)(p + MIB) == 0);
    /* By a FILE, which reads what is large straight to where it is wanted. */
    FILE *file = fdopen(dup(fd), "r");
    static char own[64 * 1024] __attribute__((aligned(4096)));
    CHECK(file && fseek(file, 0, SEEK_SET) == 0 && setvbuf(file, own, _IOFBF, sizeof own) == 0);
    CHECK(fread(p, PAGE, 1024, file) == 1024 && *(uint64_t *)p == 0 && *(uint64_t *)(p + 1023 * PAGE) == 1023);
    CHECK(fread(p, MIB, 15, file) == 12 && feof(file) && fread(p, 1, MIB, file) == 0 && *(uint64_t *)p == 1024);
    CHECK(fclose(file) == 0);
    /* Errors: what is not there, and what may not be written to. */
    struct iovec parts[2] = {{p, MIB}, {p + MIB, MIB}};
    CHECK(readv(fd, parts, 0) == 0 && readv(fd, parts, -1) == -1 && errno == EINVAL);
    CHECK(readv(fd, (struct iovec *)8, 2) == -1 && errno == EFAULT);
    /* Not so in tmpfs. */
    int is_strict = pread(fd, own, 17, 0) == -1;
    if (is_strict) CHECK(pread(fd, p, MIB + 17, 0) == -1 && errno == EINVAL);
    CHECK(mprotect(p, MIB, PROT_READ) == 0);
    CHECK(pread(fd, p, MIB, 0) == -1 && errno == EFAULT);
    file = fdopen(dup(fd), "r");
    CHECK(file && fseek(file, 0, SEEK_SET) == 0 && setvbuf(file, own, _IOFBF, sizeof own) == 0);
    errno = 0;
    CHECK(fread(p, 1, MIB, file) == 0 && errno == EFAULT && fclose(file) == 0);
    CHECK(mprotect(p, MIB, PROT_READ | PROT_WRITE) == 0);
    pthread_t reader;
    void *result;
    CHECK(pthread_create(&reader, NULL, read_on, &fd) == 0 && usleep(20000) == 0);
    CHECK(pthread_cancel(reader) == 0 && pthread_join(reader, &result) == 0 && result == PTHREAD_CANCELED);
}

/* As a server that was root, or one that has no descriptor left: nobody can ask the kernel any more what it has. */
static void direct_without_privileges(int fd, char *p) {
    for (int way = 0; way < 2; way++) {
        pid_t pid = fork();
        if (pid == 0) {
            if (way == 0 && getuid() == 0) CHECK(setgid(65534) == 0 && setuid(65534) == 0);
            while (way == 1 && dup(0) >= 0) continue;
            direct_under_pressure(fd, p, 4 * MIB);
            unsigned long context = 0;
            CHECK(!by_copy_here || (syscall(SYS_io_setup, 1, &context) == -1 && errno == ENOSYS));
            _exit(0);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* A file read and written around the page cache: pages are pinned while it lasts. */
static void direct(const char *folder) {
    char name[4096];
    snprintf(name, sizeof name, "%s/direct", folder);
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
    if (fd < 0) {
        CHECK(errno == EINVAL);
        puts("no O_DIRECT here");
        return;
    }
    char *p = anonymous(BYTES);
    fill(p, BYTES, 3);
    push_out();
    for (size_t at = 0; at < BYTES; at += 4 * MIB) CHECK(pwrite(fd, p + at, 4 * MIB, at) == (ssize_t)(4 * MIB));
    CHECK(holds(p, BYTES, 3));
    CHECK(madvise(p, BYTES, MADV_DONTNEED) == 0);
    push_out();
    for (size_t at = 0; at < BYTES; at += 4 * MIB) CHECK(pread(fd, p + at, 4 * MIB, at) == (ssize_t)(4 * MIB));
    push_out();
    CHECK(holds(p, BYTES, 3));
    by_copy_here = by_copy();
    direct_under_pressure(fd, p, 4 * MIB);
    direct_without_privileges(fd, p);
    direct_as_ever(fd, p);
    fill(p, BYTES, 3);
    CHECK(pwrite(fd, p, BYTES, 0) == (ssize_t)BYTES);
    /* Each way to read, all of it or up to the end. */
    for (int way = 0; way < 6; way++) {
        memset(p, 0, BYTES);
        CHECK(lseek(fd, 0, SEEK_SET) == 0);
        for (size_t at = 0; at < BYTES; at += 4 * MIB) {
            size_t first = MIB + 8 * PAGE;
            struct iovec parts[2] = {{p + at, first}, {p + at + first, 4 * MIB - first}};
            ssize_t got = way == 0   ? read(fd, p + at, 4 * MIB)
                          : way == 1 ? readv(fd, parts, 2)
                          : way == 2 ? preadv(fd, parts, 2, at)
                          : way == 3 ? preadv2(fd, parts, 2, -1, 0)
                          : way == 4 ? syscall(SYS_pread64, fd, p + at, 4 * MIB, at)
                                     : syscall(SYS_preadv2, fd, parts, 2, at, 0, 0);
            CHECK(got == (ssize_t)(4 * MIB));
        }
        push_out();
        CHECK(holds(p, BYTES, 3));
        if (way == 0) CHECK(read(fd, p, PAGE) == 0);
    }
    struct iovec half = {p + MIB, 4 * MIB};
    CHECK(pread(fd, p + MIB, 4 * MIB, BYTES - 2 * MIB) == (ssize_t)(2 * MIB));
    CHECK(memcmp(p + MIB, p + BYTES - 2 * MIB, 2 * MIB) == 0 && holds(p, MIB, 3));
    CHECK(pread(fd, p, PAGE, BYTES) == 0);
    CHECK(pread(fd, p, PAGE, -1) == -1 && errno == EINVAL && preadv(fd, &half, 1, -1) == -1 && errno == EINVAL);
    CHECK(preadv2(fd, &half, 1, -2, 0) == -1 && errno == EINVAL);
    CHECK(preadv2(fd, &half, 1, 0, 0x40000000) == -1 && errno == EOPNOTSUPP);
    static char here[PAGE] __attribute__((aligned(4096)));
    CHECK(pread(fd, p, 17, 0) == pread(fd, here, 17, 0));
    /* Others do it later, when nobody knows: in threads of the C library, in the kernel. */
    fill(p, BYTES, 3);
    struct aiocb block = {.aio_fildes = fd, .aio_buf = p, .aio_nbytes = 4 * MIB};
    if (aio_read(&block) == 0) {
        const struct aiocb *list[] = {&block};
        while (aio_suspend(list, 1, NULL) != 0) CHECK(errno == EINTR);
        CHECK(aio_return(&block) == (ssize_t)(4 * MIB) && !by_copy());
    } else {
        CHECK(errno == ENOSYS && by_copy());
    }
    struct aiocb *list[] = {NULL, &block};
    block.aio_lio_opcode = LIO_READ;
    CHECK(lio_listio(LIO_WAIT, list, 2, NULL) == (by_copy() ? -1 : 0) && (!by_copy() || errno == ENOSYS));
    block.aio_lio_opcode = LIO_WRITE;
    CHECK(lio_listio(LIO_WAIT, list, 2, NULL) == 0 && aio_return(&block) == (ssize_t)(4 * MIB));
    unsigned long context = 0;
    if (syscall(SYS_io_setup, 1, &context) == 0) CHECK(!by_copy() && syscall(SYS_io_destroy, context) == 0);
    else CHECK(errno == ENOSYS);
    push_out();
    CHECK(holds(p, BYTES, 3));
    CHECK(munmap(p, BYTES) == 0 && close(fd) == 0 && unlink(name) == 0);
}

/* Another process reads and writes this one's memory. */
static void others(void) {
    char *p = anonymous(BYTES), *q = anonymous(BYTES);
    fill(p, BYTES, 4);
    push_out();
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid == 0) {
        struct iovec here = {q, BYTES}, there = {p, BYTES};
        ssize_t got = process_vm_readv(parent, &here, 1, &there, 1, 0);
        if (got < 0 && errno == EPERM) _exit(2);
        CHECK(got == (ssize_t)BYTES && holds(q, BYTES, 4));
        fill(q, BYTES, 5);
        ssize_t put = process_vm_writev(parent, &here, 1, &there, 1, 0);
        if (put < 0 && errno == EPERM && by_copy()) _exit(3);
        CHECK(put == (ssize_t)BYTES);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    if (WEXITSTATUS(status) == 2) puts("no process_vm_readv here");
    else if (WEXITSTATUS(status) == 3) CHECK(by_copy() && holds(p, BYTES, 4));
    else CHECK(WEXITSTATUS(status) == 0 && holds(p, BYTES, 5) && !by_copy());
    /* A process's own memory is no other's. */
    fill(q, BYTES, 9);
    push_out();
    struct iovec here = {q, BYTES}, there = {p, BYTES};
    ssize_t put = process_vm_writev(parent, &here, 1, &there, 1, 0);
    CHECK(put == (ssize_t)BYTES ? holds(p, BYTES, 9) : put < 0 && errno == EPERM && WEXITSTATUS(status) == 2);
    CHECK(munmap(p, BYTES) == 0 && munmap(q, BYTES) == 0);
}

/* Reads all that is mapped in a process, so much at a time, which the kernel pins meanwhile; of each mapping 64 MiB. */
static void scan_by(pid_t process, size_t together) {
    static char buffer[4 * MIB];
    char name[64], line[512];
    snprintf(name, sizeof name, "/proc/%d/maps", process);
    FILE *maps = fopen(name, "r");
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char access;
        CHECK(sscanf(line, "%lx-%lx %c", &start, &end, &access) == 3);
        if (end - start > 64ul << 20) end = start + (64ul << 20);
        for (; access == 'r' && start < end; start += together) {
            size_t bytes = end - start < together ? end - start : together;
            struct iovec here = {buffer, bytes}, there = {(void *)start, bytes};
            if (process_vm_readv(process, &here, 1, &there, 1, 0) < 0 && errno == EPERM) _exit(2);
        }
    }
    fclose(maps);
}

static void scan(pid_t process) {
    scan_by(process, PAGE);
    for (int i = 0; i < 8; i++) scan_by(process, 4 * MIB);
    _exit(0);
}

/* Another process looks at all of this one's memory while pages come and go. */
static void scanned(void) {
    char *p = anonymous(BYTES);
    fill(p, BYTES, 6);
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid == 0) scan(parent);
    int status, rounds = 0;
    for (; waitpid(pid, &status, WNOHANG) == 0; rounds++) CHECK(holds(p, BYTES, 6));
    CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 2));
    CHECK(holds(p, BYTES, 6));
    CHECK(munmap(p, BYTES) == 0);
}

struct ring {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
};

static int one(struct ring *ring, struct io_uring_sqe sqe) {
    unsigned tail = *ring->sq_tail, at = tail & *ring->sq_mask;
    ring->sqes[at] = sqe;
    ring->sq_array[at] = at;
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    while (syscall(SYS_io_uring_enter, ring->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0) CHECK(errno == EINTR);
    CHECK(__atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) != *ring->cq_head);
    int result = ring->cqes[*ring->cq_head & *ring->cq_mask].res;
    __atomic_store_n(ring->cq_head, *ring->cq_head + 1, __ATOMIC_RELEASE);
    return result;
}

/* Under netvm a ring sends nothing without a copy, nor advises, and says so to who asks before. Without, the kernel says what it can. */
static void forbidden(int fd, int (*submit)(void *, struct io_uring_sqe), void *ring, char *p) {
    /* The last two are IORING_OP_SEND_ZC and IORING_OP_SENDMSG_ZC, which headers before Linux 6.1 do not have. */
    static const int ops[] = {IORING_OP_MADVISE, 47, 48};
    int run = getenv("NETVM_RUN") != NULL;
    struct io_uring_probe *probe = calloc(1, sizeof *probe + 256 * sizeof *probe->ops);
    if (fd >= 0) CHECK(syscall(SYS_io_uring_register, fd, IORING_REGISTER_PROBE, probe, 256) == 0);
    for (int which = 0; which < 3; which++) {
        struct io_uring_sqe sqe = {.opcode = ops[which], .fd = -1, .addr = (uintptr_t)p, .len = PAGE};
        int result = submit(ring, sqe);
        CHECK(run ? result == -EACCES : result != -EACCES);
        if (run) CHECK((probe->ops[ops[which]].flags & IO_URING_OP_SUPPORTED) == 0);
    }
    if (fd >= 0) CHECK(probe->ops[IORING_OP_SEND].flags & IO_URING_OP_SUPPORTED);
    free(probe);
}

static int submit_one(void *ring, struct io_uring_sqe sqe) { return one(ring, sqe); }

#ifdef LIBURING
/* Of liburing 2, whose headers may not be here. It makes its system calls by itself. */
struct io_uring { unsigned long queues[24]; unsigned flags; int ring_fd; unsigned rest[16]; };
int io_uring_queue_init(unsigned, struct io_uring *, unsigned);
void io_uring_queue_exit(struct io_uring *);
struct io_uring_sqe *io_uring_get_sqe(struct io_uring *);
int io_uring_submit(struct io_uring *);
int __io_uring_get_cqe(struct io_uring *, struct io_uring_cqe **, unsigned, unsigned, void *);

static int submit_liburing(void *ring, struct io_uring_sqe sqe) {
    struct io_uring_sqe *place = io_uring_get_sqe(ring);
    *place = sqe;
    struct io_uring_cqe *cqe;
    CHECK(io_uring_submit(ring) == 1 && __io_uring_get_cqe(ring, &cqe, 0, 1, NULL) == 0);
    int result = cqe->res;
    /* The head of the completions is the first of their words. */
    unsigned *head = (unsigned *)((struct io_uring *)ring)->queues[13];
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return result;
}

static void liburing(char *p) {
    struct io_uring ring;
    if (io_uring_queue_init(4, &ring, 0) < 0) return;
    int ends[2];
    CHECK(pipe(ends) == 0);
    struct io_uring_sqe sqe = {.opcode = IORING_OP_WRITE, .fd = ends[1], .addr = (uintptr_t)p, .len = PAGE};
    CHECK(submit_liburing(&ring, sqe) == PAGE);
    forbidden(ring.ring_fd, submit_liburing, &ring, p);
    close(ends[0]), close(ends[1]);
    io_uring_queue_exit(&ring);
}
#else
static void liburing(char *p) { (void)p; }
#endif

/* io_uring, with plain buffers and with registered ones, which stay pinned. */
static void rings(const char *folder) {
    struct io_uring_params params = {0};
    struct ring ring = {.fd = (int)syscall(SYS_io_uring_setup, 4, &params)};
    if (ring.fd < 0) {
        puts("no io_uring here");
        CHECK(!by_copy() || errno == ENOSYS);
        return;
    }
    CHECK(!by_copy());
    char *sq = mmap(NULL, params.sq_off.array + params.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof *ring.cqes, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd,
                    IORING_OFF_CQ_RING);
    ring.sqes = mmap(NULL, params.sq_entries * sizeof *ring.sqes, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd, IORING_OFF_SQES);
    CHECK(sq != MAP_FAILED && cq != MAP_FAILED && ring.sqes != MAP_FAILED);
    ring.sq_tail = (unsigned *)(sq + params.sq_off.tail), ring.sq_mask = (unsigned *)(sq + params.sq_off.ring_mask);
    ring.sq_array = (unsigned *)(sq + params.sq_off.array);
    ring.cq_head = (unsigned *)(cq + params.cq_off.head), ring.cq_tail = (unsigned *)(cq + params.cq_off.tail);
    ring.cq_mask = (unsigned *)(cq + params.cq_off.ring_mask), ring.cqes = (struct io_uring_cqe *)(cq + params.cq_off.cqes);
    char name[4096];
    snprintf(name, sizeof name, "%s/ring", folder);
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    char *p = anonymous(BYTES);
    fill(p, BYTES, 6);
    push_out();
    struct io_uring_sqe sqe = {.opcode = IORING_OP_WRITE, .fd = fd, .len = BYTES, .addr = (uintptr_t)p};
    CHECK(one(&ring, sqe) == (int)BYTES);
    CHECK(madvise(p, BYTES, MADV_DONTNEED) == 0);
    push_out();
    sqe.opcode = IORING_OP_READ;
    CHECK(one(&ring, sqe) == (int)BYTES);
    push_out();
    CHECK(holds(p, BYTES, 6));
    /* Pinned as long as they are registered: the pager leaves these pages, and what the ring writes is seen. */
    struct iovec buffer = {p + MIB, 2 * MIB};
    if (syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1) == 0) {
        fill(p, BYTES, 7);
        push_out();
        struct io_uring_sqe fixed = {.opcode = IORING_OP_WRITE_FIXED, .fd = fd, .len = 2 * MIB, .addr = (uintptr_t)p + MIB};
        CHECK(one(&ring, fixed) == (int)(2 * MIB) && holds(p, BYTES, 7));
        memset(p + MIB, 0, 2 * MIB);
        push_out();
        fixed.opcode = IORING_OP_READ_FIXED;
        CHECK(one(&ring, fixed) == (int)(2 * MIB));
        push_out();
        CHECK(holds(p, BYTES, 7));
        CHECK(syscall(SYS_io_uring_register, ring.fd, IORING_UNREGISTER_BUFFERS, NULL, 0) == 0);
    } else {
        puts("no registered buffers here");
    }
    push_out();
    forbidden(ring.fd, submit_one, &ring, p);
    liburing(p);
    CHECK(holds(p + 3 * MIB, MIB, 7) == 0 && munmap(p, BYTES) == 0);
    close(ring.fd);
    close(fd);
    unlink(name);
}

/* What is asked to be sent without a copy is refused, and sent with one. */
static void sockets(void) {
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof here;
    CHECK(bind(listener, (struct sockaddr *)&here, sizeof here) == 0 && listen(listener, 1) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&here, &length) == 0);
    int to = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(to, (struct sockaddr *)&here, sizeof here) == 0);
    int from = accept(listener, NULL, NULL);
    CHECK(setsockopt(to, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    int refused = setsockopt(to, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one);
    CHECK(getenv("NETVM_RUN") ? refused == -1 && errno == EOPNOTSUPP : refused == 0);
    char *p = anonymous(BYTES), *q = anonymous(BYTES);
    fill(p, BYTES, 8);
    push_out();
    /* The flag without the option has no effect. */
    int zerocopy = getenv("NETVM_RUN") ? 0x4000000 : 0;
    for (size_t sent = 0, got = 0; got < BYTES;) {
        if (sent < BYTES) {
            ssize_t some = send(to, p + sent, BYTES - sent, zerocopy | MSG_DONTWAIT);
            CHECK(some > 0 || errno == EAGAIN);
            if (some > 0) sent += some;
        }
        ssize_t some = recv(from, q + got, BYTES - got, sent > got ? 0 : MSG_DONTWAIT);
        CHECK(some > 0 || errno == EAGAIN);
        if (some > 0) got += some;
    }
    push_out();
    CHECK(holds(q, BYTES, 8));
    CHECK(munmap(p, BYTES) == 0 && munmap(q, BYTES) == 0);
    close(to), close(from), close(listener);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    splices();
    direct(argv[1]);
    others();
    scanned();
    rings(argv[1]);
    sockets();
    puts("ok");
    return 0;
}
