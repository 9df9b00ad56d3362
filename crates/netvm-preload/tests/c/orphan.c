/* Forks of a process that can open nothing any more: the children start programs. */
#include "check.h"
#include <sys/resource.h>

#define BYTES (24 * MIB)

extern char **environ;

int main(void) {
    char *p = anonymous(BYTES), *small = malloc(100);
    char *block = malloc(MIB);
    struct rlimit before, none;
    fill(block, MIB, 4);
    fill_thin(p, BYTES, 1);
    /* Children do not have it, whoever their parent is. */
    char *parents = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(parents != MAP_FAILED && madvise(parents, MIB, MADV_DONTFORK) == 0);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    none = before;
    none.rlim_cur = 3;
    for (int round = 0; round < 2; round++) {
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
        pid_t pid = fork();
        if (pid == 0) {
            CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
            free(small); /* it is the parent's */
            char *own = malloc(MIB), *mapped = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            fill(own, MIB, 2);
            fill(mapped, MIB, 3);
            CHECK(realloc(block, 2 * MIB) == NULL && errno == ENOMEM);
            pid_t grandchild = fork();
            if (grandchild == 0) {
                CHECK(holds(own, MIB, 2) && holds(mapped, MIB, 3));
                char *arguments[] = {"true", NULL};
                execvp("true", arguments);
                _exit(9);
            }
            int status;
            CHECK(grandchild > 0 && waitpid(grandchild, &status, 0) == grandchild);
            exit(WIFEXITED(status) ? WEXITSTATUS(status) : 8);
        }
        int status;
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        CHECK(holds_thin(p, BYTES, 1));
    }
    /* With descriptors it is a fork like any other. */
    pid_t pid = fork();
    if (pid == 0)
        exit(!holds_thin(p, BYTES, 1));
    int status;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    puts("ok");
    return 0;
}
