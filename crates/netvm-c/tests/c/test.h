/* What the test programs share. */
#ifndef TEST_H
#define TEST_H

#include <netvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                       \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            fprintf(stderr, "%s:%d: %s is false; last error: %s\n", __FILE__, __LINE__, #condition, netvm_last_error()); \
            exit(1);                                                                                           \
        }                                                                                                      \
    } while (0)

/* The call returns this, and an error has a message. */
#define EXPECT(expected, call)                                                                                 \
    do {                                                                                                       \
        int status_ = (call);                                                                                  \
        if (status_ != (expected) || (status_ < 0 && netvm_last_error()[0] == 0)) {                            \
            fprintf(stderr, "%s:%d: %s is %d (%s: %s), not %d (%s)\n", __FILE__, __LINE__, #call, status_,      \
                    netvm_strerror(status_), netvm_last_error(), (int)(expected), netvm_strerror(expected));   \
            exit(1);                                                                                           \
        }                                                                                                      \
    } while (0)

#define OK(call) EXPECT(NETVM_OK, call)

#define LIMIT NETVM_SECONDS(60)

#endif
