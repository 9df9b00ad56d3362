/* Memory that the program registers with a userfaultfd becomes local while threads touch it for the first time and memory is short. */
#include "check.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

#define DIRTY (64 * MIB)
#define PAGES 1024UL
#define TOUCHING 60
#define DIRTYING 60

static volatile int stop;
static char *dirty;
static volatile char *range;
static pthread_barrier_t before, after;

static void *make_dirty(void *argument) {
    uint64_t state = (uintptr_t)argument;
    while (!stop) {
        uint64_t word = mix(&state);
        *(volatile uint64_t *)(dirty + word % (DIRTY / PAGE) * PAGE) = word;
    }
    return argument;
}

static void *touch(void *argument) {
    uintptr_t page = (uintptr_t)argument;
    for (;;) {
        pthread_barrier_wait(&before);
        if (stop) return argument;
        CHECK(*(volatile uint64_t *)(range + page * PAGE) == 0);
        *(volatile uint64_t *)(range + page * PAGE + 8) = page + 1;
        pthread_barrier_wait(&after);
    }
}

int main(void) {
    dirty = mmap(NULL, DIRTY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(dirty != MAP_FAILED);
    CHECK(pthread_barrier_init(&before, NULL, TOUCHING + 1) == 0);
    CHECK(pthread_barrier_init(&after, NULL, TOUCHING + 1) == 0);
    pthread_t dirtying[DIRTYING], touching[TOUCHING];
    pthread_attr_t small;
    CHECK(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, 64 << 10) == 0);
    for (uintptr_t i = 0; i < DIRTYING; i++) CHECK(pthread_create(&dirtying[i], &small, make_dirty, (void *)i) == 0);
    for (uintptr_t i = 0; i < TOUCHING; i++) CHECK(pthread_create(&touching[i], &small, touch, (void *)i) == 0);
    for (int round = 0; round < 10; round++) {
        range = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(range != MAP_FAILED);
        for (size_t page = 64; page < PAGES; page++) *(volatile uint64_t *)(range + page * PAGE + 8) = page + 1;
        usleep(20000);
        pthread_barrier_wait(&before);
        usleep(round % 20 * 20);
        struct uffdio_register wanted = {.range = {(uintptr_t)range, PAGES * PAGE}};
        ioctl(-1, UFFDIO_REGISTER, &wanted);
        pthread_barrier_wait(&after);
        for (size_t page = 0; page < PAGES; page++) {
            uint64_t found = *(volatile uint64_t *)(range + page * PAGE + 8);
            int is_touched = page < TOUCHING || page >= 64;
            if (is_touched && found != page + 1) {
                fprintf(stderr, "round %d: page %zu has %lu\n", round, page, (unsigned long)found);
                _exit(1);
            }
        }
        CHECK(munmap((void *)range, PAGES * PAGE) == 0);
    }
    stop = 1;
    pthread_barrier_wait(&before);
    for (int i = 0; i < TOUCHING; i++) pthread_join(touching[i], NULL);
    for (int i = 0; i < DIRTYING; i++) pthread_join(dirtying[i], NULL);
    puts("ok");
    return 0;
}
