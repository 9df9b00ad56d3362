/* Small blocks that threads allocate which end soon after: the count of what is local does not lose them. */
#include "check.h"

#define THREADS 600
#define BLOCKS 60

/* Nothing here allocates 64 KiB by itself. */
static void *allocate(void *of_this_thread) {
    for (int i = 0; i < BLOCKS; i++) CHECK(((void **)of_this_thread)[i] = malloc(1000));
    return NULL;
}

static void *blocks[THREADS][BLOCKS];

int main(void) {
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, allocate, blocks[i]));
        CHECK(!pthread_join(thread, NULL));
    }
    for (int i = 0; i < THREADS; i++)
        for (int j = 0; j < BLOCKS; j++) free(blocks[i][j]);
    /* What this thread has of the C library's heap is below its break; far memory is not. */
    size_t local = 0;
    for (int i = 0; i < 20000; i++) {
        void *p = malloc(1000);
        CHECK(p);
        if ((uintptr_t)p < (uintptr_t)sbrk(0)) local += malloc_usable_size(p);
    }
    printf("%zu bytes are local\nok\n", local);
    return 0;
}
