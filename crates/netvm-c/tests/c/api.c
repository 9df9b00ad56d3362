/* Uses every function once as it is meant. Prints "ok". */
#include "test.h"
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES (3u << 20)

static netvm_node *node, *other;
static netvm_peer *peer;
static netvm_memory *memory;
static unsigned char *bytes;
static netvm_board *board;
static netvm_region *region;

static void begin(void) {
    size_t length;
    void *address;
    char where[64];
    netvm_key key, again;
    char text[NETVM_KEY_TEXT_BYTES];
    netvm_node_options options = NETVM_NODE_OPTIONS_INIT;
    uint8_t secret[NETVM_SECRET_BYTES] = {1, 2, 3};
    options.secret = secret;
    options.encryption = NETVM_ENCRYPT_ALWAYS;
    OK(netvm_node_create(&options, &node));
    OK(netvm_node_create(&options, &other));
    OK(netvm_memory_alloc(BYTES, 0, &memory));
    OK(netvm_memory_query(memory, &address, &length));
    CHECK(length >= BYTES && (uintptr_t)address % 4096 == 0);
    bytes = address;
    CHECK(bytes[0] == 0 && bytes[BYTES - 1] == 0);
    OK(netvm_export_notified(node, "memory", memory, NETVM_READ_WRITE, 8, &key, &board));
    OK(netvm_key_to_text(&key, text));
    CHECK(strlen(text) == 32);
    OK(netvm_key_from_text(text, &again));
    CHECK(memcmp(&key, &again, sizeof key) == 0);
    OK(netvm_node_listen(node, "127.0.0.1:0", where, sizeof where));
    netvm_connect_options connect = NETVM_CONNECT_OPTIONS_INIT;
    connect.rails = 2;
    OK(netvm_connect(other, where, &connect, &peer));
    OK(netvm_import(peer, "memory", &again, &region));
    netvm_region_info info;
    OK(netvm_region_query(region, &info));
    CHECK(info.bytes == length && info.rights == NETVM_READ_WRITE && info.notifications == 8);
    const char *choice = getenv("NETVM_LINK");
    CHECK(choice == NULL || (strcmp(choice, "auto") == 0) == (strcmp(info.link, "shm") == 0));
    OK(netvm_node_poll(node));
}

static void transfers(void) {
    /* Of all sizes around the limits inside the library. */
    static const size_t sizes[] = {0, 1, 7, 4096, 16 << 10, (16 << 10) + 1, 1 << 20, (1 << 20) + 1, (2 << 20) + 4097};
    unsigned char *mine = malloc(BYTES), *back = malloc(BYTES);
    CHECK(mine != NULL && back != NULL);
    for (size_t i = 0; i < BYTES; i++)
        mine[i] = (unsigned char)(i * 131 + i / 977);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t size = sizes[i];
        memset(bytes, 0, BYTES);
        OK(netvm_put(region, 5, mine, size));
        OK(netvm_flush(region));
        CHECK(memcmp(bytes + 5, mine, size) == 0 && bytes[4] == 0 && bytes[5 + size] == 0);
        memset(back, 0xEE, size + 1);
        OK(netvm_get(region, 5, back, size));
        CHECK(memcmp(back, mine, size) == 0 && back[size] == 0xEE);
        /* With all options, and told when it is there. */
        memset(bytes, 0, BYTES);
        netvm_signal signal = {3, (uint32_t)size + 1};
        uint32_t value;
        OK(netvm_put_with(region, 5, mine, size, NETVM_FENCE, &signal));
        OK(netvm_board_wait(board, 3, LIMIT));
        OK(netvm_board_value(board, 3, &value));
        CHECK(value == size + 1 && memcmp(bytes + 5, mine, size) == 0);
        OK(netvm_board_reset(board, 3, &value));
        CHECK(value == size + 1);
        OK(netvm_put_with(region, 5, mine, size, 0, NULL));
        OK(netvm_put_notify(region, 5, mine, size, 1, 0));
        OK(netvm_board_spin(board, 1, LIMIT));
        OK(netvm_board_acknowledge(board, 1, 10, NULL));
    }
    netvm_iov iov[4] = {{0, mine, 10}, {100, mine + 10, 70000}, {1 << 20, mine + 70010, 1500000}, {90, NULL, 0}};
    memset(bytes, 0, BYTES);
    OK(netvm_putv(region, iov, 4));
    OK(netvm_flush(region));
    CHECK(memcmp(bytes, mine, 10) == 0 && bytes[10] == 0);
    CHECK(memcmp(bytes + 100, mine + 10, 70000) == 0 && memcmp(bytes + (1 << 20), mine + 70010, 1500000) == 0);
    memset(back, 0, BYTES);
    for (int i = 0; i < 3; i++)
        iov[i].buffer = back + ((unsigned char *)iov[i].buffer - mine);
    OK(netvm_getv(region, iov, 4));
    CHECK(memcmp(back, mine, 1570010) == 0);
    OK(netvm_putv(region, NULL, 0));
    /* Of pieces that are many. */
    enum { PIECES = 700 };
    netvm_iov *many = calloc(PIECES, sizeof *many);
    CHECK(many != NULL);
    for (int i = 0; i < PIECES; i++)
        many[i] = (netvm_iov){(uint64_t)i * 2000, mine + i * 1000, 1000};
    OK(netvm_putv(region, many, PIECES));
    memset(back, 0, BYTES);
    for (int i = 0; i < PIECES; i++)
        many[i].buffer = back + i * 1000;
    OK(netvm_getv(region, many, PIECES));
    CHECK(memcmp(back, mine, PIECES * 1000) == 0);
    free(many);
    free(mine);
    free(back);
}

#define ATOMICS(BITS)                                                                \
    static void atomics_##BITS(void) {                                               \
        uint##BITS##_t *word = (uint##BITS##_t *)(void *)(bytes + 64), old = 9;       \
        *word = 5;                                                                   \
        OK(netvm_atomic_load_u##BITS(region, 64, &old));                             \
        CHECK(old == 5);                                                             \
        OK(netvm_atomic_store_u##BITS(region, 64, 6));                               \
        CHECK(__atomic_load_n(word, __ATOMIC_ACQUIRE) == 6);                         \
        OK(netvm_atomic_swap_u##BITS(region, 64, 7, &old));                          \
        CHECK(old == 6);                                                             \
        OK(netvm_atomic_compare_swap_u##BITS(region, 64, 8, 9, &old));               \
        CHECK(old == 7 && __atomic_load_n(word, __ATOMIC_ACQUIRE) == 7);             \
        OK(netvm_atomic_compare_swap_u##BITS(region, 64, 7, 12, &old));              \
        CHECK(old == 7 && __atomic_load_n(word, __ATOMIC_ACQUIRE) == 12);            \
        OK(netvm_atomic_fetch_add_u##BITS(region, 64, (uint##BITS##_t)-2, &old));    \
        CHECK(old == 12 && __atomic_load_n(word, __ATOMIC_ACQUIRE) == 10);           \
        OK(netvm_atomic_fetch_and_u##BITS(region, 64, 6, NULL));                     \
        CHECK(__atomic_load_n(word, __ATOMIC_ACQUIRE) == 2);                         \
        OK(netvm_atomic_fetch_or_u##BITS(region, 64, 5, &old));                      \
        CHECK(old == 2 && __atomic_load_n(word, __ATOMIC_ACQUIRE) == 7);             \
        OK(netvm_atomic_fetch_xor_u##BITS(region, 64, (uint##BITS##_t)-1, &old));    \
        CHECK(old == 7 && __atomic_load_n(word, __ATOMIC_ACQUIRE) == (uint##BITS##_t)-8); \
    }
ATOMICS(32)
ATOMICS(64)

struct seen {
    int calls;
    uint32_t number, value;
    int masked;
};

static void on_signal(void *user, uint32_t number, uint32_t value) {
    struct seen *seen = user;
    sigset_t mask;
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0);
    seen->masked = sigismember(&mask, SIGINT) && sigismember(&mask, SIGALRM);
    seen->number = number;
    seen->value = value;
    if (__atomic_add_fetch(&seen->calls, 1, __ATOMIC_RELEASE) == 3)
        OK(netvm_board_disarm(board, number));
}

static void notifications(void) {
    uint64_t signals, taken;
    uint32_t numbers, number, value;
    OK(netvm_board_query(board, &numbers));
    CHECK(numbers == 8);
    OK(netvm_notify(region, 0, 0));
    OK(netvm_notify(region, 0, 0));
    OK(netvm_board_notify(board, 0, 0));
    OK(netvm_board_wait_count(board, 0, 3, LIMIT));
    OK(netvm_board_test(board, 0, &signals));
    CHECK(signals == 3);
    OK(netvm_board_acknowledge(board, 0, 2, &taken));
    CHECK(taken == 2);
    OK(netvm_board_wait_any(board, 0, 8, 0, &number));
    CHECK(number == 0);
    OK(netvm_board_acknowledge(board, 0, 5, &taken));
    CHECK(taken == 1);
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_board_wait(board, 0, 0));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_board_wait_any(board, 0, 8, NETVM_MILLISECONDS(1), &number));
    OK(netvm_board_reset(board, 0, &value));
    CHECK(value == 0);
    /* With poll(2). */
    int descriptor;
    OK(netvm_board_descriptor(board, &descriptor));
    OK(netvm_board_rearm(board, 0, 8));
    struct pollfd poll_one = {.fd = descriptor, .events = POLLIN};
    CHECK(poll(&poll_one, 1, 0) == 0);
    OK(netvm_notify(region, 7, 77));
    CHECK(poll(&poll_one, 1, 60000) == 1);
    EXPECT(NETVM_PENDING, netvm_board_rearm(board, 0, 8));
    OK(netvm_board_reset(board, 7, &value));
    CHECK(value == 77);
    OK(netvm_board_rearm(board, 0, 8));
    /* With a handler, which disarms itself. */
    struct seen seen = {0, 0, 0, 0};
    OK(netvm_notify(region, 2, 0));
    OK(netvm_board_arm(board, 2, on_signal, &seen));
    OK(netvm_notify(region, 2, 0));
    OK(netvm_flush(region));
    while (__atomic_load_n(&seen.calls, __ATOMIC_ACQUIRE) < 2)
        usleep(100);
    OK(netvm_notify(region, 2, 5));
    while (__atomic_load_n(&seen.calls, __ATOMIC_ACQUIRE) < 3)
        usleep(100);
    OK(netvm_board_disarm(board, 2));
    CHECK(seen.number == 2 && seen.value == 5 && seen.masked);
    OK(netvm_notify(region, 2, 0));
    OK(netvm_flush(region));
    OK(netvm_board_test(board, 2, &signals));
    CHECK(signals == 1 && seen.calls == 3);
    OK(netvm_board_acknowledge(board, 2, 1, NULL));
}

static void posted(void) {
    enum { BLOCK = 5000, BLOCKS = 300 };
    unsigned char *mine = malloc(BLOCK * BLOCKS), *back = calloc(BLOCK, BLOCKS);
    CHECK(mine != NULL && back != NULL);
    for (int i = 0; i < BLOCK * BLOCKS; i++)
        mine[i] = (unsigned char)(i * 31 + i / 501);
    netvm_op *op, *second;
    uint64_t old;
    /* With handles. */
    memset(bytes, 0, BYTES);
    OK(netvm_post_put(region, 3, mine, NETVM_POST_BYTES_MAX, NULL, &op));
    OK(netvm_post_flush(region, NULL, &second));
    OK(netvm_op_wait(second, LIMIT, NULL));
    CHECK(memcmp(bytes + 3, mine, NETVM_POST_BYTES_MAX) == 0);
    OK(netvm_op_wait(op, 0, &old));
    OK(netvm_op_close(second));
    OK(netvm_op_close(op));
    OK(netvm_post_get(region, 3, back, 70000, NULL, &op));
    int status;
    while ((status = netvm_op_test(op, NULL)) == NETVM_UNDER_WAY)
        continue;
    OK(status);
    OK(netvm_op_test(op, NULL));
    CHECK(memcmp(back, mine, 70000) == 0);
    OK(netvm_op_close(op));
    *(uint64_t *)(void *)bytes = 40;
    OK(netvm_post_atomic_u64(region, 0, NETVM_ATOMIC_ADD, 2, 0, NULL, &op));
    OK(netvm_op_wait(op, LIMIT, &old));
    CHECK(old == 40);
    OK(netvm_op_close(op));
    OK(netvm_post_atomic_u32(region, 0, NETVM_ATOMIC_COMPARE_SWAP, 7, 42, NULL, &op));
    OK(netvm_op_wait(op, NETVM_FOREVER, &old));
    CHECK(old == 42);
    OK(netvm_op_close(op));
    OK(netvm_atomic_load_u64(region, 0, &old));
    CHECK(old == 7);
    /* Counted. */
    netvm_counter *counter;
    netvm_counts counts;
    OK(netvm_counter_create(&counter));
    OK(netvm_counter_wait_all(counter, 0));
    OK(netvm_counter_wait(counter, 0, 0));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_counter_wait(counter, 1, 0));
    netvm_post_options options = NETVM_POST_OPTIONS_INIT;
    netvm_signal signal = {6, 0};
    options.counter = counter;
    for (int i = 0; i < BLOCKS; i++) {
        options.signal = i == BLOCKS - 1 ? &signal : NULL;
        options.flags = i < BLOCKS - 1 ? NETVM_MORE : 0;
        OK(netvm_post_put(region, (uint64_t)i * BLOCK, mine + i * BLOCK, BLOCK, &options, NULL));
    }
    OK(netvm_board_wait(board, 6, LIMIT));
    OK(netvm_board_acknowledge(board, 6, 1, NULL));
    CHECK(memcmp(bytes, mine, BLOCK * BLOCKS) == 0);
    options.signal = NULL;
    OK(netvm_counter_wait(counter, BLOCKS, LIMIT));
    memset(back, 0, BLOCK * BLOCKS);
    int refused = 0;
    options.flags = NETVM_DONT_WAIT;
    for (int i = 0; i < BLOCKS;) {
        status = netvm_post_get(region, (uint64_t)i * BLOCK, back + i * BLOCK, BLOCK, &options, NULL);
        if (status == NETVM_ERR_BUSY) {
            refused++;
            OK(netvm_counter_wait(counter, BLOCKS + (uint64_t)i / 2, LIMIT));
        } else {
            OK(status);
            i++;
        }
    }
    CHECK(refused < BLOCKS);
    OK(netvm_counter_wait_all(counter, LIMIT));
    CHECK(memcmp(back, mine, BLOCK * BLOCKS) == 0);
    OK(netvm_counter_test(counter, &counts));
    CHECK(counts.posted == 2 * BLOCKS && counts.done == 2 * BLOCKS && counts.failed == 0);
    OK(netvm_counter_take_error(counter));
    /* Scattered: every second block from the end of the buffer, and back. */
    netvm_iov iov[BLOCKS / 2];
    size_t posted = 99, sent = 0;
    for (int i = 0; i < BLOCKS / 2; i++)
        iov[i] = (netvm_iov){(uint64_t)(2 * i) * BLOCK, mine + (BLOCKS - 1 - i) * BLOCK, BLOCK};
    options.flags = NETVM_FENCE;
    options.signal = &signal;
    OK(netvm_post_putv(region, iov, BLOCKS / 2, &options, &posted));
    CHECK(posted == BLOCKS / 2);
    OK(netvm_board_wait(board, 6, LIMIT));
    OK(netvm_board_acknowledge(board, 6, 1, NULL));
    for (int i = 0; i < BLOCKS / 2; i++)
        CHECK(memcmp(bytes + 2 * i * BLOCK, mine + (BLOCKS - 1 - i) * BLOCK, BLOCK) == 0);
    options.flags = NETVM_DONT_WAIT;
    options.signal = NULL;
    for (int i = 0; i < BLOCKS / 2; i++)
        iov[i].buffer = back + i * BLOCK;
    while (sent < BLOCKS / 2) {
        status = netvm_post_getv(region, iov + sent, BLOCKS / 2 - sent, &options, &posted);
        CHECK(status == (sent + posted < BLOCKS / 2 ? NETVM_ERR_BUSY : NETVM_OK));
        sent += posted;
        if (status == NETVM_ERR_BUSY)
            OK(netvm_counter_wait_all(counter, LIMIT));
    }
    OK(netvm_counter_wait_all(counter, LIMIT));
    for (int i = 0; i < BLOCKS / 2; i++)
        CHECK(memcmp(back + i * BLOCK, mine + (BLOCKS - 1 - i) * BLOCK, BLOCK) == 0);
    OK(netvm_counter_test(counter, &counts));
    CHECK(counts.posted == 3 * BLOCKS && counts.done == 3 * BLOCKS && counts.failed == 0);
    /* Of no pieces only the signal is left. */
    options.signal = &signal;
    OK(netvm_post_putv(region, NULL, 0, &options, NULL));
    OK(netvm_board_wait(board, 6, LIMIT));
    OK(netvm_board_acknowledge(board, 6, 1, NULL));
    options.signal = NULL;
    options.flags = 0;
    OK(netvm_post_atomic_u64(region, 0, NETVM_ATOMIC_SWAP, 1, 0, &options, NULL));
    OK(netvm_post_get(region, 8, back, 1 << 20, &options, NULL));
    OK(netvm_counter_close(counter)); /* waits */
    CHECK(bytes[0] == 1 && memcmp(back, bytes + 8, 1 << 20) == 0);
    free(mine);
    free(back);
}

static void memories(void) {
    netvm_memory *mine, *file, *part, *huge, *private;
    netvm_region *one, *two;
    netvm_key key;
    netvm_peer *self;
    size_t length, count;
    void *address;
    uint64_t there;
    OK(netvm_connect_local(node, node, &self));
    /* The stack, with two exports of it that overlap. */
    char local[300] = "on the stack";
    OK(netvm_memory_register(local, sizeof local, NETVM_READ_WRITE, &mine));
    OK(netvm_memory_range(mine, 3, 200, &part));
    OK(netvm_memory_query(part, &address, &length));
    CHECK(address == local + 3 && length == 200);
    OK(netvm_export(node, "stack", mine, NETVM_READ_WRITE, &key));
    OK(netvm_import(self, "stack", &key, &one));
    OK(netvm_export(node, "part", part, NETVM_READ, &key));
    OK(netvm_import(self, "part", &key, &two));
    char text[16];
    OK(netvm_get(two, 4, text, 6));
    CHECK(memcmp(text, "stack", 6) == 0);
    OK(netvm_put_flush(one, 7, "STACK", 5));
    CHECK(strcmp(local, "on the STACK") == 0);
    /* Addresses. */
    netvm_location found[3];
    OK(netvm_node_find(node, local + 7, found, 3, &count));
    CHECK(count == 2 && found[0].offset + found[1].offset == 7 + 4);
    CHECK(strcmp(found[0].name, found[0].offset == 7 ? "stack" : "part") == 0);
    OK(netvm_node_find(node, local + 7, NULL, 0, &count));
    CHECK(count == 2);
    OK(netvm_node_find(node, &key, found, 3, &count));
    CHECK(count == 0);
    OK(netvm_region_address(two, 5, &there));
    CHECK(there == (uintptr_t)(local + 8));
    OK(netvm_peer_find(self, there, found, 1, &count));
    CHECK(count == 2);
    OK(netvm_region_close(two));
    OK(netvm_peer_find(self, there, found, 3, &count));
    CHECK(count == 1 && found[0].offset == 8 && strcmp(found[0].name, "stack") == 0);
    OK(netvm_region_close(one));
    OK(netvm_unexport(node, "stack"));
    OK(netvm_unexport(node, "part"));
    OK(netvm_memory_free(mine));
    OK(netvm_memory_free(part));
    /* Read-only memory is not exported for writing. */
    OK(netvm_memory_register((void *)(uintptr_t)"constant", 9, NETVM_READ, &mine));
    EXPECT(NETVM_ERR_OTHER, netvm_export(node, "constant", mine, NETVM_READ_WRITE, &key));
    OK(netvm_export(node, "constant", mine, NETVM_READ, &key));
    OK(netvm_unexport(node, "constant"));
    OK(netvm_memory_free(mine));
    /* A file. */
    FILE *temporary = tmpfile();
    CHECK(temporary != NULL && fputs("0123456789", temporary) >= 0 && fflush(temporary) == 0);
    OK(netvm_memory_file(fileno(temporary), NETVM_READ_WRITE, &file));
    OK(netvm_export(node, "file", file, NETVM_READ_WRITE, &key));
    OK(netvm_import(self, "file", &key, &one));
    OK(netvm_put_flush(one, 2, "ab", 2));
    CHECK(pread(fileno(temporary), text, 10, 0) == 10 && memcmp(text, "01ab456789", 10) == 0);
    OK(netvm_region_close(one));
    OK(netvm_unexport(node, "file"));
    OK(netvm_memory_free(file));
    fclose(temporary);
    OK(netvm_memory_alloc(1 << 20, NETVM_HUGE, &huge));
    OK(netvm_memory_free(huge));
    OK(netvm_memory_alloc(5000, NETVM_PRIVATE, &private));
    OK(netvm_memory_query(private, NULL, &length));
    CHECK(length >= 5000);
    OK(netvm_memory_free(private));
    OK(netvm_peer_close(self));
}

/* Both ways over one connection. */
static void accepted(void) {
    netvm_peer *back;
    netvm_memory *small;
    netvm_key key;
    netvm_region *other_region;
    uint32_t old;
    OK(netvm_accept(node, LIMIT, &back)); /* of `begin` */
    OK(netvm_memory_alloc(8, 0, &small));
    OK(netvm_export(other, "small", small, NETVM_READ_WRITE, &key));
    OK(netvm_import(back, "small", &key, &other_region));
    OK(netvm_atomic_fetch_add_u32(other_region, 4, 5, NULL));
    OK(netvm_atomic_load_u32(other_region, 4, &old));
    CHECK(old == 5);
    OK(netvm_region_close(other_region));
    OK(netvm_peer_close(back));
    OK(netvm_memory_free(small));
    OK(netvm_flush(region)); /* the connection is still there */
}

static void queues(void) {
    uint32_t number, value;
    size_t queued;
    netvm_board *queue;
    netvm_region *sender;
    netvm_key key;
    OK(netvm_export_notified(node, "queued", memory, NETVM_READ_WRITE, 4, &key, &queue));
    OK(netvm_board_open_queue(queue, 2));
    OK(netvm_import(peer, "queued", &key, &sender));
    OK(netvm_enqueue(sender, 3, 30, LIMIT));
    netvm_signal signal = {1, 10};
    uint64_t word = 123;
    OK(netvm_put_with(sender, 8, &word, sizeof word, NETVM_QUEUE, &signal));
    EXPECT(NETVM_ERR_BUSY, netvm_enqueue(sender, 3, 31, NETVM_MILLISECONDS(5)));
    OK(netvm_board_remove(queue, LIMIT, &number, &value));
    CHECK(number == 3 && value == 30);
    OK(netvm_board_remove(queue, LIMIT, &number, &value));
    CHECK(number == 1 && value == 10 && *(uint64_t *)(void *)(bytes + 8) == 123);
    OK(netvm_enqueue(sender, 2, 20, LIMIT));
    OK(netvm_board_enqueue(queue, 0, 5));
    OK(netvm_flush(sender));
    OK(netvm_board_queued(queue, &queued));
    CHECK(queued == 2);
    OK(netvm_board_remove(queue, 0, &number, &value));
    OK(netvm_board_remove(queue, 0, &number, &value));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_board_remove(queue, 0, &number, &value));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_board_remove(queue, NETVM_MILLISECONDS(1), &number, &value));
    OK(netvm_region_close(sender));
    OK(netvm_unexport(node, "queued"));
    OK(netvm_board_close(queue));
}

static void channel(uint32_t senders) {
    netvm_key key;
    netvm_receiver *receiver;
    netvm_sender *one, *two;
    netvm_message message;
    size_t most;
    int descriptor;
    OK(netvm_receiver_create(node, "channel", senders, 4096, &key, &receiver));
    OK(netvm_sender_open(peer, "channel", &key, &one));
    OK(netvm_sender_open(peer, "channel", &key, &two));
    OK(netvm_sender_query(one, &most));
    CHECK(most >= 900 && most < 2100);
    OK(netvm_receiver_descriptor(receiver, &descriptor));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_receive(receiver, 0, &message));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_receive(receiver, NETVM_MILLISECONDS(1), &message));
    OK(netvm_receiver_rearm(receiver));
    struct pollfd poll_one = {.fd = descriptor, .events = POLLIN};
    CHECK(poll(&poll_one, 1, 0) == 0);
    OK(netvm_send(one, "hello", 5, LIMIT));
    CHECK(poll(&poll_one, 1, 60000) == 1);
    EXPECT(NETVM_PENDING, netvm_receiver_rearm(receiver));
    OK(netvm_receive(receiver, LIMIT, &message));
    CHECK(message.length == 5 && memcmp(message.bytes, "hello", 5) == 0 && (uintptr_t)message.bytes % 8 == 0);
    uint32_t first = message.sender;
    OK(netvm_receiver_free(receiver));
    OK(netvm_receiver_free(receiver));
    /* Many, of all lengths, through a small ring. */
    unsigned char bytes_sent[2100];
    int sent = 0, received = 0;
    while (received < 300) {
        size_t length = (size_t)sent * 37 % most;
        memset(bytes_sent, sent, length);
        int status = sent < 300 ? netvm_send(two, bytes_sent, length, 0) : NETVM_ERR_BUSY;
        if (status == NETVM_OK) {
            sent++;
            continue;
        }
        EXPECT(NETVM_ERR_BUSY, status);
        OK(netvm_receive(receiver, LIMIT, &message));
        CHECK(message.length == (size_t)received * 37 % most && message.sender != first);
        for (size_t i = 0; i < message.length; i++)
            CHECK(((unsigned char *)message.bytes)[i] == (unsigned char)received);
        OK(netvm_receiver_free(receiver)); /* the next send may want this place */
        received++;
    }
    netvm_buffer many[3] = {{"a", 1}, {NULL, 0}, {"ccc", 3}};
    OK(netvm_send_many(one, many, 3, LIMIT));
    OK(netvm_send_many(one, NULL, 0, LIMIT));
    for (size_t length = 1; length < 4; length++) {
        OK(netvm_receive(receiver, LIMIT, &message));
        CHECK(message.sender == first && message.length == (length == 2 ? 0 : length));
    }
    OK(netvm_send(one, "bye", 3, LIMIT));
    OK(netvm_sender_close(one));
    OK(netvm_receive(receiver, LIMIT, &message));
    CHECK(memcmp(message.bytes, "bye", 3) == 0);
    EXPECT(NETVM_SENDER_LEFT, netvm_receive(receiver, LIMIT, &message));
    CHECK(message.bytes == NULL && message.length == 0 && message.sender == first);
    EXPECT(NETVM_ERR_BOUNDS, netvm_send(two, bytes, most + 1, LIMIT));
    OK(netvm_receiver_close(receiver));
    int status; /* the news may still be on its way */
    while ((status = netvm_send(two, "x", 1, LIMIT)) == NETVM_OK)
        continue;
    EXPECT(NETVM_ERR_GONE, status);
    netvm_sender_close(two);
}

/* A node that goes and comes back. */
static void copies(void) {
    netvm_key key;
    netvm_peer *self;
    netvm_memory *target;
    void *address;
    netvm_region *from, *to;
    int way;
    OK(netvm_node_allow_copies(node, NETVM_COPIES_KNOWN));
    OK(netvm_memory_alloc(1 << 20, 0, &target));
    OK(netvm_memory_query(target, &address, NULL));
    OK(netvm_export(other, "target", target, NETVM_READ_WRITE, &key));
    OK(netvm_connect_local(other, other, &self));
    OK(netvm_import(self, "target", &key, &to));
    for (size_t i = 0; i < 1 << 20; i++)
        bytes[i] = (unsigned char)(i * 7 + i / 255);
    OK(netvm_copy(region, 5, to, 9, 700000, &way));
    CHECK(way >= NETVM_COPIED_LOCALLY && way <= NETVM_COPIED_THROUGH);
    CHECK(memcmp((unsigned char *)address + 9, bytes + 5, 700000) == 0);
    OK(netvm_copy_through(region, 6, to, 1, 300000));
    CHECK(memcmp((unsigned char *)address + 1, bytes + 6, 300000) == 0);
    OK(netvm_copy(region, 0, region, 1 << 20, 500000, &way));
    CHECK(way == NETVM_COPIED_LOCALLY && memcmp(bytes, bytes + (1 << 20), 500000) == 0);
    EXPECT(NETVM_ERR_BOUNDS, netvm_copy(region, 0, to, 1 << 20, 1, &way));
    EXPECT(NETVM_ERR_BOUNDS, netvm_copy(region, UINT64_MAX, to, 0, 2, NULL));
    EXPECT(NETVM_ERR_BOUNDS, netvm_copy_through(region, 0, to, 1, UINT64_MAX));
    OK(netvm_unexport(other, "target"));
    EXPECT(NETVM_ERR_GONE, netvm_copy(region, 0, to, 0, 1, &way));
    OK(netvm_export(other, "target", target, NETVM_READ, &key));
    OK(netvm_import(self, "target", &key, &from));
    EXPECT(NETVM_ERR_RIGHTS, netvm_copy(region, 0, from, 0, 1, &way));
    OK(netvm_region_close(from));
    OK(netvm_region_close(to));
    OK(netvm_peer_close(self));
    OK(netvm_memory_free(target));
}

static void *second_thread(void *user) {
    netvm_monitor *monitor = user;
    OK(netvm_monitor_enter(monitor, LIMIT));
    bytes[0]++;
    OK(netvm_monitor_signal(monitor, 1, NULL));
    OK(netvm_monitor_exit(monitor, NETVM_CONFIRM));
    return NULL;
}

static void synchronisation(void) {
    netvm_key key;
    netvm_peer *self;
    OK(netvm_connect_local(node, node, &self));

    netvm_lock *lock, *second_lock;
    OK(netvm_export_lock(node, "lock", &key));
    OK(netvm_lock_open(peer, "lock", &key, &lock));
    OK(netvm_lock_open(self, "lock", &key, &second_lock));
    OK(netvm_lock_acquire(lock, LIMIT));
    EXPECT(NETVM_ERR_BUSY, netvm_lock_acquire(second_lock, 0));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_lock_acquire(second_lock, NETVM_MILLISECONDS(1)));
    OK(netvm_lock_release(lock, NETVM_CONFIRM));
    EXPECT(NETVM_ERR_NOT_HELD, netvm_lock_release(lock, 0));
    OK(netvm_lock_acquire(second_lock, NETVM_FOREVER));
    OK(netvm_lock_release(second_lock, 0));
    OK(netvm_lock_acquire(lock, LIMIT));
    OK(netvm_lock_close(lock)); /* releases */
    OK(netvm_lock_acquire(second_lock, LIMIT));
    OK(netvm_lock_close(second_lock));

    netvm_rwlock *rwlock, *second_rwlock;
    OK(netvm_export_rwlock(node, "rwlock", &key));
    OK(netvm_rwlock_open(peer, "rwlock", &key, &rwlock));
    OK(netvm_rwlock_open(self, "rwlock", &key, &second_rwlock));
    OK(netvm_rwlock_read(rwlock, LIMIT));
    OK(netvm_rwlock_read(second_rwlock, 0));
    OK(netvm_rwlock_read(second_rwlock, LIMIT));
    EXPECT(NETVM_ERR_BUSY, netvm_rwlock_write(rwlock, 0));
    OK(netvm_rwlock_release(rwlock, NETVM_CONFIRM));
    OK(netvm_rwlock_release(second_rwlock, NETVM_CONFIRM));
    OK(netvm_rwlock_release(second_rwlock, NETVM_CONFIRM));
    EXPECT(NETVM_ERR_NOT_HELD, netvm_rwlock_release(second_rwlock, 0));
    OK(netvm_rwlock_write(rwlock, LIMIT));
    EXPECT(NETVM_ERR_BUSY, netvm_rwlock_read(second_rwlock, 0));
    OK(netvm_rwlock_release(rwlock, 0));
    OK(netvm_rwlock_close(rwlock));
    OK(netvm_rwlock_close(second_rwlock));

    netvm_semaphore *semaphore;
    uint64_t count;
    OK(netvm_export_semaphore(node, "semaphore", 3, &key));
    OK(netvm_semaphore_open(peer, "semaphore", &key, &semaphore));
    OK(netvm_semaphore_acquire(semaphore, 2, LIMIT));
    EXPECT(NETVM_ERR_BUSY, netvm_semaphore_acquire(semaphore, 2, 0));
    EXPECT(NETVM_ERR_NOT_HELD, netvm_semaphore_release(semaphore, 1, 0));
    OK(netvm_semaphore_release(semaphore, 2, NETVM_CONFIRM));
    OK(netvm_semaphore_consume(semaphore, 3, LIMIT));
    EXPECT(NETVM_ERR_BUSY, netvm_semaphore_consume(semaphore, 1, 0));
    OK(netvm_semaphore_add(semaphore, 5, &count));
    CHECK(count == 5);
    OK(netvm_semaphore_close(semaphore));

    netvm_monitor *monitor;
    OK(netvm_export_monitor(node, "monitor", 2, &key));
    OK(netvm_monitor_open(peer, "monitor", &key, &monitor));
    EXPECT(NETVM_ERR_NOT_HELD, netvm_monitor_wait(monitor, 1, 0));
    EXPECT(NETVM_ERR_NOT_HELD, netvm_monitor_signal(monitor, 1, NULL));
    OK(netvm_monitor_enter(monitor, LIMIT));
    EXPECT(NETVM_ERR_BUSY, netvm_monitor_enter(monitor, 0));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_monitor_wait(monitor, 0, NETVM_MILLISECONDS(1)));
    OK(netvm_monitor_broadcast(monitor, 0, &count));
    CHECK(count == 0);
    bytes[0] = 0;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, second_thread, monitor) == 0);
    while (bytes[0] == 0)
        OK(netvm_monitor_wait(monitor, 1, LIMIT));
    OK(netvm_monitor_exit(monitor, 0));
    CHECK(pthread_join(thread, NULL) == 0);
    OK(netvm_monitor_close(monitor));

    netvm_wait_queue *queue;
    netvm_waiting *waiting;
    OK(netvm_export_wait_queue(node, "queue", &key));
    OK(netvm_wait_queue_open(peer, "queue", &key, &queue));
    OK(netvm_wait_queue_wake(queue, 1, &count));
    CHECK(count == 0);
    OK(netvm_wait_queue_enqueue(queue, &waiting));
    OK(netvm_wait_queue_wake(queue, 5, &count));
    CHECK(count == 1);
    OK(netvm_waiting_wait(waiting, LIMIT));
    OK(netvm_wait_queue_enqueue(queue, &waiting));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_waiting_wait(waiting, NETVM_MILLISECONDS(1)));
    OK(netvm_wait_queue_enqueue(queue, &waiting));
    OK(netvm_waiting_close(waiting));
    OK(netvm_wait_queue_close(queue));

    netvm_group *group;
    uint32_t rank, parties;
    OK(netvm_export_group(node, "group", 1, &key));
    OK(netvm_group_join(peer, "group", &key, &group));
    OK(netvm_group_query(group, &rank, &parties));
    CHECK(rank == 0 && parties == 1);
    OK(netvm_group_barrier(group, LIMIT));
    double real[3] = {1.5, -2, 1e300};
    OK(netvm_group_reduce(group, NETVM_SUM_F64, real, 3, LIMIT));
    CHECK(real[0] == 1.5 && real[1] == -2 && real[2] == 1e300);
    char text[8] = "netvm";
    OK(netvm_group_broadcast(group, 0, text, sizeof text, LIMIT));
    CHECK(strcmp(text, "netvm") == 0);
    OK(netvm_group_leave(group));
    OK(netvm_peer_close(self));
}

/* Two members, in threads, with all reductions. */
struct member {
    netvm_group *group;
    uint32_t rank;
};

static void *reduce(void *user) {
    struct member *member = user;
    uint64_t me = member->rank + 1; /* 1, 2 */
    uint64_t words[2] = {me, 12 - me};
    OK(netvm_group_reduce(member->group, NETVM_SUM_U64, words, 2, LIMIT));
    CHECK(words[0] == 3 && words[1] == 21);
    static const struct {
        int reduction;
        uint64_t expected;
    } plain[] = {{NETVM_MIN_U64, 1}, {NETVM_MAX_U64, 2}, {NETVM_AND, 0}, {NETVM_OR, 3}, {NETVM_XOR, 3}};
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) {
        uint64_t word = me;
        OK(netvm_group_reduce(member->group, plain[i].reduction, &word, 1, LIMIT));
        CHECK(word == plain[i].expected);
    }
    int64_t less = -(int64_t)me, more = less;
    OK(netvm_group_reduce(member->group, NETVM_MIN_I64, &less, 1, LIMIT));
    OK(netvm_group_reduce(member->group, NETVM_MAX_I64, &more, 1, LIMIT));
    CHECK(less == -2 && more == -1);
    double sum = 0.5 * (double)me, low = sum, high = sum;
    OK(netvm_group_reduce(member->group, NETVM_SUM_F64, &sum, 1, LIMIT));
    OK(netvm_group_reduce(member->group, NETVM_MIN_F64, &low, 1, LIMIT));
    OK(netvm_group_reduce(member->group, NETVM_MAX_F64, &high, 1, LIMIT));
    CHECK(sum == 1.5 && low == 0.5 && high == 1.0);
    char text[NETVM_BROADCAST_BYTES_MAX];
    memset(text, (int)me, sizeof text);
    OK(netvm_group_broadcast(member->group, 1, text, sizeof text, LIMIT));
    CHECK(text[0] == 2 && text[sizeof text - 1] == 2);
    return NULL;
}

static void groups(void) {
    netvm_key key;
    struct member members[2];
    OK(netvm_export_group(node, "pair", 2, &key));
    for (int i = 0; i < 2; i++) {
        OK(netvm_group_join(peer, "pair", &key, &members[i].group));
        OK(netvm_group_query(members[i].group, &members[i].rank, NULL));
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, reduce, &members[1]) == 0);
    reduce(&members[0]);
    CHECK(pthread_join(thread, NULL) == 0);
    OK(netvm_group_leave(members[0].group));
    OK(netvm_group_leave(members[1].group));
}

/* The parent's handles are no good in a child; new ones are. */
static void forks(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char byte = 0;
        netvm_peer *again;
        EXPECT(NETVM_ERR_FORKED, netvm_put(region, 0, &byte, 1));
        EXPECT(NETVM_ERR_FORKED, netvm_connect_local(node, node, &again));
        CHECK(again == NULL);
        EXPECT(NETVM_ERR_FORKED, netvm_region_close(region));
        EXPECT(NETVM_ERR_FORKED, netvm_node_destroy(node));
        netvm_node *own;
        OK(netvm_node_create(NULL, &own));
        EXPECT(NETVM_ERR_FORKED, netvm_node_poll(node));
        OK(netvm_connect_local(own, own, &again));
        OK(netvm_peer_close(again));
        OK(netvm_node_destroy(own));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(netvm_flush(region));
}

int main(void) {
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", NETVM_VERSION_MAJOR, NETVM_VERSION_MINOR, NETVM_VERSION_PATCH);
    CHECK(strcmp(netvm_version(), version) == 0);
    CHECK(netvm_last_error()[0] == 0);
    begin();
    transfers();
    atomics_32();
    atomics_64();
    notifications();
    posted();
    copies();
    accepted();
    queues();
    channel(2);
    channel(0);
    memories();
    synchronisation();
    groups();
    forks();
    OK(netvm_unexport(node, "memory"));
    char byte = 0;
    EXPECT(NETVM_ERR_GONE, netvm_get(region, 0, &byte, 1));
    OK(netvm_region_close(region));
    OK(netvm_peer_close(peer));
    OK(netvm_board_close(board));
    OK(netvm_node_destroy(other));
    OK(netvm_node_destroy(node));
    OK(netvm_memory_free(memory));
    puts("ok");
    return 0;
}
