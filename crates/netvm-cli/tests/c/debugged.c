/* For a debugger. */
#include <stdio.h>
#include <stdlib.h>

long *numbers;

void stop_here(void) { puts("stopped"); }

int main(void) {
    const long count = 4 << 20;
    long sum = 0;
    numbers = malloc(count * sizeof *numbers);
    for (long i = 0; i < count; i++) numbers[i] = i * 7 + 1;
    for (long i = 0; i < 1000; i++) sum += numbers[count - 1000 + i];
    stop_here();
    for (long i = 0; i < count; i++) sum += numbers[i];
    printf("sum %ld\n", sum);
    return 0;
}
