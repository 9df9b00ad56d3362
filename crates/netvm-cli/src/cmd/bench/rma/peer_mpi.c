/* Latency of MPI's one-sided operations in a passive epoch, for `netvm bench rma`. Arguments: CPUs of rank 0 and 1, -1 for any. */
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARM = 100, COUNT = 1000, BYTES = 8192 };

static double times[COUNT];

static int by_size(const void *one, const void *two)
{
    double a = *(const double *)one, b = *(const double *)two;
    return a < b ? -1 : a > b;
}

static void operate(int what, int size, char *local, MPI_Win window)
{
    int64_t one = 1, zero = 0, before;
    switch (what) {
    case 0: MPI_Put(local, size, MPI_BYTE, 1, 0, size, MPI_BYTE, window); break;
    case 1: MPI_Get(local, size, MPI_BYTE, 1, 0, size, MPI_BYTE, window); break;
    case 2: MPI_Fetch_and_op(&one, &before, MPI_INT64_T, 1, 4096, MPI_SUM, window); break;
    default: MPI_Compare_and_swap(&one, &zero, &before, MPI_INT64_T, 1, 4096, window); break;
    }
    MPI_Win_flush(1, window);
}

int main(int count, char **arguments)
{
    static const char *const names[] = { "put-complete", "get", "fetch-add", "cas" };
    MPI_Init(&count, &arguments);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    int cpu = count > 2 ? atoi(arguments[1 + rank]) : -1;
    if (cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        sched_setaffinity(0, sizeof set, &set);
    }
    char *memory, local[BYTES];
    MPI_Win window;
    MPI_Win_allocate(BYTES, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
    memset(memory, 0, BYTES);
    memset(local, 1, BYTES);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        MPI_Win_lock_all(0, window);
        for (int what = 0; what < 4; what++) {
            for (int size = 8; size <= (what < 2 ? 4096 : 8); size *= 512) {
                for (int round = -WARM; round < COUNT; round++) {
                    double start = MPI_Wtime();
                    operate(what, size, local, window);
                    if (round >= 0)
                        times[round] = (MPI_Wtime() - start) * 1e6;
                }
                qsort(times, COUNT, sizeof times[0], by_size);
                printf("netvm-peer %s %d %.3f %d\n", names[what], size, times[COUNT / 2], COUNT);
            }
        }
        MPI_Win_unlock_all(window);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
