/* Forks while most pages are packed, of children that only end. */
#define ONLY_END 1
#include "packed.c"
