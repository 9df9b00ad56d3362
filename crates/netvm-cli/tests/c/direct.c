/* A file read around the page cache while another thread needs memory, children are forked that do the same, and lenders die. */
#include "../../../netvm-preload/tests/c/check.h"

#define BYTES (4 * MIB)
#define OTHER_BYTES (24 * MIB)

static char *other;
static int over;

static void *presses(void *argument) {
    for (int round = 0; !__atomic_load_n(&over, __ATOMIC_RELAXED); round++)
        for (size_t at = 0; at < OTHER_BYTES; at += PAGE) other[at] = round;
    return argument;
}

static void read_often(int fd, char *into, int times) {
    while (times-- > 0) {
        memset(into, 0, BYTES);
        CHECK(pread(fd, into, BYTES, 0) == BYTES && holds(into, BYTES, 3));
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    char name[4096];
    snprintf(name, sizeof name, "%s/data", argv[1]);
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC | O_DIRECT, 0600);
    if (fd < 0) fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    char *into = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    other = mmap(NULL, OTHER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(fd >= 0 && unlink(name) == 0 && into != MAP_FAILED && other != MAP_FAILED);
    fill(into, BYTES, 3);
    CHECK(pwrite(fd, into, BYTES, 0) == BYTES);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, presses, NULL) == 0);
    for (int round = 0; round < 12; round++) {
        int status;
        pid_t pid = fork();
        if (pid == 0) {
            read_often(fd, into, 2);
            _exit(0);
        }
        if (round == 2) {
            puts("begun");
            fflush(stdout);
        }
        read_often(fd, into, 3);
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    __atomic_store_n(&over, 1, __ATOMIC_RELAXED);
    CHECK(pthread_join(thread, NULL) == 0);
    puts("ok");
    return 0;
}
