/*
 * Sorts numbers in less local memory than they need: what does not fit lies on lenders.
 *
 *   netvm lend --size 2G &
 *   far_sort 127.0.0.1:7070 [NUMBERS] [LOCAL_MIB]      8000000 and 16 if not given
 */
#include <netvm.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check(int status, const char *what) {
    if (status < 0) {
        fprintf(stderr, "%s: %s: %s\n", what, netvm_strerror(status), netvm_last_error());
        exit(1);
    }
    return status;
}

static uint64_t mixed(uint64_t number) {
    uint64_t z = number * UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* Far memory for `count` numbers. */
static uint64_t *numbers(netvm_pager *pager, size_t count, netvm_memory **memory) {
    void *address;
    check(netvm_memory_far(pager, count * sizeof(uint64_t), memory), "far memory");
    check(netvm_memory_query(*memory, &address, NULL), "far memory");
    /* All passes go from the first to the last. */
    check(netvm_far_advise(pager, address, count * sizeof(uint64_t), NETVM_FAR_SEQUENTIAL), "advice");
    return address;
}

/* From `from` to `to`, runs of `width` numbers become runs of twice as many. */
static void merge(const uint64_t *from, uint64_t *to, size_t count, size_t width) {
    for (size_t start = 0; start < count; start += 2 * width) {
        size_t middle = start + width < count ? start + width : count;
        size_t end = start + 2 * width < count ? start + 2 * width : count;
        size_t left = start, right = middle;
        for (size_t at = start; at < end; at++)
            to[at] = right == end || (left < middle && from[left] <= from[right]) ? from[left++] : from[right++];
    }
}

static int compare(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: far_sort LENDER [NUMBERS] [LOCAL_MIB]\n");
        return 2;
    }
    size_t count = argc > 2 ? strtoul(argv[2], NULL, 10) : 8000000;
    uint64_t local = (argc > 3 ? strtoull(argv[3], NULL, 10) : 16) << 20;
    if (count == 0 || count > SIZE_MAX / 32) {
        fprintf(stderr, "far_sort: %zu numbers cannot be sorted\n", count);
        return 2;
    }
    const char *lenders[] = {argv[1]};
    netvm_pager_options options = NETVM_PAGER_OPTIONS_INIT;
    options.lenders = lenders;
    options.lender_count = 1;
    options.local_bytes = local;
    options.secret_file = getenv("NETVM_SECRET_FILE");
    netvm_pager *pager;
    check(netvm_pager_start(&options, &pager), "pager");
    netvm_memory *memory[2];
    uint64_t *from = numbers(pager, count, &memory[0]), *to = numbers(pager, count, &memory[1]);
    uint64_t sum = 0;
    /* Runs that are sorted while they are local. */
    size_t width = local / 4 / sizeof(uint64_t);
    for (size_t start = 0; start < count; start += width) {
        size_t some = count - start < width ? count - start : width;
        for (size_t at = start; at < start + some; at++)
            sum += from[at] = mixed(at);
        qsort(from + start, some, sizeof *from, compare);
    }
    for (; width < count; width *= 2) {
        merge(from, to, count, width);
        uint64_t *other = from;
        from = to;
        to = other;
    }
    uint64_t checked = 0;
    for (size_t at = 0; at < count; at++) {
        if (at > 0 && from[at - 1] > from[at]) {
            fprintf(stderr, "far_sort: number %zu is out of order\n", at);
            return 1;
        }
        checked += from[at];
    }
    if (checked != sum) {
        fprintf(stderr, "far_sort: these are other numbers\n");
        return 1;
    }
    netvm_far_counts counts;
    check(netvm_pager_query(pager, &counts), "counts");
    printf("%zu numbers, %" PRIu64 " MiB in %" PRIu64 " MiB: %" PRIu64 " pages came from the lender, in %" PRIu64
           " faults\n",
           count, counts.far_bytes >> 20, counts.local_bytes_peak >> 20, counts.pages_in, counts.faults);
    check(netvm_memory_free(memory[0]), "free");
    check(netvm_memory_free(memory[1]), "free");
    check(netvm_pager_close(pager), "close");
    return 0;
}
