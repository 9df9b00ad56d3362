/* Forks while others have locks of the C library and of the allocator. */
#include "check.h"
#include <sys/time.h>

#define BYTES (32 * MIB)

static char *memory;
static volatile int stop;
static volatile int forks;

/* Has the lock of a FILE while it waits for pages. */
static void *writer(void *argument) {
    uint64_t state = 7;
    FILE *out = fopen("/dev/null", "w");
    CHECK(out != NULL);
    while (!stop) {
        size_t page = mix(&state) % (BYTES / PAGE - 16);
        CHECK(fwrite(memory + page * PAGE, 1, 16 * PAGE, out) == 16 * PAGE);
    }
    return argument;
}

/* Has the lock of the list of FILEs while it waits for each of them. */
static void *flusher(void *argument) {
    while (!stop) {
        fflush(NULL);
        usleep(100);
    }
    return argument;
}

static void end_at_once(void) {
    int status;
    pid_t pid = fork();
    if (pid == 0) _exit(0);
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    forks++;
}

static void on_alarm(int signal) {
    (void)signal;
    int error = errno;
    end_at_once();
    errno = error;
}

int main(void) {
    memory = malloc(BYTES);
    fill(memory, BYTES, 1);
    pthread_t threads[2];
    CHECK(pthread_create(&threads[0], NULL, writer, NULL) == 0);
    CHECK(pthread_create(&threads[1], NULL, flusher, NULL) == 0);
    for (int i = 0; i < 150; i++) {
        end_at_once();
        usleep(1000);
    }
    stop = 1;
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);

    /* A handler forks wherever the thread is. */
    struct itimerval every = {{0, 5000}, {0, 5000}}, never = {{0, 0}, {0, 0}};
    CHECK(signal(SIGALRM, on_alarm) != SIG_ERR && setitimer(ITIMER_REAL, &every, NULL) == 0);
    forks = 0;
    for (int i = 0; forks < 60; i++) {
        char *block = malloc(2 * MIB), *small = malloc(200);
        CHECK(block && small);
        block[MIB] = small[100] = (char)i;
        free(small);
        free(block);
    }
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    CHECK(holds(memory, BYTES, 1));
    puts("ok");
    return 0;
}
