/* A program with an allocator of its own, which has its lock when it maps memory; what it lacks is the C library's. */
#include "check.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *next, *end;
static char first[1 << 16];

#define MARK 0x6d616769636d6167UL

static void *take(size_t bytes, size_t alignment) {
    pthread_mutex_lock(&lock);
    if (!next) {
        next = first;
        end = first + sizeof first;
    }
    uintptr_t at = ((uintptr_t)next + 16 + alignment - 1) / alignment * alignment;
    if (at + bytes > (uintptr_t)end) {
        size_t chunk = bytes + alignment + 4 * MIB;
        next = mmap(NULL, chunk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(next != MAP_FAILED);
        end = next + chunk;
        at = ((uintptr_t)next + 16 + alignment - 1) / alignment * alignment;
    }
    next = (char *)at + bytes;
    ((size_t *)at)[-1] = bytes;
    ((size_t *)at)[-2] = MARK;
    pthread_mutex_unlock(&lock);
    return (void *)at;
}

static size_t size_of(void *block) {
    CHECK(((size_t *)block)[-2] == MARK);
    return ((size_t *)block)[-1];
}

void *malloc(size_t bytes) { return take(bytes, 16); }

void free(void *block) {
    if (block) size_of(block);
}

void *calloc(size_t count, size_t bytes) {
    void *block = take(count * bytes, 16);
    return memset(block, 0, count * bytes);
}

void *realloc(void *block, size_t bytes) {
    void *moved = take(bytes, 16);
    if (block) memcpy(moved, block, size_of(block) < bytes ? size_of(block) : bytes);
    return moved;
}

void *memalign(size_t alignment, size_t bytes) { return take(bytes, alignment < 16 ? 16 : alignment); }
void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void **out, size_t alignment, size_t bytes) {
    *out = memalign(alignment, bytes);
    return 0;
}
size_t malloc_usable_size(void *block) { return block ? size_of(block) : 0; }

static void *thread(void *argument) {
    char *block = malloc(MIB);
    fill(block, MIB, (uintptr_t)argument);
    CHECK(holds(block, MIB, (uintptr_t)argument));
    free(block);
    return argument;
}

int main(void) {
    char *blocks[32], *text = malloc(300001);
    for (int i = 0; i < 32; i++) fill(blocks[i] = malloc(MIB), MIB, i);
    memset(text, 'a', 300000);
    text[300000] = 0;
    for (int i = 0; i < 32; i++) {
        char *copy = strdup(text), *part = strndup(text, 1000 * i);
        CHECK(strlen(copy) == 300000 && strlen(part) == 1000UL * i);
        part = reallocarray(part, 40, 1000);
        CHECK(part && malloc_usable_size(part) >= 40000);
        free(copy);
        free(part);
    }
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, thread, (void *)i) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < 32; i++) CHECK(holds(blocks[i], MIB, i));
    /* The C library's FILEs are this allocator's, and leave with all else before each fork. */
    FILE *files[20];
    for (int i = 0; i < 20; i++) {
        CHECK((files[i] = fopen("/proc/self/exe", "r")) != NULL && fgetc(files[i]) == 0x7f);
        fill(malloc(MIB), MIB, i);
    }
    for (int round = 0; round < 3; round++) {
        int status;
        for (int i = 0; i < 32; i++) fill(blocks[i], MIB, i);
        pid_t pid = fork();
        if (pid == 0) {
            for (int i = 0; i < 20; i++) CHECK(fgetc(files[i]) == 'E');
            for (int i = 0; i < 32; i++) CHECK(holds(blocks[i], MIB, i));
            char *more = malloc(MIB);
            fill(more, MIB, 99);
            _exit(!holds(more, MIB, 99));
        }
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    puts("ok");
    return 0;
}
