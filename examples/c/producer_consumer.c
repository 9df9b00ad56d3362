/*
 * A producer puts items into a ring in the consumer's memory. Notifications say that they are there.
 *
 *   producer_consumer listen 0.0.0.0:7070       the consumer; prints the command for the producer
 *   producer_consumer connect HOST:7070 KEY
 *
 * A notification comes after the item it stands for, so the consumer never looks at half an item. The producer reads how much has been
 * consumed, but only when the ring seems full.
 */
#include <netvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ITEMS 20000
#define SLOTS 256
#define TIMEOUT NETVM_SECONDS(60)

/* The only notification number. */
enum { PRODUCED, NUMBERS };

struct item {
    uint64_t number;
    char text[56];
};

/* What the consumer exports. */
struct ring {
    uint64_t consumed; /* changed by the consumer with atomic stores, read by the producer with atomic loads */
    struct item items[SLOTS];
};

static int check(int status, const char *what) {
    if (status < 0) {
        fprintf(stderr, "%s: %s: %s\n", what, netvm_strerror(status), netvm_last_error());
        exit(1);
    }
    return status;
}

static void consume(netvm_node *node, const char *address) {
    netvm_memory *memory;
    void *place;
    check(netvm_memory_alloc(sizeof(struct ring), 0, &memory), "allocate memory");
    check(netvm_memory_query(memory, &place, NULL), "find the memory");
    struct ring *ring = place;
    netvm_key key;
    netvm_board *board;
    check(netvm_export_notified(node, "ring", memory, NETVM_READ_WRITE, NUMBERS, &key, &board), "export");
    char actual[128], text[NETVM_KEY_TEXT_BYTES];
    check(netvm_node_listen(node, address, actual, sizeof actual), "listen");
    check(netvm_key_to_text(&key, text), "write a key");
    printf("producer_consumer connect %s %s\n", actual, text);
    fflush(stdout);

    uint64_t consumed = 0, waits = 0;
    while (consumed < ITEMS) {
        check(netvm_board_wait(board, PRODUCED, TIMEOUT), "wait for an item");
        waits++;
        /* All that have come by now, with one wait. */
        uint64_t ready;
        check(netvm_board_acknowledge(board, PRODUCED, SLOTS, &ready), "acknowledge");
        for (; ready > 0; ready--, consumed++) {
            const struct item *item = &ring->items[consumed % SLOTS];
            char expected[sizeof item->text];
            snprintf(expected, sizeof expected, "item %llu", (unsigned long long)consumed);
            if (item->number != consumed || strcmp(item->text, expected) != 0) {
                fprintf(stderr, "item %llu is not what it should be\n", (unsigned long long)consumed);
                exit(1);
            }
        }
        /* The slots are free: after we have read them. */
        __atomic_store_n(&ring->consumed, consumed, __ATOMIC_RELEASE);
    }
    printf("%llu items, %llu waits\n", (unsigned long long)consumed, (unsigned long long)waits);
    netvm_board_close(board);
    /* Until the producer has seen the last count. */
    check(netvm_unexport(node, "ring"), "unexport");
    netvm_memory_free(memory);
}

static void produce(netvm_node *node, const char *address, const char *text) {
    netvm_key key;
    netvm_peer *peer;
    netvm_region *ring;
    check(netvm_key_from_text(text, &key), "read a key");
    check(netvm_connect(node, address, NULL, &peer), "connect");
    check(netvm_import(peer, "ring", &key, &ring), "import");
    uint64_t consumed = 0;
    for (uint64_t number = 0; number < ITEMS; number++) {
        while (number - consumed >= SLOTS)
            check(netvm_atomic_load_u64(ring, offsetof(struct ring, consumed), &consumed), "read the count");
        struct item item = {number, ""};
        snprintf(item.text, sizeof item.text, "item %llu", (unsigned long long)number);
        uint64_t offset = offsetof(struct ring, items) + number % SLOTS * sizeof item;
        check(netvm_put_notify(ring, offset, &item, sizeof item, PRODUCED, 0), "put");
    }
    /* They are all there when this returns. The consumer may have gone by then. */
    int status = netvm_flush(ring);
    if (status != NETVM_OK && status != NETVM_ERR_PEER_LOST)
        check(status, "flush");
    netvm_region_close(ring);
    netvm_peer_close(peer);
}

int main(int argc, char **argv) {
    netvm_node_options options = NETVM_NODE_OPTIONS_INIT;
    options.secret_file = getenv("NETVM_SECRET_FILE");
    netvm_node *node;
    check(netvm_node_create(&options, &node), "start a node");
    if (argc == 3 && strcmp(argv[1], "listen") == 0) {
        consume(node, argv[2]);
    } else if (argc == 4 && strcmp(argv[1], "connect") == 0) {
        produce(node, argv[2], argv[3]);
    } else {
        fprintf(stderr, "usage: %s listen ADDRESS | connect ADDRESS KEY\n", argv[0]);
        return 2;
    }
    netvm_node_destroy(node);
    return 0;
}
