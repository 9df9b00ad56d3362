#include "check.h"

/* Prints how many threads it has: far memory that is not needed must not be started. */
int main(int argc, char **argv) {
    if (argc > 1) memset(malloc(atol(argv[1])), 1, 1);
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, "Threads:", 8)) fputs(line, stdout);
    return 0;
}
