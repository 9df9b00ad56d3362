#include "check.h"

#define SLOTS 400
#define ROUNDS 12000

struct block { unsigned char *at; size_t bytes; uint64_t seed; };

static size_t some_size(uint64_t *state) {
    uint64_t r = mix(state);
    switch (r % 16) {
    case 0: return 1 + (r >> 8) % (600 << 10);
    case 1: case 2: return 1 + (r >> 8) % (60 << 10);
    case 3: case 4: case 5: return 1 + (r >> 8) % 8000;
    default: return 1 + (r >> 8) % 500;
    }
}

static struct block shared[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *torture(void *argument) {
    uint64_t state = (uint64_t)(uintptr_t)argument * 7919;
    struct block *blocks = calloc(SLOTS, sizeof *blocks);
    CHECK(blocks);
    for (int round = 0; round < ROUNDS; round++) {
        struct block *b = &blocks[mix(&state) % SLOTS];
        size_t bytes = some_size(&state);
        if (b->at && !holds(b->at, b->bytes, b->seed)) {
            fprintf(stderr, "block %p of %zu bytes has changed\n", (void *)b->at, b->bytes);
            _exit(1);
        }
        switch (mix(&state) % 6) {
        case 0:
            free(b->at);
            b->at = NULL;
            continue;
        case 1: case 2:
            if (b->at) {
                size_t kept = b->bytes < bytes ? b->bytes : bytes;
                unsigned char *p = realloc(b->at, bytes);
                CHECK(p && malloc_usable_size(p) >= bytes);
                if (kept >= 8) CHECK(holds(p, kept & ~7UL, b->seed));
                b->at = p;
                break;
            } /* fall through */
        case 3:
            free(b->at);
            b->at = malloc(bytes);
            CHECK(b->at && (uintptr_t)b->at % 16 == 0);
            break;
        case 4: {
            free(b->at);
            b->at = calloc((bytes + 6) / 7, 7);
            CHECK(b->at && zero(b->at, bytes));
            break;
        }
        case 5: {
            size_t alignment = 16UL << (mix(&state) % 12);
            void *p = NULL;
            free(b->at);
            CHECK(posix_memalign(&p, alignment, bytes) == 0 && (uintptr_t)p % alignment == 0);
            b->at = p;
            break;
        }
        }
        CHECK(malloc_usable_size(b->at) >= bytes);
        b->bytes = bytes;
        b->seed = mix(&state);
        fill(b->at, bytes, b->seed);
        if (mix(&state) % 4 == 0) { /* another thread will free it */
            struct block *other = &shared[mix(&state) % 64];
            pthread_mutex_lock(&lock);
            struct block swap = *other;
            *other = *b;
            *b = swap;
            pthread_mutex_unlock(&lock);
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        if (blocks[i].at) CHECK(holds(blocks[i].at, blocks[i].bytes, blocks[i].seed));
        free(blocks[i].at);
    }
    free(blocks);
    return NULL;
}

int main(void) {
    pthread_t threads[4];
    for (int again = 0; again < 2; again++) {
        for (uintptr_t i = 0; i < 4; i++) CHECK(!pthread_create(&threads[i], NULL, torture, (void *)(i + 1 + 10 * again)));
        for (int i = 0; i < 4; i++) CHECK(!pthread_join(threads[i], NULL));
    }
    /* Growth by realloc, as of a string that is appended to. */
    size_t bytes = 1000;
    unsigned char *p = malloc(bytes);
    fill(p, bytes, 5);
    unsigned char *between = malloc(300 << 10);
    while (bytes < 40 * MIB) {
        bytes += bytes / 3;
        p = realloc(p, bytes);
        CHECK(p && holds(p, 1000, 5));
        p[bytes - 1] = 9;
        free(between);
        between = malloc(300 << 10);
    }
    p = realloc(p, 2000);
    CHECK(p && holds(p, 1000, 5));
    free(p);
    free(between);
    /* Edges. */
    errno = 0;
    volatile size_t huge = (size_t)-100;
    CHECK(!malloc(huge) && errno == ENOMEM);
    CHECK(!calloc(huge, 2) && !calloc(huge / 2, 3) && !reallocarray(NULL, huge, 5));
    void *out;
    CHECK(posix_memalign(&out, 24, 100) == EINVAL && posix_memalign(&out, 64, huge) == ENOMEM);
    void *none = malloc(0);
    CHECK(none);
    free(none);
    free(NULL);
    p = aligned_alloc(2 * MIB, 3 * MIB);
    CHECK(p && (uintptr_t)p % (2 * MIB) == 0);
    fill(p, 3 * MIB, 6);
    p = realloc(p, 5 * MIB);
    CHECK(holds(p, 3 * MIB, 6));
    errno = 77;
    free(p);
    CHECK(errno == 77);
    p = valloc(300 << 10);
    CHECK(p && (uintptr_t)p % PAGE == 0);
    free(p);
    /* A freed large block's successor from calloc is zero. */
    for (int i = 0; i < 50; i++) {
        p = malloc(200 << 10);
        memset(p, 0xee, 200 << 10);
        free(p);
        p = calloc(1, 200 << 10);
        CHECK(zero(p, 200 << 10));
        free(p);
    }
    puts("ok");
    return 0;
}
