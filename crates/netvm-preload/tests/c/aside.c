/* A server that puts root aside (seteuid), and whose children become root again and then somebody else for good. */
#include "check.h"
#include <grp.h>
#include <sys/prctl.h>

#define NOBODY 65534
#define BYTES (24 * MIB)

static void wait_for(pid_t pid) {
    int status;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
    if (geteuid() != 0) {
        puts("skipped (not root)");
        return 0;
    }
    char *p = malloc(BYTES);
    fill(p, BYTES, 1);
    CHECK(seteuid(NOBODY) == 0);
    CHECK(prctl(PR_SET_DUMPABLE, 1) == 0 && prctl(PR_SET_PDEATHSIG, SIGUSR1) == 0);
    for (int round = 0; round < 3; round++) {
        pid_t pid = fork();
        if (pid == 0) {
            CHECK(geteuid() == NOBODY && getuid() == 0 && holds(p, BYTES, 1));
            /* What all threads may do, or none. */
            CHECK(setgroups(0, NULL) == -1 && errno == EPERM);
            CHECK(setresgid(NOBODY, NOBODY, NOBODY) == -1 && errno == EPERM);
            pid_t grandchild = fork();
            if (grandchild == 0) _exit(!holds(p, BYTES, 1));
            wait_for(grandchild);
            CHECK(seteuid(0) == 0 && setgroups(0, NULL) == 0 && setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
            CHECK(seteuid(0) == -1);
            fill(p, BYTES, 2);
            CHECK(holds(p, BYTES, 2));
            _exit(0);
        }
        wait_for(pid);
        int signal = 0;
        CHECK(geteuid() == NOBODY && prctl(PR_GET_DUMPABLE) == 1);
        CHECK(prctl(PR_GET_PDEATHSIG, &signal) == 0 && signal == SIGUSR1);
        CHECK(holds(p, BYTES, 1));
    }
    CHECK(seteuid(0) == 0);
    puts("ok");
    return 0;
}
