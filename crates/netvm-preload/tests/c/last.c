/* Processes that end with their last thread, not with their first. */
#include "check.h"
#include <sys/wait.h>

static char *memory;
static size_t const bytes = 24 << 20;
static int children;

static void *work(void *shift) {
    usleep(20000);
    for (size_t i = 0; i < bytes; i += 4096) CHECK(memory[i + (size_t)shift] == (char)((i + (size_t)shift) * 31 + i / 4096));
    return NULL;
}

/* The child of a fork has this thread only, and ends with it. */
static void *fork_here(void *unused) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) return work(unused);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
    children++;
    return NULL;
}

static pthread_key_t key;

/* It runs while the first thread ends, and may still use everything. */
static void last_words(void *value) {
    work(NULL);
    if (value == (void *)1) pthread_setspecific(key, (void *)2);
}

/* Who ends the process says how. */
static void *exit_7(void *unused) {
    work(unused);
    exit(7);
}

static void child_that_exits(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    pthread_t thread;
    if (!child) {
        CHECK(!pthread_create(&thread, NULL, exit_7, NULL));
        pthread_exit(NULL);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

static pid_t first;

static void at_exit(void) {
    if (getpid() == first) printf("%d child\nok\n", children);
}

int main(void) {
    first = getpid();
    atexit(at_exit);
    memory = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) memory[i] = (char)(i * 31 + i / 4096);
    child_that_exits();
    CHECK(!pthread_key_create(&key, last_words) && !pthread_setspecific(key, (void *)1));
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, fork_here, NULL));
    for (size_t i = 1; i < 4; i++) {
        CHECK(!pthread_create(&thread, NULL, work, (void *)i));
        CHECK(!pthread_detach(thread));
    }
    pthread_exit(NULL);
}
