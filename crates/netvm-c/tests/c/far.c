/* Far memory, backed by the lender at the address given. Prints "ok", or why there can be none here. */
#include "test.h"
#include <unistd.h>

#define LOCAL (4u << 20)
#define BYTES (16u << 20)
#define PAGE 4096u

static char record[64];

static netvm_pager *start(const char *lender, const char *no_record) {
    netvm_pager_options options = NETVM_PAGER_OPTIONS_INIT;
    netvm_pager *pager = (netvm_pager *)&options;
    const char *lenders[] = {lender};
    /* As not meant. */
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(NULL, NULL));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, NULL));
    options.lenders = lenders;
    options.lender_count = 1;
    options.local_bytes = LOCAL;
    options.area_bytes = 4 * BYTES;
    options.replicas = 2; /* with one lender */
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    CHECK(pager == NULL);
    options.replicas = 0;
    options.encrypt_pages = 2;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.encrypt_pages = 1;
    options.page_bytes = 5000;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.page_bytes = 4 << 20;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.page_bytes = 64 << 10;
    options.tier = 3;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.tier = NETVM_TIER_LENDER;
    options.shards = 65;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.shards = 2; /* of 4 MiB each at least */
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.shards = 1;
    options.local_bytes_max = 2 * LOCAL;
    options.encryption = 3;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.encryption = NETVM_ENCRYPT_ALWAYS; /* without a secret */
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.encryption = NETVM_ENCRYPT_IF_ASKED;
    lenders[0] = NULL;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    lenders[0] = lender;
    options.local_bytes = PAGE;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.local_bytes = LOCAL;
    options.size = sizeof options + 1;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start((const netvm_pager_options *)(const void *)1, &pager));
    options.size = sizeof options;
    options.learn_file = no_record;
    EXPECT(NETVM_ERR_OTHER, netvm_pager_start(&options, &pager));
    snprintf(record, sizeof record, "/tmp/netvm-far-%ld.record", (long)getpid());
    options.learn_file = record;
    int status = netvm_pager_start(&options, &pager);
    if (status == NETVM_ERR_SYSTEM && strstr(netvm_last_error(), "userfaultfd") != NULL) {
        printf("skipped (%s)\n", netvm_last_error());
        exit(0);
    }
    OK(status);
    netvm_pager *nobody;
    options.lender_count = 0;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &nobody));
    options.lender_count = 1;
    lenders[0] = "nowhere";
    EXPECT(NETVM_ERR_ADDRESS, netvm_pager_start(&options, &nobody));
    lenders[0] = "127.0.0.1:1";
    EXPECT(NETVM_ERR_CONNECT, netvm_pager_start(&options, &nobody));
    return pager;
}

/* Budget, pins and advice; the contents stay. */
static void advise(netvm_pager *pager, uint32_t *words) {
    netvm_far_counts counts, later;
    uint32_t own;
    size_t half = BYTES / 2;
    unsigned char *bytes = (unsigned char *)words;
    for (int advice = NETVM_FAR_NORMAL; advice <= NETVM_FAR_WONT_NEED; advice++) {
        OK(netvm_far_advise(pager, bytes + 1, BYTES - 2, advice));
        OK(netvm_far_advise(pager, bytes, 0, advice));
    }
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_advise(pager, bytes, 1, NETVM_FAR_DISCARD + 1));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_advise(NULL, bytes, 1, NETVM_FAR_NORMAL));
    EXPECT(NETVM_ERR_BOUNDS, netvm_far_advise(pager, &own, sizeof own, NETVM_FAR_DISCARD));
    EXPECT(NETVM_ERR_BOUNDS, netvm_far_advise(pager, NULL, SIZE_MAX, NETVM_FAR_NORMAL));
    OK(netvm_far_advise(pager, bytes + half + 1, PAGE, NETVM_FAR_DISCARD)); /* less than a page of its own */
    EXPECT(NETVM_ERR_FULL, netvm_far_pin(pager, bytes, BYTES));
    EXPECT(NETVM_ERR_BOUNDS, netvm_far_pin(pager, bytes, SIZE_MAX));
    OK(netvm_far_pin(pager, bytes + 5, 2 * (size_t)PAGE));
    OK(netvm_far_pin(pager, bytes, 0));
    for (uint32_t page = 0; page < BYTES / PAGE; page++)
        CHECK(words[page * (PAGE / 4) + 7] == page + 2 && words[page * (PAGE / 4) + 8] == page + 5);
    OK(netvm_pager_query(pager, &counts));
    CHECK(words[7] == 2 && words[PAGE / 4 + 7] == 3 && words[2 * (PAGE / 4) + 7] == 4);
    OK(netvm_pager_query(pager, &later));
    CHECK(later.faults == counts.faults && later.pages_in > 0 && later.pages_out > 0 && later.far_bytes >= BYTES);
    CHECK(later.local_bytes_peak <= LOCAL && later.local_bytes > 0);
    OK(netvm_far_unpin(pager, bytes + 5, 2 * (size_t)PAGE));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_set_local(pager, 3 * (uint64_t)LOCAL));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_set_local(pager, PAGE));
    OK(netvm_pager_set_local(pager, 2 * (uint64_t)LOCAL));
    for (uint32_t page = 0; page < BYTES / PAGE; page++)
        CHECK(words[page * (PAGE / 4) + 7] == page + 2);
    OK(netvm_pager_query(pager, &counts));
    CHECK(counts.local_bytes > LOCAL);
    OK(netvm_pager_set_local(pager, LOCAL));
    OK(netvm_pager_query(pager, &counts));
    CHECK(counts.local_bytes <= LOCAL);
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_query(pager, NULL));
}

/* The record is there, and a file. */
static void keep(netvm_pager *pager) {
    char magic[8];
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_keep_record(NULL));
    OK(netvm_pager_keep_record(pager));
    FILE *file = fopen(record, "rb");
    CHECK(file != NULL && fread(magic, 1, sizeof magic, file) == sizeof magic);
    CHECK(memcmp(magic, "netvmlr1", sizeof magic) == 0);
    CHECK(fclose(file) == 0 && remove(record) == 0);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    netvm_pager *pager = start(argv[1], argv[0]);
    netvm_memory *memory, *others[2];
    EXPECT(NETVM_ERR_ARGUMENT, netvm_memory_far(NULL, PAGE, &memory));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_memory_far(pager, 0, &memory));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_memory_far(pager, PAGE, NULL));
    EXPECT(NETVM_ERR_OTHER, netvm_memory_far(pager, 5 * BYTES, &memory));
    EXPECT(NETVM_ERR_OTHER, netvm_memory_far(pager, SIZE_MAX, &memory));
    CHECK(memory == NULL);
    EXPECT(NETVM_ERR_ARGUMENT, netvm_memory_free((netvm_memory *)(void *)pager));
    /* Four times what may be local, and exported. */
    OK(netvm_memory_far(pager, BYTES - 1, &memory));
    size_t length;
    void *address;
    OK(netvm_memory_query(memory, &address, &length));
    CHECK(length == BYTES && (uintptr_t)address % PAGE == 0);
    netvm_node *node, *other;
    netvm_peer *peer;
    netvm_region *region;
    netvm_key key;
    OK(netvm_node_create(NULL, &node));
    OK(netvm_node_create(NULL, &other));
    OK(netvm_export(node, "far", memory, NETVM_READ_WRITE, &key));
    OK(netvm_connect_local(other, node, &peer));
    OK(netvm_import(peer, "far", &key, &region));
    uint32_t *words = address;
    for (uint32_t page = 0; page < BYTES / PAGE; page++)
        words[page * (PAGE / 4) + 7] = page + 1;
    for (uint64_t page = 0; page < BYTES / PAGE; page++) {
        uint32_t word, more = (uint32_t)page + 5;
        OK(netvm_get(region, page * PAGE + 28, &word, sizeof word));
        CHECK(word == page + 1);
        OK(netvm_put(region, page * PAGE + 32, &more, sizeof more));
        OK(netvm_atomic_fetch_add_u32(region, page * PAGE + 28, 1, &word));
        CHECK(word == page + 1);
    }
    OK(netvm_flush(region));
    for (uint32_t page = 0; page < BYTES / PAGE; page++)
        CHECK(words[page * (PAGE / 4) + 7] == page + 2 && words[page * (PAGE / 4) + 8] == page + 5);
    advise(pager, words);
    keep(pager);
    /* A range of it, which is the same bytes. */
    OK(netvm_memory_range(memory, PAGE, PAGE, &others[0]));
    OK(netvm_memory_query(others[0], &address, NULL));
    CHECK((unsigned char *)address == (unsigned char *)words + PAGE);
    OK(netvm_memory_free(others[0]));
    /* Memory that is freed while it is exported stays so long; then its addresses are used again, as zero. */
    OK(netvm_memory_far(pager, BYTES, &others[0]));
    OK(netvm_memory_far(pager, 2 * BYTES, &others[1]));
    netvm_memory *none;
    EXPECT(NETVM_ERR_OTHER, netvm_memory_far(pager, PAGE, &none));
    OK(netvm_memory_free(memory));
    EXPECT(NETVM_ERR_OTHER, netvm_memory_far(pager, PAGE, &none));
    uint32_t word;
    OK(netvm_get(region, 28, &word, sizeof word));
    CHECK(word == 2);
    OK(netvm_unexport(node, "far"));
    EXPECT(NETVM_ERR_GONE, netvm_get(region, 28, &word, sizeof word));
    OK(netvm_pager_close(pager));
    OK(netvm_memory_free(others[0]));
    OK(netvm_memory_free(others[1]));
    OK(netvm_region_close(region));
    OK(netvm_peer_close(peer));
    OK(netvm_node_destroy(other));
    OK(netvm_node_destroy(node));
    OK(netvm_pager_close(NULL));
    puts("ok");
    return 0;
}
