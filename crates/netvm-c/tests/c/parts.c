/* Far memory in parts on the three lenders given, 2+1, one of which is killed when this has printed "filled". Prints "ok", or why there can be
 * none here. */
#include "test.h"
#include <time.h>

#define LOCAL (4u << 20)
#define BYTES (16u << 20)
#define PAGE 4096u
#define WORDS (BYTES / 8)

/* What word `at` is in a round: never the same twice, and nothing that shrinks. */
static uint64_t word(uint64_t at, uint64_t round) {
    uint64_t x = (at + 1) * UINT64_C(0x9E3779B97F4A7C15) + round * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

static netvm_pager *start(char **lenders) {
    netvm_pager_options options = NETVM_PAGER_OPTIONS_INIT;
    netvm_pager *pager;
    options.lenders = (const char *const *)lenders;
    options.lender_count = 3;
    options.local_bytes = LOCAL;
    options.area_bytes = 2 * BYTES;
    static const uint32_t refused[] = {NETVM_ERASURE(3, 1), NETVM_ERASURE(2, 0), NETVM_ERASURE(2, 5),
                                       NETVM_ERASURE(16, 1), NETVM_ERASURE(0, 1), UINT32_MAX};
    for (size_t index = 0; index < sizeof refused / sizeof *refused; index++) {
        options.erasure = refused[index];
        EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
        CHECK(pager == NULL);
    }
    options.erasure = NETVM_ERASURE(2, 2); /* on three lenders */
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.erasure = NETVM_ERASURE(2, 1);
    options.replicas = 2; /* as well */
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.replicas = 0;
    int status = netvm_pager_start(&options, &pager);
    if (status == NETVM_ERR_SYSTEM && strstr(netvm_last_error(), "userfaultfd") != NULL) {
        printf("skipped %s\n", netvm_last_error());
        exit(0);
    }
    OK(status);
    return pager;
}

/* All words are those of `round`, and become those of the next. */
static void check(uint64_t *words, uint64_t round) {
    for (uint64_t at = 0; at < WORDS; at++) {
        CHECK(words[at] == word(at, round));
        words[at] = word(at, round + 1);
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    netvm_pager *pager = start(argv + 1);
    netvm_memory *memory;
    netvm_far_counts counts;
    void *address;
    OK(netvm_memory_far(pager, BYTES, &memory));
    OK(netvm_memory_query(memory, &address, NULL));
    uint64_t *words = address;
    for (uint64_t at = 0; at < WORDS; at++)
        words[at] = word(at, 0);
    OK(netvm_pager_query(pager, &counts));
    CHECK(counts.lenders_lost == 0 && counts.pages_out > 0 && counts.local_bytes <= LOCAL);
    puts("filled");
    fflush(stdout);
    time_t by = time(NULL) + 60;
    uint64_t round = 0;
    do {
        CHECK(time(NULL) < by);
        check(words, round++);
        OK(netvm_pager_query(pager, &counts));
    } while (counts.lenders_lost == 0);
    /* What is written now has one part less. */
    for (int more = 0; more < 2; more++)
        check(words, round++);
    OK(netvm_pager_query(pager, &counts));
    CHECK(counts.lenders_lost == 1 && counts.pages_in > 0 && counts.local_bytes_peak <= LOCAL);
    OK(netvm_far_advise(pager, address, PAGE, NETVM_FAR_DISCARD));
    for (size_t at = 0; at < PAGE / 8; at++)
        CHECK(words[at] == 0);
    for (uint64_t at = PAGE / 8; at < WORDS; at++)
        CHECK(words[at] == word(at, round));
    OK(netvm_memory_free(memory));
    OK(netvm_pager_close(pager));
    puts("ok");
    return 0;
}
