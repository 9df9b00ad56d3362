/* Forks of a process that can open few things more: a child has all of its far memory, whatever of its lender's it gets, or none. */
#include "check.h"
#include <sys/resource.h>

#define BYTES (12 * MIB)
#define MOST 10

int main(void) {
    char *p = anonymous(BYTES), *block = malloc(MIB);
    struct rlimit before, few;
    fill(p, BYTES, 1);
    fill(block, MIB, 2);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    few = before;
    int far = 0;
    for (int more = 0; more <= MOST; more++) {
        few.rlim_cur = 3 + more;
        CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
        pid_t pid = fork();
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
        if (pid == 0) {
            char *grown = realloc(block, 2 * MIB);
            if (!grown) {
                CHECK(errno == ENOMEM);
                _exit(1);
            }
            CHECK(holds(grown, MIB, 2) && holds(p, BYTES, 1));
            fill(p, BYTES, 3);
            /* Its own child may have as many as it likes. */
            pid_t child = fork();
            if (child == 0) _exit(holds(p, BYTES, 3) ? 0 : 9);
            int status;
            CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
            CHECK(holds(p, BYTES, 3));
            _exit(0);
        }
        int status;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) <= 1);
        /* With none it cannot even connect, with the most it lacks nothing. */
        CHECK((more > 0 || WEXITSTATUS(status) == 1) && (more < MOST || WEXITSTATUS(status) == 0));
        far += WEXITSTATUS(status) == 0;
        CHECK(holds(p, BYTES, 1) && holds(block, MIB, 2));
    }
    printf("%d of %d had far memory\nok\n", far, MOST + 1);
    return 0;
}
