/* Peers that are connected to again, behind the same handles. Prints "ok". */
#include "test.h"
#include <unistd.h>

#define WHERE 64

static netvm_node *server, *client;
static netvm_memory *kept;
static netvm_key key;
static char folder[] = "/tmp/netvm-c-XXXXXX";

static void address(char where[WHERE]) {
    snprintf(where, WHERE, "unix:%s/socket", folder);
}

static void start(void) {
    static const uint8_t secret[NETVM_SECRET_BYTES] = {1, 2, 3};
    netvm_node_options options = NETVM_NODE_OPTIONS_INIT;
    char where[WHERE];
    options.secret = secret;
    address(where);
    OK(netvm_node_create(&options, &server));
    if (client == NULL)
        OK(netvm_node_create(&options, &client));
    OK(netvm_export_keyed(server, "counters", kept, NETVM_READ_WRITE, 1, &key, NULL));
    OK(netvm_node_listen(server, where, NULL, 0));
}

/* Ends all connections; another node takes the place of this one. */
static void stop(void) {
    char where[WHERE];
    OK(netvm_node_destroy(server));
    address(where);
    unlink(where + strlen("unix:"));
}

static void restart(void) {
    stop();
    start();
}

/* What is told, once, of puts in a connection that ended before they were flushed. It may also be told of its end. */
static void lost(int status) {
    CHECK(status == NETVM_ERR_PEER_LOST || status == NETVM_ERR_OUTCOME_UNKNOWN);
}

static void puts_and_flushes(netvm_region *counters, uint64_t *words) {
    uint64_t old, more = 77;
    for (int round = 0; round < 3; round++) {
        OK(netvm_atomic_fetch_add_u64(counters, 0, 1, &old));
        CHECK(old == (uint64_t)round);
        OK(netvm_put(counters, 8, &more, sizeof more));
        if (round == 1)
            OK(netvm_flush(counters));
        restart();
        int status = netvm_flush(counters);
        if (round != 1)
            lost(status);
        else
            CHECK(status == NETVM_OK || status == NETVM_ERR_PEER_LOST);
        OK(netvm_flush(counters));
    }
    OK(netvm_put_flush(counters, 16, &more, sizeof more));
    CHECK(words[0] == 3 && words[2] == 77);
    static char big[100000];
    netvm_iov iov = {64, big, sizeof big};
    memset(big, 5, sizeof big);
    OK(netvm_putv(counters, &iov, 1));
    OK(netvm_put(counters, 200000, big, sizeof big));
    OK(netvm_flush(counters));
    CHECK(memcmp((char *)words + 64, big, sizeof big) == 0 && memcmp((char *)words + 200000, big, sizeof big) == 0);
    /* Long ones, and mere signals, are answered for as well. */
    for (int what = 0; what < 4; what++) {
        switch (what) {
        case 0: OK(netvm_put(counters, 200000, big, sizeof big)); break;
        case 1: OK(netvm_putv(counters, &iov, 1)); break;
        case 2: OK(netvm_notify(counters, 0, 0)); break;
        default: OK(netvm_put_with(counters, 0, NULL, 0, NETVM_FENCE, NULL)); break;
        }
        restart();
        lost(netvm_flush(counters));
        OK(netvm_flush(counters));
    }
}

/* Waits for what has been posted; how it ended. */
static int ended(int status, netvm_op *op) {
    if (status != NETVM_OK) {
        CHECK(op == NULL);
        return status;
    }
    status = netvm_op_wait(op, LIMIT, NULL);
    OK(netvm_op_close(op));
    return status;
}

static int post_put(netvm_region *region, uint64_t offset, const void *buffer, size_t bytes) {
    netvm_op *op = (netvm_op *)(void *)&key;
    int status = netvm_post_put(region, offset, buffer, bytes, NULL, &op);
    return ended(status, op);
}

static int post_flush(netvm_region *region) {
    netvm_op *op = (netvm_op *)(void *)&key;
    int status = netvm_post_flush(region, NULL, &op);
    return ended(status, op);
}

static void posted(netvm_region *counters, uint64_t *words) {
    static char big[100000];
    uint64_t old = 0, more = 78;
    netvm_op *op;
    OK(netvm_post_get(counters, 0, &old, sizeof old, NULL, &op));
    OK(ended(NETVM_OK, op));
    CHECK(old == words[0]);
    OK(post_put(counters, 16, &more, sizeof more));
    OK(post_flush(counters));
    CHECK(words[2] == 78);
    memset(big, 6, sizeof big);
    for (int round = 0; round < 4; round++) {
        size_t bytes = round % 2 == 0 ? sizeof more : sizeof big;
        OK(post_put(counters, 64, big, bytes));
        restart();
        /* By a flush of either kind, and only once. */
        lost(round < 2 ? post_flush(counters) : netvm_flush(counters));
        OK(post_put(counters, 64, big, sizeof big));
        OK(round < 2 ? post_flush(counters) : netvm_flush(counters));
        CHECK(memcmp((char *)words + 64, big, sizeof big) == 0);
        OK(netvm_flush(counters));
    }
    /* Nothing is lost that was flushed. */
    OK(post_put(counters, 16, &more, sizeof more));
    OK(post_flush(counters));
    restart();
    int status = post_flush(counters);
    CHECK(status == NETVM_OK || status == NETVM_ERR_PEER_LOST);
    /* Counted. */
    netvm_counter *counter;
    netvm_post_options options = NETVM_POST_OPTIONS_INIT;
    OK(netvm_counter_create(&counter));
    options.counter = counter;
    OK(netvm_flush(counters));
    for (int i = 0; i < 100; i++)
        OK(netvm_post_put(counters, 64 + 8 * (uint64_t)i, &more, sizeof more, &options, NULL));
    OK(netvm_post_flush(counters, &options, NULL));
    OK(netvm_counter_wait_all(counter, LIMIT));
    CHECK(words[8] == 78 && words[107] == 78);
    OK(netvm_counter_close(counter));
    EXPECT(NETVM_ERR_BOUNDS, post_put(counters, UINT64_MAX, &more, sizeof more));
    OK(netvm_flush(counters));
}

int main(void) {
    char where[WHERE];
    void *memory;
    netvm_peer *lasting;
    netvm_region *counters;
    CHECK(mkdtemp(folder) != NULL);
    address(where);
    OK(netvm_key_from_text("00112233445566778899aabbccddeeff", &key));
    OK(netvm_memory_alloc(1 << 20, 0, &kept));
    OK(netvm_memory_query(kept, &memory, NULL));
    start();
    netvm_connect_options options = NETVM_CONNECT_OPTIONS_INIT;
    options.reconnect = 1;
    options.link = NETVM_LINK_SOCKET; /* mapped memory has what was put at once: nothing may be lost */
    options.patience_ns = NETVM_SECONDS(30);
    OK(netvm_connect(client, where, &options, &lasting));
    OK(netvm_import(lasting, "counters", &key, &counters));
    puts_and_flushes(counters, memory);
    posted(counters, memory);
    OK(netvm_region_close(counters));
    OK(netvm_peer_close(lasting));
    OK(netvm_node_destroy(client));
    stop();
    OK(netvm_memory_free(kept));
    CHECK(rmdir(folder) == 0);
    puts("ok");
    return 0;
}
