/* Compiled twice: with TOOL a library that wraps functions of the C library, which it looks up by a handle; and a program that uses them. */
#include "check.h"
#include <dlfcn.h>

#ifdef TOOL
static void *of_libc(const char *name) { return dlsym(dlopen("libc.so.6", RTLD_NOW), name); }

static int wrapped;
int tool_wrapped(void) { return wrapped; }

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = of_libc("pthread_create");
    wrapped++;
    return real(thread, attributes, start, argument);
}

int setuid(uid_t user) {
    int (*real)(uid_t) = of_libc("setuid");
    wrapped++;
    return real(user);
}
#else
static void *body(void *argument) { return argument; }

int main(void) {
    int (*tool_wrapped)(void) = dlsym(RTLD_DEFAULT, "tool_wrapped");
    pthread_t thread;
    void *result = NULL;
    CHECK(tool_wrapped && pthread_create(&thread, NULL, body, &result) == 0);
    CHECK(pthread_join(thread, &result) == 0 && result == &result);
    CHECK(setuid(geteuid()) == 0 && tool_wrapped() == 2);
    puts("ok");
    return 0;
}
#endif
