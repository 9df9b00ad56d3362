/* A server that is root, whose workers are not: they need far memory only then. And one that starts a program as somebody else, from a child of vfork. */
#include "check.h"
#include <grp.h>
#include <sys/resource.h>

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

/* Without the library. */
static void become_another_program(void) {
    char *arguments[] = {"true", NULL}, *environment[] = {NULL};
    execve("/bin/true", arguments, environment);
    _exit(9);
}

static void become_anothers_program(void) {
    if (setgid(65534) || setuid(65534)) _exit(8);
    become_another_program();
}

static void *lives(void *argument) {
    pause();
    return argument;
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
        if (pid == 0) become_anothers_program();
        CHECK(ended_well(pid));
    }
    /* Far memory cannot start here: who has no need of it does not mind. */
    pid_t limited = fork();
    if (limited == 0) {
        struct rlimit limit = {1 << 30, 1 << 30};
        CHECK(setrlimit(RLIMIT_AS, &limit) == 0 && setuid(65534) == 0);
        pid_t pid = fork();
        if (pid == 0) become_another_program();
        _exit(!ended_well(pid));
    }
    CHECK(ended_well(limited));
    /* Nor is it started in children of a process with threads. */
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, lives, NULL) == 0);
    for (int round = 0; round < 20; round++) {
        pid_t pid = fork();
        if (pid == 0) become_anothers_program();
        CHECK(ended_well(pid));
    }
    /* The server itself has had no need of far memory. */
    work();
    puts("ok");
    return 0;
}
