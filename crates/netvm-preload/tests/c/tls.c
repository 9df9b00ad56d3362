/* Thread-local memory, of which each thread of the process has its own, as of Fortran's and OpenMP's threadprivate. */
#include "check.h"

static __thread volatile char large[700000];

static void *uses(void *seed) {
    for (size_t i = 0; i < sizeof large; i += 4096) large[i] = (char)(uintptr_t)seed;
    char *block = malloc(8 * MIB);
    fill(block, 8 * MIB, (uintptr_t)seed);
    CHECK(holds(block, 8 * MIB, (uintptr_t)seed) && large[40960] == (char)(uintptr_t)seed);
    free(block);
    return seed;
}

int main(void) {
    char *p = malloc(24 * MIB);
    fill(p, 24 * MIB, 1);
    pthread_t threads[2];
    for (uintptr_t i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, uses, (void *)(i + 5)) == 0);
    for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    pid_t pid = fork();
    if (pid == 0) _exit(!holds(p, 24 * MIB, 1) || uses((void *)9) == NULL);
    int status;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(holds(p, 24 * MIB, 1));
    puts("ok");
    return 0;
}
