/* Functions of the C library that are looked up by a handle, as bridges from other languages do. */
#include "check.h"
#include <dlfcn.h>

static void *libc;

static void *by_handle(const char *name) {
    void *found = dlsym(libc, name);
    CHECK(found);
    return found;
}

int main(void) {
    libc = dlopen("libc.so.6", RTLD_NOW);
    CHECK(libc);
    void (*free_by)(void *) = by_handle("free");
    void *(*malloc_by)(size_t) = by_handle("malloc");
    void *(*realloc_by)(void *, size_t) = by_handle("realloc");
    int (*madvise_by)(void *, size_t, int) = by_handle("madvise");
    int (*munmap_by)(void *, size_t) = by_handle("munmap");
    void *(*mmap_by)(void *, size_t, int, int, int, off_t) = by_handle("mmap");
    void *(*mremap_by)(void *, size_t, size_t, int, ...) = by_handle("mremap");

    /* Blocks go from one to the other. */
    enum { COUNT = 64 };
    const size_t block = 300000;
    char *blocks[COUNT];
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = i % 2 ? malloc(block) : malloc_by(block);
        CHECK(blocks[i]);
        fill(blocks[i], block, i);
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK(holds(blocks[i], block, i));
        blocks[i] = i % 2 ? realloc_by(blocks[i], 2 * block) : realloc(blocks[i], 2 * block);
        CHECK(holds(blocks[i], block, i));
        fill(blocks[i], 2 * block, i);
    }

    /* What has left is dropped, too. */
    const size_t bytes = 16 * MIB;
    char *mapped = mmap_by(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapped != MAP_FAILED);
    fill(mapped, bytes, 7);
    CHECK(madvise_by(mapped, bytes / 2, MADV_DONTNEED) == 0);
    CHECK(zero(mapped, bytes / 2));
    fill(mapped, bytes, 8);
    char *moved = mremap_by(mapped, bytes, 2 * bytes, MREMAP_MAYMOVE);
    CHECK(moved != MAP_FAILED && holds(moved, bytes, 8) && zero(moved + bytes, bytes));
    CHECK(munmap_by(moved, 2 * bytes) == 0);
    char *again = mmap(NULL, 2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(again != MAP_FAILED && zero(again, 2 * bytes));
    fill(again, 2 * bytes, 9);

    for (int i = 0; i < COUNT; i++) {
        CHECK(holds(blocks[i], 2 * block, i));
        if (i % 3) free_by(blocks[i]);
        else free(blocks[i]);
    }
    CHECK(holds(again, 2 * bytes, 9));

    /* Everything else is looked up as ever. */
    CHECK(dlsym(libc, "no_such_function") == NULL);
    const char *why = dlerror();
    CHECK(why && strstr(why, "no_such_function"));
    CHECK(dlsym(RTLD_DEFAULT, "free") == (void *)free);
    CHECK(dlsym(RTLD_NEXT, "free") != NULL);
    CHECK(dlsym(RTLD_NEXT, "main") == NULL && dlerror());
    CHECK(dlsym(RTLD_DEFAULT, "strlen") != NULL && dlsym(libc, "strlen") != NULL);
    void *libm = dlopen("libm.so.6", RTLD_NOW);
    double (*cosine)(double) = dlsym(libm, "cos");
    CHECK(cosine && cosine(0.0) == 1.0);
    puts("ok");
    return 0;
}
