// What the program starts does not inherit the hold that the pager has on a thread that faults all the time.
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <threads.h>
#include <unistd.h>

extern char **environ;

enum { BYTES = 32 << 20, FAULTS = 1000 };

static unsigned char *far_memory;
static cpu_set_t before;
static int held;

// The kernel's own answer, of which nobody else hears: every call that asks ends the hold.
static cpu_set_t cpus_now(void) {
    cpu_set_t set;
    char line[8192];
    int found = 0;
    CPU_ZERO(&set);
    FILE *status = fopen("/proc/thread-self/status", "r");
    CHECK(status != NULL);
    while (!found && fgets(line, sizeof line, status)) found = strncmp(line, "Cpus_allowed_list:", 18) == 0;
    fclose(status);
    CHECK(found);
    for (char *at = line + 18; *at && *at != '\n';) {
        long first = strtol(at, &at, 10), last = first;
        if (*at == '-') last = strtol(at + 1, &at, 10);
        for (; first <= last; first++) CPU_SET(first, &set);
        if (*at == ',') at++;
    }
    CHECK(CPU_COUNT(&set) > 0);
    return set;
}

static void fault_a_lot(void) {
    static uint64_t random = 1;
    for (int i = 0; i < FAULTS; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        far_memory[(random >> 33) % (BYTES / PAGE) * PAGE]++;
    }
    cpu_set_t now = cpus_now();
    held |= CPU_COUNT(&now) == 1;
}

static void *thread(void *out) {
    *(cpu_set_t *)out = cpus_now();
    return NULL;
}

static int c11_thread(void *out) {
    *(cpu_set_t *)out = cpus_now();
    return 0;
}

// Runs this program by each function with any number of arguments, some of which are passed in registers and some on the stack.
static void run_with_many(int how, char *path) {
    switch (how) {
    case 0:
        execl(path, path, "1", "2", "3", "4", "5", "6", "7", "8", NULL);
        break;
    case 1:
        execlp(path, path, "1", "2", "3", "4", "5", "6", "7", "8", NULL);
        break;
    default:
        execle(path, path, "1", "2", "3", "4", "5", "6", "7", "8", NULL, environ);
    }
    _exit(99);
}

static void expect_unheld(const char *who, const cpu_set_t *set) {
    if (!CPU_EQUAL(set, &before)) {
        fprintf(stderr, "%s may use %d of %d CPUs\n", who, CPU_COUNT(set), CPU_COUNT(&before));
        exit(1);
    }
}

// The number of CPUs of a child that was started somehow, which exits with it.
static void expect_child(const char *who, pid_t pid) {
    int status;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    if (WEXITSTATUS(status) != (CPU_COUNT(&before) & 255)) {
        fprintf(stderr, "%s may use %d of %d CPUs\n", who, WEXITSTATUS(status), CPU_COUNT(&before));
        exit(1);
    }
}

int main(int argc, char **argv) {
    before = cpus_now();
    if (argc > 1) {
        for (int i = 1; argc > 2 && i < 9; i++)
            if (argc != 9 || argv[i][0] != '0' + i || argv[i][1]) return 98;
        return getenv("PATH") ? CPU_COUNT(&before) : 97;
    }
    far_memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(far_memory != MAP_FAILED);
    for (size_t at = 0; at < BYTES; at += PAGE) {
        far_memory[at] = 1;
    }
    char *arguments[] = {argv[0], "child", NULL};
    for (int round = 0; round < 4; round++) {
        cpu_set_t set;
        pthread_t id;
        fault_a_lot();
        CHECK(pthread_create(&id, NULL, thread, &set) == 0 && pthread_join(id, NULL) == 0);
        expect_unheld("a thread", &set);

        thrd_t other;
        fault_a_lot();
        CHECK(thrd_create(&other, c11_thread, &set) == thrd_success && thrd_join(other, NULL) == thrd_success);
        expect_unheld("a thread of C11", &set);

        pid_t pid;
        fault_a_lot();
        CHECK(posix_spawn(&pid, argv[0], NULL, NULL, arguments, environ) == 0);
        expect_child("a spawned program", pid);

        fault_a_lot();
        pid = vfork();
        if (pid == 0) {
            execvp(argv[0], arguments);
            _exit(99);
        }
        expect_child("a program after vfork", pid);

        fault_a_lot();
        pid = vfork();
        if (pid == 0) run_with_many(round % 3, argv[0]);
        expect_child("a program with many arguments", pid);

        fault_a_lot();
        pid = fork();
        if (pid == 0) {
            execve(argv[0], arguments, environ);
            _exit(99);
        }
        expect_child("a program after fork", pid);

        fault_a_lot();
        CPU_ZERO(&set);
        CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
        expect_unheld("the program itself", &set);

        fault_a_lot();
        CPU_ZERO(&set);
        CHECK(syscall(SYS_sched_getaffinity, 0, sizeof set, &set) > 0);
        expect_unheld("the program that asks by syscall(2)", &set);
    }
    // The program's own choice stays.
    int cpu = sched_getcpu();
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    fault_a_lot();
    CHECK(sched_setaffinity(0, sizeof own, &own) == 0);
    fault_a_lot();
    cpu_set_t now = cpus_now();
    CHECK(CPU_EQUAL(&now, &own));
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
    fault_a_lot();
    now = cpus_now();
    CHECK(CPU_EQUAL(&now, &before));
    printf("held: %d, CPUs: %d; ok\n", held, CPU_COUNT(&before));
    return 0;
}
