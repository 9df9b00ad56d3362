#include "check.h"
#include <spawn.h>

extern char **environ;

#define BYTES (12 * MIB)

static void done(pid_t pid) {
    int status;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static volatile int stop;

static void *noise(void *argument) {
    uint64_t state = (uintptr_t)argument;
    char *p = malloc(4 * MIB);
    while (!stop) {
        size_t at = mix(&state) % (4 * MIB - 64);
        p[at]++;
        free(malloc(mix(&state) % 20000));
        free(malloc(300000));
    }
    free(p);
    return NULL;
}

static void each_its_own(char *p, char **small) {
    int to_child[2], to_parent[2];
    char token = 0;
    fill(p, BYTES, 1);
    CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        CHECK(read(to_child[0], &token, 1) == 1); /* the parent has written by now */
        CHECK(holds(p, BYTES, 1));
        fill(p, BYTES, 2);
        for (int i = 0; i < 1000; i++) {
            CHECK(holds(small[i], 200, i));
            free(small[i]);
        }
        char *own = malloc(3 * MIB), *mapped = anonymous(2 * MIB);
        fill(own, 3 * MIB, 3);
        fill(mapped, 2 * MIB, 4);
        CHECK(write(to_parent[1], &token, 1) == 1 && read(to_child[0], &token, 1) == 1);
        CHECK(holds(p, BYTES, 2) && holds(own, 3 * MIB, 3) && holds(mapped, 2 * MIB, 4));
        pid_t grandchild = fork();
        if (grandchild == 0) {
            CHECK(holds(p, BYTES, 2) && holds(own, 3 * MIB, 3));
            fill(p, BYTES, 5);
            CHECK(holds(p, BYTES, 5));
            _exit(0);
        }
        done(grandchild);
        CHECK(holds(p, BYTES, 2));
        exit(0);
    }
    CHECK(pid > 0);
    fill(p, BYTES / 2, 6);
    CHECK(write(to_child[1], &token, 1) == 1);
    CHECK(read(to_parent[0], &token, 1) == 1);
    CHECK(holds(p, BYTES / 2, 6));
    fill(p, BYTES, 7);
    CHECK(write(to_child[1], &token, 1) == 1);
    done(pid);
    CHECK(holds(p, BYTES, 7));
    for (int i = 0; i < 1000; i++) CHECK(holds(small[i], 200, i));
    for (int i = 0; i < 2; i++) { close(to_child[i]); close(to_parent[i]); }
}

int main(int argc, char **argv) {
    if (argc > 1) { /* started by exec */
        char *p = malloc(3 * MIB);
        fill(p, 3 * MIB, 8);
        CHECK(holds(p, 3 * MIB, 8));
        return strcmp(argv[1], "again") == 0 ? 0 : 1;
    }
    char *p = malloc(BYTES);
    char **small = malloc(1000 * sizeof *small);
    for (int i = 0; i < 1000; i++) {
        small[i] = malloc(200);
        fill(small[i], 200, i);
    }
    each_its_own(p, small);

    pthread_t threads[2];
    for (uintptr_t i = 0; i < 2; i++) CHECK(!pthread_create(&threads[i], NULL, noise, (void *)(i + 1)));
    for (int i = 0; i < 3; i++) each_its_own(p, small);
    for (int i = 0; i < 10; i++) { /* children that do little */
        pid_t pid = fork();
        if (pid == 0) {
            free(malloc(500000));
            _exit(0);
        }
        done(pid);
    }
    stop = 1;
    for (int i = 0; i < 2; i++) CHECK(!pthread_join(threads[i], NULL));

    /* Advice about forks. */
    char *advised = anonymous(3 * MIB);
    fill(advised, 3 * MIB, 9);
    CHECK(madvise(advised, MIB, MADV_DONTFORK) == 0 && madvise(advised + MIB, MIB, MADV_WIPEONFORK) == 0);
    CHECK(faults(advised, 0) && !faults(advised + MIB, 1));
    pid_t pid = fork();
    if (pid == 0) {
        CHECK(zero(advised + MIB, MIB) && !zero(advised + 2 * MIB, MIB));
        _exit(0);
    }
    done(pid);
    CHECK(holds(advised, 3 * MIB, 9));

    /* Other ways to start a process. */
    fill(p, BYTES, 10);
    CHECK(system("exit 0") == 0);
    char *arguments[] = {"/proc/self/exe", "again", NULL};
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    CHECK(length > 0);
    path[length] = 0;
    CHECK(posix_spawn(&pid, path, NULL, NULL, arguments, environ) == 0);
    done(pid);
    pid = vfork();
    if (pid == 0) {
        execv(path, arguments);
        _exit(1);
    }
    done(pid);
    pid = fork();
    if (pid == 0) {
        execv(path, arguments);
        _exit(1);
    }
    done(pid);
    CHECK(holds(p, BYTES, 10));

    /* daemon(3) forks and lets the parent exit. */
    int ends[2];
    char result = 1;
    CHECK(pipe(ends) == 0);
    pid = fork();
    if (pid == 0) {
        CHECK(daemon(0, 1) == 0);
        CHECK(holds(p, BYTES, 10));
        fill(p, BYTES, 11);
        CHECK(holds(p, BYTES, 11));
        for (int fd = 3; fd < 1000; fd++) /* as daemons do */
            if (fd != ends[1]) close(fd);
        char *more = malloc(5 * MIB);
        fill(more, 5 * MIB, 12);
        CHECK(holds(p, BYTES, 11) && holds(more, 5 * MIB, 12));
        result = 0;
        CHECK(write(ends[1], &result, 1) == 1);
        exit(0);
    }
    done(pid);
    close(ends[1]);
    CHECK(read(ends[0], &result, 1) == 1 && result == 0);
    puts("ok");
    return 0;
}
