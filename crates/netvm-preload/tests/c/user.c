/* Forks of a process that is root no more: of one that may still use userfaultfd and not read itself in /proc, then of one that may not use it. */
#include "check.h"
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define BYTES (24 * MIB)

/* All that it may do from now on, as its effective user. */
static void may(unsigned capability) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};
    if (capability) data[0].effective = data[0].permitted = 1u << capability;
    CHECK(syscall(SYS_capset, &header, data) == 0);
}

static int ended_well(pid_t pid) {
    int status;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void starts_a_program(void) {
    pid_t pid = fork();
    if (pid == 0) {
        /* It is not of the run, whose file is the first user's. */
        char *arguments[] = {"true", NULL}, *environment[] = {NULL};
        execve("/bin/true", arguments, environment);
        _exit(9);
    }
    CHECK(ended_well(pid));
}

/* Whether it may use it. */
static int userfaultfd(void) {
    int descriptor = syscall(SYS_userfaultfd, 0);
    if (descriptor >= 0) close(descriptor);
    return descriptor >= 0;
}

int main(void) {
    char *p = malloc(BYTES), *q = anonymous(BYTES);
    fill(p, BYTES, 1);
    fill_thin(q, BYTES, 2);
    if (getuid() != 0) {
        CHECK(holds(p, BYTES, 1) && holds_thin(q, BYTES, 2));
        puts("0\nok");
        return 0;
    }
    /* Neither /proc/self/mem nor /proc/self/pagemap can be opened then. */
    CHECK(prctl(PR_SET_KEEPCAPS, 1) == 0 && setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
    may(CAP_SYS_PTRACE);
    CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
    CHECK(open("/proc/self/mem", O_RDONLY) < 0 && errno == EACCES);
    starts_a_program();
    for (int round = 0; round < 2; round++) {
        pid_t pid = fork();
        if (pid == 0) {
            /* Some of it can be read only: there is no other way to copy it than by /proc. */
            CHECK(mprotect(q, MIB, PROT_READ) == 0);
            CHECK(holds(p, BYTES, 1) && holds_thin(q, BYTES, 2));
            fill(p, BYTES, 3);
            CHECK(holds_thin(q, BYTES, 2) && holds(p, BYTES, 3));
            starts_a_program();
            _exit(0);
        }
        CHECK(ended_well(pid));
        CHECK(holds(p, BYTES, 1));
    }
    /* Without any right: its children can start programs. */
    may(0);
    int orphans = !userfaultfd();
    pid_t pid = fork();
    if (pid == 0) {
        if (orphans) {
            CHECK(faults(p, 0) && faults(q, 1));
            CHECK(realloc(p, 2 * BYTES) == NULL && errno == ENOMEM);
        }
        char *own = malloc(MIB);
        fill(own, MIB, 4);
        starts_a_program();
        CHECK(holds(own, MIB, 4));
        _exit(0);
    }
    CHECK(ended_well(pid));
    CHECK(holds(p, BYTES, 1) && holds_thin(q, BYTES, 2));
    printf("%d\nok\n", orphans);
    return 0;
}
