/* Far memory, backed by the lender at the address given. Prints "ok", or why there can be none here. */
#define _GNU_SOURCE
#include "test.h"
#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#define LOCAL (4u << 20)
#define BYTES (16u << 20)
#define PAGE 4096u

static char record[64];
static uint32_t pager_cpu;
static unsigned char *kept_blocks[1000];
static size_t kept_lengths[1000];

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
    options.cpu = 1; /* not pinned */
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.pinned = 2;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.pinned = 1;
    options.cpu = UINT32_MAX;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    CHECK(strstr(netvm_last_error(), "CPU 4294967295") != NULL);
    pager_cpu = options.cpu = (uint32_t)sched_getcpu();
    options.link = 4;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.link = NETVM_LINK_SOCKET;
    options.lender_timeout_ns = -1;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.lender_timeout_ns = 4000; /* milliseconds, somebody thought */
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.lender_timeout_ns = INT64_MAX;
    options.name = "\xFF";
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.name = "far in C";
    options.reserved = 1;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.reserved = 0;
    lenders[0] = NULL;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    lenders[0] = lender;
    options.local_bytes = PAGE;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_start(&options, &pager));
    options.local_bytes = (uint64_t)1 << 40;
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
    const void *named[300];
    for (int index = 0; index < 300; index++) named[index] = bytes + (size_t)index * 7919 * 64 % BYTES;
    OK(netvm_far_will_need_each(pager, named, 300, 100));
    OK(netvm_far_will_need_each(pager, NULL, 0, 100));
    named[0] = NULL, named[1] = &own, named[2] = (void *)UINTPTR_MAX; /* elsewhere */
    OK(netvm_far_will_need_each(pager, named, 4, SIZE_MAX));
    OK(netvm_far_will_need_each(pager, named, 4, 0));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_will_need_each(pager, NULL, 1, 100));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_will_need_each(NULL, named, 1, 100));
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
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_unpin(pager, bytes + 5, 4 * (size_t)PAGE)); /* more than was pinned */
    OK(netvm_far_unpin(pager, bytes + 5, 2 * (size_t)PAGE));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_unpin(pager, bytes + 5, 2 * (size_t)PAGE));
    /* Beyond what was allocated. */
    EXPECT(NETVM_ERR_BOUNDS, netvm_far_advise(pager, bytes, 2 * (size_t)BYTES, NETVM_FAR_DISCARD));
    EXPECT(NETVM_ERR_BOUNDS, netvm_far_advise(pager, bytes + BYTES, PAGE, NETVM_FAR_RANDOM));
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

static const netvm_stat *named(const netvm_stat *stats, size_t count, const char *name) {
    for (size_t index = 0; index < count; index++)
        if (strcmp(stats[index].name, name) == 0)
            return &stats[index];
    CHECK(!"there is one of that name");
    return NULL;
}

/* Each number by its name is what it is among all. */
static void count(netvm_pager *pager) {
    netvm_stat stats[100], first[2];
    size_t room = sizeof stats / sizeof *stats, count = 0, again = 0;
    uint64_t value = 0;
    netvm_far_counts counts;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_stats(NULL, stats, room, &count));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_stats(pager, NULL, 1, &count));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_stats(pager, stats, room, NULL));
    OK(netvm_pager_stats(pager, NULL, 0, &count));
    CHECK(count > 40 && count <= room);
    memset(first, 1, sizeof first);
    OK(netvm_pager_stats(pager, first, 1, &again));
    CHECK(again == count && first[1].gauge == UINT32_C(0x01010101));
    OK(netvm_pager_stats(pager, stats, room, &count));
    CHECK(count == again && first[0].name == stats[0].name);
    /* Nobody touches far memory here. */
    for (size_t index = 0; index < count; index++) {
        OK(netvm_pager_stat(pager, stats[index].name, &value));
        CHECK(value == stats[index].value && stats[index].gauge <= 1 && stats[index].reserved == 0);
        CHECK(stats[index].help[0] >= 'A' && stats[index].help[strlen(stats[index].help) - 1] == '.');
    }
    OK(netvm_pager_query(pager, &counts));
    CHECK(named(stats, count, "faults")->value == counts.faults && counts.faults > 0);
    CHECK(named(stats, count, "remote_reads")->value == counts.pages_in);
    CHECK(named(stats, count, "far_pages")->value * PAGE == counts.far_bytes);
    CHECK(named(stats, count, "far_pages")->gauge == 1 && named(stats, count, "faults")->gauge == 0);
    CHECK(named(stats, count, "prefetched")->value > 0);
    /* By its socket. */
    CHECK(named(stats, count, "read_at_once")->value == 0);
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_stat(pager, "cows", &value));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_stat(pager, NULL, &value));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_stat(pager, "faults", NULL));
}

/* The one that there is. */
static void lenders(netvm_pager *pager) {
    netvm_lender_state states[2];
    size_t count = 0;
    uint32_t path = 0;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_lenders(NULL, states, 2, &count));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_lenders(pager, NULL, 1, &count));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_lenders(pager, states, 2, NULL));
    OK(netvm_pager_lenders(pager, NULL, 0, &count));
    CHECK(count == 1);
    memset(states, 1, sizeof states);
    OK(netvm_pager_lenders(pager, states, 2, &count));
    CHECK(count == 1 && strlen(states[0].address) > 0 && states[1].lost == UINT32_C(0x01010101));
    CHECK(states[0].lost == 0 && states[0].why_lost[0] == 0 && states[0].reserved == 0);
    CHECK(states[0].held_bytes > 0 && states[0].written_bytes >= states[0].held_bytes);
    CHECK(states[0].read_bytes > 0 && states[0].reads > 0 && states[0].reads_ns > states[0].reads);
    OK(netvm_pager_fault_path(pager, &path));
    CHECK(path == NETVM_FAULTS_THREAD || path == NETVM_FAULTS_SAME_CPU || path == NETVM_FAULTS_IN_THREAD);
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_fault_path(pager, NULL));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_pager_fault_path(NULL, &path));
}

/* How many pager's threads there are, all on this CPU unless it is negative. */
static int pagers(int cpu) {
    char path[64], name[32];
    struct dirent *entry;
    DIR *tasks = opendir("/proc/self/task");
    int found = 0;
    CHECK(tasks != NULL);
    while ((entry = readdir(tasks)) != NULL) {
        snprintf(path, sizeof path, "/proc/self/task/%.20s/comm", entry->d_name);
        FILE *file = fopen(path, "r");
        if (file == NULL)
            continue;
        if (fgets(name, sizeof name, file) != NULL && strcmp(name, "netvm-pager\n") == 0) {
            cpu_set_t set;
            CHECK(cpu < 0 || sched_getaffinity(atoi(entry->d_name), sizeof set, &set) == 0);
            CHECK(cpu < 0 || (CPU_COUNT(&set) == 1 && CPU_ISSET(cpu, &set)));
            found++;
        }
        fclose(file);
    }
    closedir(tasks);
    return found;
}

#define BLOCKS 3000u

/* Blocks of all sizes, more than is local; lengths change, contents stay. */
static void blocks(netvm_pager *pager) {
    static unsigned char *all[BLOCKS];
    static size_t lengths[BLOCKS];
    uint32_t state = 7;
    void *block = &state;
    size_t usable;
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_alloc(NULL, 8, 0, &block));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_alloc(pager, 8, 0, NULL));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_alloc(pager, 0, 0, &block));
    CHECK(block == NULL);
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_alloc(pager, 8, 24, &block));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_alloc(pager, SIZE_MAX, 0, &block));
    EXPECT(NETVM_ERR_OTHER, netvm_far_alloc(pager, (size_t)1 << 50, 0, &block));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_free(pager, &state));
    EXPECT(NETVM_ERR_ARGUMENT, netvm_far_usable(pager, &state, &usable));
    OK(netvm_far_free(pager, NULL));
    for (size_t at = 0; at < BLOCKS; at++) {
        state = state * 1664525 + 1013904223;
        lengths[at] = 1 + (state >> 8) % (at % 50 == 0 ? 300000 : 6000);
        size_t alignment = (size_t)1 << (state >> 28);
        OK(netvm_far_alloc(pager, lengths[at], alignment, &block));
        CHECK((uintptr_t)block % alignment == 0 && (uintptr_t)block % 16 == 0);
        OK(netvm_far_usable(pager, block, &usable));
        CHECK(usable >= lengths[at]);
        all[at] = block;
        memset(block, (int)(at % 251), lengths[at]);
    }
    for (size_t at = 0; at < BLOCKS; at++) {
        state = state * 1664525 + 1013904223;
        size_t now = 1 + (state >> 8) % (at % 50 == 1 ? 500000 : 9000), kept = now < lengths[at] ? now : lengths[at];
        void *moved = all[at];
        EXPECT(NETVM_ERR_ARGUMENT, netvm_far_realloc(pager, moved, 0, &moved));
        EXPECT(NETVM_ERR_ARGUMENT, netvm_far_realloc(pager, all[at] + 1, 5, &moved));
        CHECK(moved == all[at]);
        OK(netvm_far_realloc(pager, moved, now, &moved));
        all[at] = moved;
        for (size_t byte = 0; byte < kept; byte++)
            CHECK(all[at][byte] == at % 251);
        memset(all[at], (int)(at % 253), now);
        lengths[at] = now;
    }
    for (size_t at = 0; at < BLOCKS; at++) {
        for (size_t byte = 0; byte < lengths[at]; byte++)
            CHECK(all[at][byte] == at % 253);
        EXPECT(NETVM_ERR_ARGUMENT, netvm_far_free(pager, all[at] + 8));
        if (at % 7 != 0) {
            OK(netvm_far_free(pager, all[at]));
            EXPECT(NETVM_ERR_ARGUMENT, netvm_far_free(pager, all[at]));
        }
    }
    OK(netvm_far_realloc(pager, NULL, 40000, &block));
    memset(block, 9, 40000);
    /* What is left is looked at when the pager is closed. */
    for (size_t at = 0; at < BLOCKS; at += 7)
        kept_blocks[at / 7] = all[at], kept_lengths[at / 7] = lengths[at];
}

/* They are there when the pager's handle is closed. */
static void blocks_stay(void) {
    for (size_t at = 0; at < BLOCKS; at += 7)
        for (size_t byte = 0; byte < kept_lengths[at / 7]; byte++)
            CHECK(kept_blocks[at / 7][byte] == at % 253);
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

/* With the handle and all memory of it; a block that is left keeps it. */
static void ends(const char *lender) {
    int before = pagers(-1);
    for (int round = 0; round < 12; round++) {
        netvm_pager_options options = NETVM_PAGER_OPTIONS_INIT;
        const char *lenders[] = {lender};
        options.lenders = lenders;
        options.lender_count = 1;
        options.local_bytes = LOCAL;
        options.fault_path = round % 2 ? NETVM_FAULTS_IN_THREAD : NETVM_FAULTS_AUTO;
        netvm_pager *pager;
        netvm_memory *memory;
        void *block, *address;
        int status = netvm_pager_start(&options, &pager);
        if (round % 2 && status == NETVM_ERR_ARGUMENT && strstr(netvm_last_error(), "Linux 6.8")) {
            fprintf(stderr, "far, in-thread: skipped (%s)\n", netvm_last_error());
            continue;
        }
        OK(status);
        CHECK(pagers(-1) == before + 1);
        OK(netvm_far_alloc(pager, 2 * LOCAL, 0, &block));
        memset(block, round + 1, 2 * LOCAL);
        OK(netvm_memory_far(pager, 2 * LOCAL, &memory));
        OK(netvm_memory_query(memory, &address, NULL));
        memset(address, round, 2 * LOCAL);
        OK(netvm_far_free(pager, block));
        OK(netvm_pager_close(pager));
        CHECK(pagers(-1) == before + 1);
        for (size_t byte = 0; byte < 2 * LOCAL; byte += PAGE)
            CHECK(((unsigned char *)address)[byte] == round);
        OK(netvm_memory_free(memory));
        /* Its last steps may take a moment. */
        for (int looks = 0; pagers(-1) > before; looks++) {
            CHECK(looks < 5000);
            usleep(1000);
        }
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    cpu_set_t before, after;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    netvm_pager *pager = start(argv[1], argv[0]);
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&before, &after));
    CHECK(pagers((int)pager_cpu) == 1);
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
    count(pager);
    lenders(pager);
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
    OK(netvm_memory_free(others[1]));
    blocks(pager);
    OK(netvm_pager_close(pager));
    blocks_stay();
    OK(netvm_memory_free(others[0]));
    OK(netvm_region_close(region));
    OK(netvm_peer_close(peer));
    OK(netvm_node_destroy(other));
    OK(netvm_node_destroy(node));
    OK(netvm_pager_close(NULL));
    ends(argv[1]);
    puts("ok");
    return 0;
}
