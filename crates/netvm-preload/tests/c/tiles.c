/* A matrix that is read and written in tiles of columns, by forks and threads while their parent goes on: windows of a stride lie across what was copied. */
#include "check.h"

/* A column is 4.7 pages long. */
enum { ROWS = 2400, COLUMNS = 1000, FORKS = 4 };

static uint64_t *matrix;

static void replace(uint64_t old, uint64_t new, int from, int to) {
    for (int band = 0; band < ROWS; band += 512)
        for (int tile = from; tile < to; tile += 8)
            for (int row = band; row < band + 512 && row < ROWS; row += 8)
                for (int column = tile; column < tile + 8 && column < to; column++) {
                    uint64_t place = (uint64_t)column * ROWS + row;
                    CHECK(matrix[place] == (old == 0 ? 0 : old ^ place));
                    matrix[place] = new ^ place;
                }
}

static void *half(void *first) {
    int from = (int)(intptr_t)first;
    replace(FORKS + 1, 100, from, from + COLUMNS / 2);
    return NULL;
}

int main(void) {
    matrix = malloc(ROWS * COLUMNS * sizeof *matrix);
    replace(0, 1, 0, COLUMNS);
    for (int number = 1; number <= FORKS; number++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            replace(number, 200 + number, 0, COLUMNS);
            replace(200 + number, 300, 0, COLUMNS);
            _exit(0);
        }
        replace(number, number + 1, 0, COLUMNS);
        /* Two at a time. */
        for (int status; number % 2 == 0 && wait(&status) > 0;) CHECK(status == 0);
    }
    pthread_t threads[2];
    for (int t = 0; t < 2; t++)
        CHECK(pthread_create(&threads[t], NULL, half, (void *)(intptr_t)(t * COLUMNS / 2)) == 0);
    for (int t = 0; t < 2; t++) CHECK(pthread_join(threads[t], NULL) == 0);
    puts("ok");
    return 0;
}
