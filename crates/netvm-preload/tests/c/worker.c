/* A server that is root, whose workers are not: they need far memory only then. And one that starts a program as somebody else, from a child of vfork. */
#include "check.h"
#include <grp.h>

#define BYTES (24 * MIB)

static int ended_well(pid_t pid) {
    int status;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void work(void) {
    char *block = malloc(BYTES), *mapped = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(block && mapped != MAP_FAILED);
    fill(block, BYTES, 1);
    fill(mapped, BYTES, 2);
    CHECK(holds(block, BYTES, 1) && holds(mapped, BYTES, 2));
}

int main(void) {
    if (geteuid() != 0) {
        puts("skipped (not root)");
        return 0;
    }
    for (int way = 0; way < 3; way++) {
        pid_t pid = fork();
        if (pid == 0) {
            if (way == 0) CHECK(setgid(65534) == 0 && initgroups("nobody", 65534) == 0 && setuid(65534) == 0);
            if (way == 1) CHECK(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
            if (way == 2) CHECK(seteuid(65534) == 0);
            CHECK(geteuid() == 65534);
            work();
            /* Its children have what it has. */
            pid_t child = fork();
            if (child == 0) {
                work();
                _exit(0);
            }
            CHECK(ended_well(child));
            _exit(0);
        }
        CHECK(ended_well(pid));
    }
    for (int round = 0; round < 20; round++) {
        pid_t pid = vfork();
        if (pid == 0) {
            char *arguments[] = {"true", NULL}, *environment[] = {NULL};
            if (setgid(65534) || setuid(65534)) _exit(8);
            execve("/bin/true", arguments, environment);
            _exit(9);
        }
        CHECK(ended_well(pid));
    }
    /* The server itself has had no need of far memory. */
    work();
    puts("ok");
    return 0;
}
