/* Gives every function what it must refuse. Prints "ok". */
#include "test.h"
#include <pthread.h>

#define ARGUMENT(call) EXPECT(NETVM_ERR_ARGUMENT, call)
/* A place for a handle becomes NULL on failure, whatever is wrong. */
#define NULLED(place, call)                                                                                    \
    do {                                                                                                       \
        (place) = (void *)&key;                                                                                \
        ARGUMENT(call);                                                                                        \
        CHECK((place) == NULL);                                                                                \
    } while (0)
#define BOUNDS(call) EXPECT(NETVM_ERR_BOUNDS, call)

static netvm_key key;
static char text[NETVM_KEY_TEXT_BYTES];
static uint32_t word;
static uint64_t longer;
static int number;
static uint64_t place[4]; /* aligned; no handle */

/* NULL for every pointer. */
static void nulls(void) {
    netvm_node *node = NULL;
    netvm_memory *memory;
    OK(netvm_node_create(NULL, &node));
    OK(netvm_memory_alloc(4096, 0, &memory));
    ARGUMENT(netvm_key_to_text(NULL, text));
    ARGUMENT(netvm_key_to_text(&key, NULL));
    ARGUMENT(netvm_key_from_text(NULL, &key));
    ARGUMENT(netvm_key_from_text("00000000000000000000000000000000", NULL));
    ARGUMENT(netvm_node_create(NULL, NULL));
    OK(netvm_node_destroy(NULL));
    ARGUMENT(netvm_node_listen(NULL, "127.0.0.1:0", text, sizeof text));
    ARGUMENT(netvm_node_listen(node, NULL, text, sizeof text));
    ARGUMENT(netvm_node_listen(node, "127.0.0.1:0", NULL, 5));
    ARGUMENT(netvm_node_poll(NULL));
    netvm_peer *peer = (netvm_peer *)(void *)place;
    ARGUMENT(netvm_connect(NULL, "127.0.0.1:1", NULL, &peer));
    CHECK(peer == NULL);
    ARGUMENT(netvm_connect(node, NULL, NULL, &peer));
    ARGUMENT(netvm_connect(node, "127.0.0.1:1", NULL, NULL));
    ARGUMENT(netvm_connect_local(NULL, node, &peer));
    ARGUMENT(netvm_connect_local(node, NULL, &peer));
    ARGUMENT(netvm_connect_local(node, node, NULL));
    OK(netvm_connect_local(node, node, &peer));
    OK(netvm_peer_close(NULL));
    ARGUMENT(netvm_memory_alloc(4096, 0, NULL));
    ARGUMENT(netvm_memory_query(NULL, NULL, NULL));
    OK(netvm_memory_query(memory, NULL, NULL));
    OK(netvm_memory_free(NULL));
    ARGUMENT(netvm_export(NULL, "a", memory, NETVM_READ, &key));
    ARGUMENT(netvm_export(node, NULL, memory, NETVM_READ, &key));
    ARGUMENT(netvm_export(node, "a", NULL, NETVM_READ, &key));
    ARGUMENT(netvm_export(node, "a", memory, NETVM_READ, NULL));
    netvm_board *board;
    NULLED(board, netvm_export_notified(NULL, "a", memory, NETVM_READ, 1, &key, &board));
    NULLED(board, netvm_export_notified(node, "a", memory, NETVM_READ, 1, NULL, &board));
    ARGUMENT(netvm_export_notified(node, NULL, memory, NETVM_READ, 1, &key, &board));
    ARGUMENT(netvm_export_notified(node, "a", NULL, NETVM_READ, 1, &key, &board));
    ARGUMENT(netvm_export_notified(node, "a", memory, NETVM_READ, 1, NULL, &board));
    ARGUMENT(netvm_export_notified(node, "a", memory, NETVM_READ, 1, &key, NULL));
    ARGUMENT(netvm_export_keyed(NULL, "a", memory, NETVM_READ, 1, &key, &board));
    ARGUMENT(netvm_export_keyed(node, NULL, memory, NETVM_READ, 1, &key, &board));
    ARGUMENT(netvm_export_keyed(node, "a", NULL, NETVM_READ, 1, &key, NULL));
    ARGUMENT(netvm_export_keyed(node, "a", memory, 9, 1, &key, NULL));
    NULLED(board, netvm_export_keyed(node, "a", memory, NETVM_READ, 1, NULL, &board));
    /* None of these has exported anything. */
    EXPECT(NETVM_ERR_NO_SEGMENT, netvm_unexport(node, "a"));
    ARGUMENT(netvm_unexport(NULL, "a"));
    ARGUMENT(netvm_unexport(node, NULL));
    netvm_region *region;
    ARGUMENT(netvm_import(NULL, "a", &key, &region));
    ARGUMENT(netvm_import(peer, NULL, &key, &region));
    ARGUMENT(netvm_import(peer, "a", NULL, &region));
    ARGUMENT(netvm_import(peer, "a", &key, NULL));
    OK(netvm_region_close(NULL));
    netvm_region_info info;
    ARGUMENT(netvm_region_query(NULL, &info));
    ARGUMENT(netvm_put(NULL, 0, place, 8));
    ARGUMENT(netvm_put_notify(NULL, 0, place, 8, 0, 0));
    ARGUMENT(netvm_put_with(NULL, 0, place, 8, 0, NULL));
    ARGUMENT(netvm_notify(NULL, 0, 0));
    ARGUMENT(netvm_get(NULL, 0, place, 8));
    ARGUMENT(netvm_putv(NULL, NULL, 0));
    ARGUMENT(netvm_getv(NULL, NULL, 0));
    ARGUMENT(netvm_flush(NULL));
    ARGUMENT(netvm_atomic_load_u32(NULL, 0, &word));
    ARGUMENT(netvm_atomic_store_u32(NULL, 0, 1));
    ARGUMENT(netvm_atomic_swap_u32(NULL, 0, 1, &word));
    ARGUMENT(netvm_atomic_compare_swap_u32(NULL, 0, 1, 2, &word));
    ARGUMENT(netvm_atomic_fetch_add_u32(NULL, 0, 1, &word));
    ARGUMENT(netvm_atomic_fetch_and_u32(NULL, 0, 1, &word));
    ARGUMENT(netvm_atomic_fetch_or_u32(NULL, 0, 1, &word));
    ARGUMENT(netvm_atomic_fetch_xor_u32(NULL, 0, 1, &word));
    ARGUMENT(netvm_atomic_load_u64(NULL, 0, &longer));
    ARGUMENT(netvm_atomic_store_u64(NULL, 0, 1));
    ARGUMENT(netvm_atomic_swap_u64(NULL, 0, 1, &longer));
    ARGUMENT(netvm_atomic_compare_swap_u64(NULL, 0, 1, 2, &longer));
    ARGUMENT(netvm_atomic_fetch_add_u64(NULL, 0, 1, &longer));
    ARGUMENT(netvm_atomic_fetch_and_u64(NULL, 0, 1, &longer));
    ARGUMENT(netvm_atomic_fetch_or_u64(NULL, 0, 1, &longer));
    ARGUMENT(netvm_atomic_fetch_xor_u64(NULL, 0, 1, &longer));
    ARGUMENT(netvm_board_query(NULL, &word));
    ARGUMENT(netvm_board_test(NULL, 0, &longer));
    ARGUMENT(netvm_board_value(NULL, 0, &word));
    ARGUMENT(netvm_board_wait(NULL, 0, 0));
    ARGUMENT(netvm_board_spin(NULL, 0, 0));
    ARGUMENT(netvm_board_wait_count(NULL, 0, 1, 0));
    ARGUMENT(netvm_board_wait_any(NULL, 0, 1, 0, &word));
    ARGUMENT(netvm_board_acknowledge(NULL, 0, 1, &longer));
    ARGUMENT(netvm_board_reset(NULL, 0, &word));
    ARGUMENT(netvm_board_notify(NULL, 0, 0));
    ARGUMENT(netvm_board_descriptor(NULL, &number));
    ARGUMENT(netvm_board_rearm(NULL, 0, 1));
    ARGUMENT(netvm_board_arm(NULL, 0, NULL, NULL));
    ARGUMENT(netvm_board_disarm(NULL, 0));
    OK(netvm_board_close(NULL));
    OK(netvm_export_notified(node, "b", memory, NETVM_READ_WRITE, 2, &key, &board));
    ARGUMENT(netvm_board_query(board, NULL));
    ARGUMENT(netvm_board_test(board, 0, NULL));
    ARGUMENT(netvm_board_value(board, 0, NULL));
    ARGUMENT(netvm_board_wait_any(board, 0, 1, 0, NULL));
    ARGUMENT(netvm_board_reset(board, 0, NULL));
    ARGUMENT(netvm_board_descriptor(board, NULL));
    ARGUMENT(netvm_board_arm(board, 0, NULL, NULL));
    OK(netvm_import(peer, "b", &key, &region));
    ARGUMENT(netvm_region_query(region, NULL));
    ARGUMENT(netvm_put(region, 0, NULL, 8));
    ARGUMENT(netvm_put(region, 0, NULL, 1 << 12));
    ARGUMENT(netvm_get(region, 0, NULL, 8));
    ARGUMENT(netvm_put_notify(region, 0, NULL, 8, 0, 0));
    ARGUMENT(netvm_put_with(region, 0, NULL, 8, 0, NULL));
    ARGUMENT(netvm_putv(region, NULL, 1));
    ARGUMENT(netvm_getv(region, NULL, 1));
    netvm_iov iov[2] = {{0, place, 8}, {8, NULL, 8}};
    ARGUMENT(netvm_putv(region, iov, 2));
    ARGUMENT(netvm_getv(region, iov, 2));
    ARGUMENT(netvm_getv(region, iov, SIZE_MAX));
    ARGUMENT(netvm_atomic_load_u32(region, 0, NULL));
    ARGUMENT(netvm_atomic_load_u64(region, 0, NULL));
    ARGUMENT(netvm_atomic_compare_swap_u32(region, 0, 1, 2, NULL));
    ARGUMENT(netvm_atomic_compare_swap_u64(region, 0, 1, 2, NULL));
    netvm_location location;
    size_t count;
    ARGUMENT(netvm_node_find(NULL, place, &location, 1, &count));
    ARGUMENT(netvm_node_find(node, place, NULL, 1, &count));
    ARGUMENT(netvm_node_find(node, place, &location, 1, NULL));
    OK(netvm_node_find(node, NULL, &location, 1, &count));
    CHECK(count == 0);
    ARGUMENT(netvm_peer_find(NULL, 0, &location, 1, &count));
    ARGUMENT(netvm_peer_find(peer, 0, NULL, 1, &count));
    ARGUMENT(netvm_peer_find(peer, 0, &location, 1, NULL));
    ARGUMENT(netvm_region_address(NULL, 0, &longer));
    ARGUMENT(netvm_region_address(region, 0, NULL));
    BOUNDS(netvm_region_address(region, UINT64_MAX, &longer));
    netvm_peer *accepted;
    ARGUMENT(netvm_accept(NULL, 0, &accepted));
    ARGUMENT(netvm_accept(node, 0, NULL));
    ARGUMENT(netvm_put_flush(NULL, 0, place, 8));
    ARGUMENT(netvm_put_flush(region, 0, NULL, 8));
    BOUNDS(netvm_put_flush(region, 4095, place, 8));
    ARGUMENT(netvm_enqueue(NULL, 0, 1, 0));
    ARGUMENT(netvm_enqueue(region, 0, 0, 0));
    BOUNDS(netvm_enqueue(region, 65536, 1, 0));
    BOUNDS(netvm_enqueue(region, 2, 1, 0));
    EXPECT(NETVM_ERR_UNSUPPORTED, netvm_enqueue(region, 0, 1, 0)); /* there is no queue */
    ARGUMENT(netvm_put_with(region, 0, place, 8, NETVM_QUEUE, NULL));
    ARGUMENT(netvm_board_open_queue(NULL, 1));
    EXPECT(NETVM_ERR_OTHER, netvm_board_open_queue(board, 0));
    EXPECT(NETVM_ERR_OTHER, netvm_board_open_queue(board, NETVM_QUEUE_PLACES_MAX + 1));
    ARGUMENT(netvm_board_remove(NULL, 0, &word, &word));
    ARGUMENT(netvm_board_remove(board, 0, NULL, &word));
    ARGUMENT(netvm_board_remove(board, 0, &word, NULL));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_board_remove(board, 0, &word, &word));
    EXPECT(NETVM_ERR_BUSY, netvm_board_enqueue(board, 0, 1));
    ARGUMENT(netvm_board_enqueue(NULL, 0, 1));
    ARGUMENT(netvm_board_enqueue(board, 0, 0));
    BOUNDS(netvm_board_enqueue(board, 2, 1));
    ARGUMENT(netvm_board_queued(NULL, &count));
    ARGUMENT(netvm_board_queued(board, NULL));
    OK(netvm_board_open_queue(board, 1));
    EXPECT(NETVM_ERR_OTHER, netvm_board_open_queue(board, 1));
    OK(netvm_region_close(region));
    OK(netvm_board_close(board));
    OK(netvm_peer_close(peer));
    OK(netvm_node_destroy(node));
    OK(netvm_memory_free(memory));
}

static void posts(void) {
    netvm_node *node;
    netvm_memory *memory;
    netvm_peer *peer;
    netvm_region *region, *reader;
    netvm_counter *counter;
    netvm_op *op = (netvm_op *)(void *)place;
    netvm_counts counts;
    static char buffer[4096];
    netvm_post_options options = NETVM_POST_OPTIONS_INIT;
    OK(netvm_node_create(NULL, &node));
    OK(netvm_connect_local(node, node, &peer));
    OK(netvm_memory_alloc(2 << 20, 0, &memory));
    OK(netvm_export(node, "m", memory, NETVM_READ_WRITE, &key));
    OK(netvm_import(peer, "m", &key, &region));
    OK(netvm_export(node, "r", memory, NETVM_READ, &key));
    OK(netvm_import(peer, "r", &key, &reader));
    OK(netvm_counter_create(&counter));
    ARGUMENT(netvm_counter_create(NULL));
    ARGUMENT(netvm_counter_test(NULL, &counts));
    ARGUMENT(netvm_counter_test(counter, NULL));
    ARGUMENT(netvm_counter_wait(NULL, 1, 0));
    ARGUMENT(netvm_counter_wait_all(NULL, 0));
    ARGUMENT(netvm_counter_take_error(NULL));
    OK(netvm_counter_close(NULL));
    ARGUMENT(netvm_op_test(NULL, NULL));
    ARGUMENT(netvm_op_wait(NULL, 0, NULL));
    OK(netvm_op_close(NULL));
    NULLED(op, netvm_post_put(NULL, 0, buffer, 8, NULL, &op));
    NULLED(op, netvm_post_get(NULL, 0, buffer, 8, NULL, &op));
    NULLED(op, netvm_post_flush(NULL, NULL, &op));
    NULLED(op, netvm_post_atomic_u32(NULL, 0, NETVM_ATOMIC_LOAD, 0, 0, NULL, &op));
    NULLED(op, netvm_post_atomic_u64(NULL, 0, NETVM_ATOMIC_LOAD, 0, 0, NULL, &op));
    netvm_iov iov[2] = {{0, buffer, 8}, {8, buffer, 8}};
    size_t posted = 7;
    ARGUMENT(netvm_post_putv(NULL, iov, 2, &options, &posted));
    ARGUMENT(netvm_post_getv(NULL, iov, 2, &options, &posted));
    /* Without a counter. */
    ARGUMENT(netvm_post_putv(region, iov, 2, &options, &posted));
    ARGUMENT(netvm_post_getv(region, iov, 2, NULL, &posted));
    CHECK(posted == 7);
    /* Neither a counter nor a place, and both. */
    ARGUMENT(netvm_post_put(region, 0, buffer, 8, NULL, NULL));
    ARGUMENT(netvm_post_get(region, 0, buffer, 8, &options, NULL));
    ARGUMENT(netvm_post_flush(region, NULL, NULL));
    options.counter = counter;
    ARGUMENT(netvm_post_put(region, 0, buffer, 8, &options, &op));
    ARGUMENT(netvm_post_atomic_u64(region, 0, NETVM_ATOMIC_ADD, 1, 0, &options, &op));
    options.counter = (netvm_counter *)(void *)region;
    ARGUMENT(netvm_post_put(region, 0, buffer, 8, &options, NULL));
    options.counter = counter;
    ARGUMENT(netvm_post_put(region, 0, NULL, 8, &options, NULL));
    ARGUMENT(netvm_post_get(region, 0, NULL, 8, &options, NULL));
    ARGUMENT(netvm_post_atomic_u32(region, 0, 0, 0, 0, &options, NULL));
    ARGUMENT(netvm_post_atomic_u32(region, 0, 8, 0, 0, &options, NULL));
    BOUNDS(netvm_post_put(region, 2 << 20, buffer, 1, &options, NULL));
    ARGUMENT(netvm_post_putv(region, NULL, 2, &options, &posted));
    ARGUMENT(netvm_post_putv(region, iov, SIZE_MAX, &options, &posted));
    iov[1].offset = 2 << 20;
    BOUNDS(netvm_post_putv(region, iov, 2, &options, &posted));
    BOUNDS(netvm_post_getv(region, iov, 2, &options, &posted));
    iov[1] = (netvm_iov){0, NULL, 8};
    ARGUMENT(netvm_post_putv(region, iov, 2, &options, &posted));
    iov[1] = (netvm_iov){0, buffer, NETVM_POST_BYTES_MAX + 1};
    BOUNDS(netvm_post_getv(region, iov, 2, &options, &posted));
    CHECK(posted == 0);
    OK(netvm_counter_test(counter, &counts));
    CHECK(counts.posted == 0);
    BOUNDS(netvm_post_get(region, UINT64_MAX, buffer, 2, &options, NULL));
    BOUNDS(netvm_post_get(region, 0, buffer, NETVM_POST_BYTES_MAX + 1, &options, NULL));
    BOUNDS(netvm_post_put(region, 0, buffer, SIZE_MAX, &options, NULL));
    BOUNDS(netvm_post_atomic_u64(region, (2 << 20) - 4, NETVM_ATOMIC_LOAD, 0, 0, &options, NULL));
    EXPECT(NETVM_ERR_RIGHTS, netvm_post_put(reader, 0, buffer, 8, &options, NULL));
    netvm_signal signal = {0, 0};
    options.signal = &signal;
    ARGUMENT(netvm_post_get(region, 0, buffer, 8, &options, NULL));
    BOUNDS(netvm_post_put(region, 0, buffer, 8, &options, NULL)); /* the segment has no numbers */
    options.signal = NULL;
    options.flags = NETVM_FENCE;
    ARGUMENT(netvm_post_flush(region, &options, NULL));
    options.flags = 4;
    ARGUMENT(netvm_post_put(region, 0, buffer, 8, &options, NULL));
    options.flags = 0;
    options.reserved = 1;
    ARGUMENT(netvm_post_put(region, 0, buffer, 8, &options, NULL));
    options.reserved = 0;
    OK(netvm_counter_test(counter, &counts));
    CHECK(counts.posted == 0);
    /* What the peer refuses. */
    OK(netvm_post_atomic_u64(region, 4, NETVM_ATOMIC_ADD, 1, 0, &options, NULL));
    OK(netvm_post_atomic_u64(reader, 0, NETVM_ATOMIC_ADD, 1, 0, &options, NULL));
    EXPECT(NETVM_ERR_MISALIGNED, netvm_counter_wait_all(counter, LIMIT));
    EXPECT(NETVM_ERR_MISALIGNED, netvm_counter_wait(counter, 2, LIMIT));
    EXPECT(NETVM_ERR_MISALIGNED, netvm_counter_take_error(counter));
    OK(netvm_counter_take_error(counter));
    OK(netvm_counter_test(counter, &counts));
    CHECK(counts.posted == 2 && counts.failed == 2 && counts.done == 0);
    OK(netvm_post_atomic_u32(reader, 0, NETVM_ATOMIC_SWAP, 1, 0, NULL, &op));
    EXPECT(NETVM_ERR_RIGHTS, netvm_op_wait(op, LIMIT, NULL));
    EXPECT(NETVM_ERR_RIGHTS, netvm_op_test(op, NULL));
    OK(netvm_op_close(op));
    int way;
    ARGUMENT(netvm_copy(NULL, 0, region, 0, 8, &way));
    ARGUMENT(netvm_copy(region, 0, NULL, 0, 8, &way));
    ARGUMENT(netvm_copy_through(NULL, 0, region, 0, 8));
    ARGUMENT(netvm_copy_through(region, 0, NULL, 0, 8));
    ARGUMENT(netvm_node_allow_copies(NULL, NETVM_COPIES_NEVER));
    ARGUMENT(netvm_node_allow_copies(node, 3));
    ARGUMENT(netvm_node_allow_copies(node, -1));
    /* A peer that has gone. */
    OK(netvm_post_get(region, 0, buffer, 8, NULL, &op));
    OK(netvm_node_destroy(node));
    int status = netvm_op_wait(op, LIMIT, NULL);
    CHECK(status == NETVM_OK || status == NETVM_ERR_PEER_LOST);
    OK(netvm_op_close(op));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_post_get(region, 0, buffer, 8, &options, NULL));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_post_flush(region, NULL, &op));
    CHECK(op == NULL);
    EXPECT(NETVM_ERR_PEER_LOST, netvm_copy(region, 0, region, 8, 8, NULL));
    OK(netvm_counter_close(counter));
    OK(netvm_region_close(reader));
    OK(netvm_region_close(region));
    OK(netvm_peer_close(peer));
    OK(netvm_memory_free(memory));
}

static void channels(void) {
    netvm_node *node, *other;
    netvm_peer *peer;
    netvm_receiver *receiver = (netvm_receiver *)(void *)place;
    netvm_sender *sender = (netvm_sender *)(void *)place;
    netvm_message message;
    size_t most;
    netvm_buffer bad[2] = {{"x", 1}, {NULL, 1}};
    OK(netvm_node_create(NULL, &node));
    OK(netvm_node_create(NULL, &other));
    OK(netvm_connect_local(other, node, &peer));
    NULLED(receiver, netvm_receiver_create(NULL, "c", 1, 4096, &key, &receiver));
    NULLED(receiver, netvm_receiver_create(node, "c", 1, 4096, NULL, &receiver));
    CHECK(receiver == NULL);
    ARGUMENT(netvm_receiver_create(node, NULL, 1, 4096, &key, &receiver));
    ARGUMENT(netvm_receiver_create(node, "", 1, 4096, &key, &receiver));
    ARGUMENT(netvm_receiver_create(node, "c", 1, 4096, &key, NULL));
    EXPECT(NETVM_ERR_OTHER, netvm_receiver_create(node, "c", NETVM_SENDERS_MAX + 1, 4096, &key, &receiver));
    EXPECT(NETVM_ERR_OTHER, netvm_receiver_create(node, "c", 1, (size_t)NETVM_CHANNEL_BYTES_MAX + 8, &key, &receiver));
    EXPECT(NETVM_ERR_OTHER, netvm_receiver_create(node, "c", 0, SIZE_MAX, &key, &receiver));
    OK(netvm_export_lock(node, "lock", &key));
    CHECK(netvm_sender_open(peer, "lock", &key, &sender) < 0 && sender == NULL);
    OK(netvm_receiver_create(node, "c", 1, 4096, &key, &receiver));
    ARGUMENT(netvm_receive(NULL, 0, &message));
    ARGUMENT(netvm_receive(receiver, 0, NULL));
    ARGUMENT(netvm_receiver_free(NULL));
    ARGUMENT(netvm_receiver_descriptor(NULL, &number));
    ARGUMENT(netvm_receiver_descriptor(receiver, NULL));
    ARGUMENT(netvm_receiver_rearm(NULL));
    OK(netvm_receiver_close(NULL));
    ARGUMENT(netvm_sender_open(NULL, "c", &key, &sender));
    ARGUMENT(netvm_sender_open(peer, NULL, &key, &sender));
    ARGUMENT(netvm_sender_open(peer, "c", NULL, &sender));
    ARGUMENT(netvm_sender_open(peer, "c", &key, NULL));
    OK(netvm_sender_open(peer, "c", &key, &sender));
    netvm_sender *second;
    EXPECT(NETVM_ERR_BUSY, netvm_sender_open(peer, "c", &key, &second));
    ARGUMENT(netvm_sender_query(NULL, &most));
    ARGUMENT(netvm_sender_query(sender, NULL));
    OK(netvm_sender_query(sender, &most));
    ARGUMENT(netvm_send(NULL, "x", 1, 0));
    ARGUMENT(netvm_send(sender, NULL, 1, 0));
    ARGUMENT(netvm_send(sender, "x", SIZE_MAX, 0));
    ARGUMENT(netvm_send_many(NULL, bad, 1, 0));
    ARGUMENT(netvm_send_many(sender, NULL, 1, 0));
    ARGUMENT(netvm_send_many(sender, bad, 2, 0));
    OK(netvm_sender_close(NULL));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_receive(receiver, 0, &message)); /* nothing of this was sent */
    /* A sender that dies. */
    OK(netvm_send(sender, "last", 4, LIMIT));
    OK(netvm_node_destroy(other));
    OK(netvm_receive(receiver, LIMIT, &message));
    CHECK(message.length == 4);
    EXPECT(NETVM_SENDER_LOST, netvm_receive(receiver, LIMIT, &message));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_send(sender, "x", 1, LIMIT));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_sender_close(sender));
    OK(netvm_peer_close(peer));
    OK(netvm_receiver_close(receiver));
    OK(netvm_node_destroy(node));
}

#define OBJECT(NAME, TYPE)                                       \
    do {                                                         \
        TYPE *handle;                                            \
        ARGUMENT(NAME(NULL, "o", &key, &handle));                \
        ARGUMENT(NAME(peer, NULL, &key, &handle));               \
        ARGUMENT(NAME(peer, "o", NULL, &handle));                \
        ARGUMENT(NAME(peer, "o", &key, NULL));                   \
        EXPECT(NETVM_ERR_NO_SEGMENT, NAME(peer, "none", &key, &handle)); \
        EXPECT(NETVM_ERR_NO_SEGMENT, NAME(peer, "o", &wrong, &handle)); \
    } while (0)

static void null_objects(void) {
    netvm_node *node;
    netvm_peer *peer;
    netvm_key wrong = {{0}};
    OK(netvm_node_create(NULL, &node));
    OK(netvm_connect_local(node, node, &peer));
    ARGUMENT(netvm_export_lock(NULL, "o", &key));
    ARGUMENT(netvm_export_lock(node, NULL, &key));
    ARGUMENT(netvm_export_lock(node, "o", NULL));
    ARGUMENT(netvm_export_rwlock(NULL, "o", &key));
    ARGUMENT(netvm_export_rwlock(node, NULL, &key));
    ARGUMENT(netvm_export_rwlock(node, "o", NULL));
    ARGUMENT(netvm_export_semaphore(NULL, "o", 1, &key));
    ARGUMENT(netvm_export_semaphore(node, NULL, 1, &key));
    ARGUMENT(netvm_export_semaphore(node, "o", 1, NULL));
    ARGUMENT(netvm_export_monitor(NULL, "o", 1, &key));
    ARGUMENT(netvm_export_monitor(node, NULL, 1, &key));
    ARGUMENT(netvm_export_monitor(node, "o", 1, NULL));
    ARGUMENT(netvm_export_wait_queue(NULL, "o", &key));
    ARGUMENT(netvm_export_wait_queue(node, NULL, &key));
    ARGUMENT(netvm_export_wait_queue(node, "o", NULL));
    ARGUMENT(netvm_export_group(NULL, "o", 1, &key));
    ARGUMENT(netvm_export_group(node, NULL, 1, &key));
    ARGUMENT(netvm_export_group(node, "o", 1, NULL));
    EXPECT(NETVM_ERR_OTHER, netvm_export_monitor(node, "many", NETVM_CONDITIONS_MAX + 1, &key));
    EXPECT(NETVM_ERR_OTHER, netvm_export_group(node, "none", 0, &key));
    EXPECT(NETVM_ERR_OTHER, netvm_export_group(node, "many", NETVM_PARTIES_MAX + 1, &key));
    OK(netvm_export_lock(node, "o", &key));
    EXPECT(NETVM_ERR_NAME_TAKEN, netvm_export_lock(node, "o", &wrong));
    CHECK(strstr(netvm_last_error(), "\"o\"") != NULL);
    OBJECT(netvm_lock_open, netvm_lock);
    OBJECT(netvm_rwlock_open, netvm_rwlock);
    OBJECT(netvm_semaphore_open, netvm_semaphore);
    OBJECT(netvm_monitor_open, netvm_monitor);
    OBJECT(netvm_wait_queue_open, netvm_wait_queue);
    OBJECT(netvm_group_join, netvm_group);
    netvm_semaphore *semaphore = (netvm_semaphore *)(void *)place;
    EXPECT(NETVM_ERR_KIND, netvm_semaphore_open(peer, "o", &key, &semaphore));
    CHECK(semaphore == NULL);
    ARGUMENT(netvm_lock_acquire(NULL, 0));
    ARGUMENT(netvm_lock_release(NULL, 0));
    ARGUMENT(netvm_rwlock_read(NULL, 0));
    ARGUMENT(netvm_rwlock_write(NULL, 0));
    ARGUMENT(netvm_rwlock_release(NULL, 0));
    ARGUMENT(netvm_semaphore_acquire(NULL, 1, 0));
    ARGUMENT(netvm_semaphore_release(NULL, 1, 0));
    ARGUMENT(netvm_semaphore_consume(NULL, 1, 0));
    ARGUMENT(netvm_semaphore_add(NULL, 1, NULL));
    ARGUMENT(netvm_monitor_enter(NULL, 0));
    ARGUMENT(netvm_monitor_exit(NULL, 0));
    ARGUMENT(netvm_monitor_wait(NULL, 0, 0));
    ARGUMENT(netvm_monitor_signal(NULL, 0, NULL));
    ARGUMENT(netvm_monitor_broadcast(NULL, 0, NULL));
    netvm_waiting *waiting;
    ARGUMENT(netvm_wait_queue_enqueue(NULL, &waiting));
    ARGUMENT(netvm_wait_queue_wake(NULL, 1, NULL));
    ARGUMENT(netvm_waiting_wait(NULL, 0));
    ARGUMENT(netvm_group_query(NULL, &word, &word));
    ARGUMENT(netvm_group_barrier(NULL, 0));
    ARGUMENT(netvm_group_reduce(NULL, NETVM_AND, place, 1, 0));
    ARGUMENT(netvm_group_broadcast(NULL, 0, place, 8, 0));
    OK(netvm_lock_close(NULL));
    OK(netvm_rwlock_close(NULL));
    OK(netvm_semaphore_close(NULL));
    OK(netvm_monitor_close(NULL));
    OK(netvm_wait_queue_close(NULL));
    OK(netvm_waiting_close(NULL));
    OK(netvm_group_leave(NULL));
    netvm_lock *lock;
    OK(netvm_lock_open(peer, "o", &key, &lock));
    ARGUMENT(netvm_lock_release(lock, 2));
    OK(netvm_lock_acquire(lock, LIMIT));
    ARGUMENT(netvm_lock_release(lock, 0x80000001));
    OK(netvm_lock_release(lock, 0)); /* it was still held */
    OK(netvm_unexport(node, "o"));
    EXPECT(NETVM_ERR_GONE, netvm_lock_acquire(lock, LIMIT));
    OK(netvm_lock_close(lock));
    netvm_wait_queue *queue;
    OK(netvm_export_wait_queue(node, "q", &key));
    OK(netvm_wait_queue_open(peer, "q", &key, &queue));
    ARGUMENT(netvm_wait_queue_enqueue(queue, NULL));
    OK(netvm_wait_queue_close(queue));
    netvm_monitor *monitor;
    OK(netvm_export_monitor(node, "m", 1, &key));
    OK(netvm_monitor_open(peer, "m", &key, &monitor));
    OK(netvm_monitor_enter(monitor, LIMIT));
    BOUNDS(netvm_monitor_signal(monitor, 1, NULL));
    BOUNDS(netvm_monitor_wait(monitor, 1, 0));
    OK(netvm_monitor_close(monitor));
    netvm_group *group;
    OK(netvm_export_group(node, "g", 1, &key));
    OK(netvm_group_join(peer, "g", &key, &group));
    netvm_group *second;
    EXPECT(NETVM_ERR_FULL, netvm_group_join(peer, "g", &key, &second));
    ARGUMENT(netvm_group_reduce(group, 0, place, 1, LIMIT));
    ARGUMENT(netvm_group_reduce(group, 12, place, 1, LIMIT));
    ARGUMENT(netvm_group_reduce(group, NETVM_OR, NULL, 1, LIMIT));
    BOUNDS(netvm_group_reduce(group, NETVM_OR, place, NETVM_REDUCE_MAX + 1, LIMIT));
    BOUNDS(netvm_group_reduce(group, NETVM_OR, place, SIZE_MAX / 8 + 2, LIMIT));
    ARGUMENT(netvm_group_broadcast(group, 0, NULL, 1, LIMIT));
    BOUNDS(netvm_group_broadcast(group, 1, place, 8, LIMIT));
    BOUNDS(netvm_group_broadcast(group, 0, place, NETVM_BROADCAST_BYTES_MAX + 1, LIMIT));
    BOUNDS(netvm_group_broadcast(group, 0, place, SIZE_MAX, LIMIT));
    OK(netvm_group_leave(group));
    OK(netvm_peer_close(peer));
    OK(netvm_node_destroy(node));
}

/* Numbers, texts, options, handles of another kind. */
static void values(void) {
    netvm_node *node;
    netvm_memory *memory;
    netvm_peer *peer;
    netvm_board *board;
    netvm_region *region;
    netvm_node_options options = NETVM_NODE_OPTIONS_INIT;
    options.encryption = 9;
    ARGUMENT(netvm_node_create(&options, &node));
    CHECK(node == NULL);
    options.encryption = NETVM_ENCRYPT_ALWAYS;
    ARGUMENT(netvm_node_create(&options, &node)); /* without a secret */
    options.encryption = NETVM_ENCRYPT_NEVER;
    options.insecure = 2;
    ARGUMENT(netvm_node_create(&options, &node));
    options.insecure = 0;
    options.secret_file = "/no/such/file";
    EXPECT(NETVM_ERR_SECURITY, netvm_node_create(&options, &node));
    CHECK(strstr(netvm_last_error(), "/no/such/file") != NULL);
    options.secret = (const uint8_t *)place;
    ARGUMENT(netvm_node_create(&options, &node)); /* both */
    options.size = 3;
    ARGUMENT(netvm_node_create(&options, &node));
    options.size = SIZE_MAX;
    ARGUMENT(netvm_node_create(&options, &node));
    struct {
        netvm_node_options known;
        uint64_t newer;
    } bigger = {NETVM_NODE_OPTIONS_INIT, 1};
    bigger.known.size = sizeof bigger;
    EXPECT(NETVM_ERR_UNSUPPORTED, netvm_node_create(&bigger.known, &node));
    bigger.newer = 0;
    OK(netvm_node_create(&bigger.known, &node));

    EXPECT(NETVM_ERR_ADDRESS, netvm_node_listen(node, "", text, sizeof text));
    EXPECT(NETVM_ERR_ADDRESS, netvm_node_listen(node, "no-port", text, sizeof text));
    ARGUMENT(netvm_node_listen(node, "\xFF\xFE:1", text, sizeof text));
    EXPECT(NETVM_ERR_LISTEN, netvm_node_listen(node, "0.0.0.0:0", text, sizeof text)); /* without a secret */
    EXPECT(NETVM_ERR_LISTEN, netvm_node_listen(node, "unix:/no/such/folder/socket", text, sizeof text));
    ARGUMENT(netvm_node_listen(node, "127.0.0.1:0", text, 3)); /* no room */
    OK(netvm_node_listen(node, "127.0.0.1:0", NULL, 0));
    EXPECT(NETVM_ERR_ADDRESS, netvm_connect(node, "no-port", NULL, &peer));
    EXPECT(NETVM_ERR_CONNECT, netvm_connect(node, "unix:/no/such/socket", NULL, &peer));
    CHECK(strstr(netvm_last_error(), "/no/such/socket") != NULL);
    ARGUMENT(netvm_node_keep_alive(NULL, 1, 1));
    ARGUMENT(netvm_node_keep_alive(node, -1, 1));
    ARGUMENT(netvm_node_keep_alive(node, 1, -1));
    ARGUMENT(netvm_node_page_limit(NULL, 1));
    ARGUMENT(netvm_node_page_limit(node, -1));
    OK(netvm_node_page_limit(node, INT64_MAX));
    netvm_connect_options connect = NETVM_CONNECT_OPTIONS_INIT;
    connect.rails = NETVM_RAILS_MAX + 1;
    ARGUMENT(netvm_connect(node, "127.0.0.1:1", &connect, &peer));
    connect.rails = 1;
    connect.reconnect = 2;
    ARGUMENT(netvm_connect(node, "127.0.0.1:1", &connect, &peer));
    connect.reconnect = 1;
    connect.patience_ns = -1;
    ARGUMENT(netvm_connect(node, "127.0.0.1:1", &connect, &peer));
    connect.patience_ns = NETVM_MILLISECONDS(20);
    EXPECT(NETVM_ERR_CONNECT, netvm_connect(node, "unix:/no/such/socket", &connect, &peer));
    connect.reserved = 1;
    ARGUMENT(netvm_connect(node, "127.0.0.1:1", &connect, &peer));
    connect.reserved = 0;
    connect.reconnect = 0;
    connect.link = 4;
    ARGUMENT(netvm_connect(node, "127.0.0.1:1", &connect, &peer));

    ARGUMENT(netvm_memory_alloc(0, 0, &memory));
    ARGUMENT(netvm_memory_alloc(4096, 3, &memory));
    ARGUMENT(netvm_memory_alloc(4096, 8, &memory));
    ARGUMENT(netvm_memory_register(NULL, 8, NETVM_READ, &memory));
    ARGUMENT(netvm_memory_register(place, 0, NETVM_READ, &memory));
    ARGUMENT(netvm_memory_register(place, SIZE_MAX, NETVM_READ, &memory));
    ARGUMENT(netvm_memory_register((void *)UINTPTR_MAX, 2, NETVM_READ, &memory));
    ARGUMENT(netvm_memory_register(place, 8, 4, &memory));
    ARGUMENT(netvm_memory_register(place, 8, NETVM_READ, NULL));
    ARGUMENT(netvm_memory_file(-1, NETVM_READ, &memory));
    ARGUMENT(netvm_memory_file(0, 9, &memory));
    EXPECT(NETVM_ERR_SYSTEM, netvm_memory_file(1000000, NETVM_READ, &memory));
    ARGUMENT(netvm_memory_file(0, NETVM_READ, NULL));
    CHECK(memory == NULL);
    FILE *empty = tmpfile();
    CHECK(empty != NULL);
    EXPECT(NETVM_ERR_SYSTEM, netvm_memory_file(fileno(empty), NETVM_READ, &memory));
    fclose(empty);
    ARGUMENT(netvm_memory_alloc(SIZE_MAX, 0, &memory));
    EXPECT(NETVM_ERR_NO_MEMORY, netvm_memory_alloc(SIZE_MAX / 2 - 4095, 0, &memory));
    CHECK(memory == NULL);
    OK(netvm_memory_alloc(8192, 0, &memory));
    netvm_memory *range;
    BOUNDS(netvm_memory_range(memory, 8192, 1, &range));
    BOUNDS(netvm_memory_range(memory, SIZE_MAX, 2, &range));
    CHECK(range == NULL);
    ARGUMENT(netvm_memory_range(NULL, 0, 1, &range));
    ARGUMENT(netvm_memory_range(memory, 0, 1, NULL));
    static char name[NETVM_NAME_BYTES_MAX + 2];
    memset(name, 'n', sizeof name - 1);
    ARGUMENT(netvm_export(node, name, memory, NETVM_READ, &key));
    ARGUMENT(netvm_export(node, "", memory, NETVM_READ, &key));
    ARGUMENT(netvm_export(node, "\xC0", memory, NETVM_READ, &key));
    ARGUMENT(netvm_export(node, "r", memory, 0, &key));
    ARGUMENT(netvm_export(node, "r", memory, 2, &key));
    ARGUMENT(netvm_export(node, "r", memory, 7, &key));
    EXPECT(NETVM_ERR_OTHER, netvm_export_notified(node, "r", memory, NETVM_READ, NETVM_NOTIFICATIONS_MAX + 1, &key, &board));
    CHECK(board == NULL);
    name[NETVM_NAME_BYTES_MAX] = 0;
    OK(netvm_export(node, name, memory, NETVM_READ, &key));
    EXPECT(NETVM_ERR_NAME_TAKEN, netvm_export(node, name, memory, NETVM_READ, &key));
    OK(netvm_unexport(node, name));

    /* Rights, bounds and alignment. */
    OK(netvm_connect_local(node, node, &peer));
    OK(netvm_export_notified(node, "read", memory, NETVM_READ, 1, &key, &board));
    OK(netvm_board_close(board));
    OK(netvm_import(peer, "read", &key, &region));
    static char buffer[1 << 16];
    netvm_iov one = {0, buffer, 8};
    EXPECT(NETVM_ERR_RIGHTS, netvm_put(region, 0, buffer, 8));
    EXPECT(NETVM_ERR_RIGHTS, netvm_put_notify(region, 0, buffer, 8, 0, 0));
    EXPECT(NETVM_ERR_RIGHTS, netvm_put_with(region, 0, buffer, 8, 0, NULL));
    EXPECT(NETVM_ERR_RIGHTS, netvm_notify(region, 0, 0));
    EXPECT(NETVM_ERR_RIGHTS, netvm_putv(region, &one, 1));
    EXPECT(NETVM_ERR_RIGHTS, netvm_atomic_fetch_add_u64(region, 0, 1, NULL));
    EXPECT(NETVM_ERR_RIGHTS, netvm_atomic_store_u32(region, 0, 1));
    OK(netvm_atomic_load_u32(region, 0, &word));
    OK(netvm_get(region, 0, buffer, 8));
    OK(netvm_flush(region));
    OK(netvm_region_close(region));
    OK(netvm_export_notified(node, "write", memory, NETVM_READ_WRITE, 2, &key, &board));
    OK(netvm_import(peer, "write", &key, &region));
    static const struct {
        uint64_t offset;
        size_t bytes;
    } beyond[] = {{8192, 1}, {8193, 0}, {0, 8193}, {8191, 2}, {UINT64_MAX, 1}, {UINT64_MAX - 7, 8}, {UINT64_MAX, 60000}, {1, 60000}};
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++) {
        netvm_iov iov[2] = {{0, buffer, 8}, {beyond[i].offset, buffer, beyond[i].bytes}};
        buffer[0] = 77;
        BOUNDS(netvm_put(region, beyond[i].offset, buffer, beyond[i].bytes));
        BOUNDS(netvm_put_notify(region, beyond[i].offset, buffer, beyond[i].bytes, 0, 0));
        BOUNDS(netvm_put_with(region, beyond[i].offset, buffer, beyond[i].bytes, NETVM_FENCE, NULL));
        BOUNDS(netvm_putv(region, iov, 2)); /* and the first piece is not written */
        BOUNDS(netvm_get(region, beyond[i].offset, buffer, beyond[i].bytes));
        BOUNDS(netvm_getv(region, iov, 2));
    }
    BOUNDS(netvm_put(region, 0, buffer, SIZE_MAX));
    BOUNDS(netvm_get(region, 0, buffer, SIZE_MAX));
    OK(netvm_put(region, 8192, NULL, 0));
    OK(netvm_get(region, 8192, NULL, 0));
    OK(netvm_get(region, 0, buffer, 1));
    CHECK(buffer[0] == 0);
    ARGUMENT(netvm_put_with(region, 0, buffer, 8, 2, NULL));
    netvm_signal signal = {2, 1};
    BOUNDS(netvm_put_with(region, 0, buffer, 8, 0, &signal));
    BOUNDS(netvm_put_notify(region, 0, buffer, 8, 2, 0));
    BOUNDS(netvm_put_notify(region, 0, buffer, 8, 65536, 0));
    BOUNDS(netvm_notify(region, UINT32_MAX, 0));
    BOUNDS(netvm_atomic_load_u64(region, 8192, &longer));
    BOUNDS(netvm_atomic_swap_u32(region, UINT64_MAX, 1, NULL));
    EXPECT(NETVM_ERR_MISALIGNED, netvm_atomic_load_u64(region, 4, &longer));
    EXPECT(NETVM_ERR_MISALIGNED, netvm_atomic_fetch_or_u32(region, 2, 1, NULL));
    BOUNDS(netvm_board_test(board, 2, &longer));
    BOUNDS(netvm_board_value(board, 2, &word));
    BOUNDS(netvm_board_wait(board, 2, 0));
    BOUNDS(netvm_board_spin(board, 65536, 0));
    BOUNDS(netvm_board_wait_count(board, UINT32_MAX, 1, 0));
    BOUNDS(netvm_board_wait_any(board, 0, 3, 0, &word));
    BOUNDS(netvm_board_wait_any(board, 1, UINT32_MAX, 0, &word));
    BOUNDS(netvm_board_wait_any(board, 0, 0, 0, &word));
    BOUNDS(netvm_board_acknowledge(board, 2, 1, NULL));
    BOUNDS(netvm_board_reset(board, 2, &word));
    BOUNDS(netvm_board_notify(board, 2, 0));
    BOUNDS(netvm_board_rearm(board, 2, 1));
    BOUNDS(netvm_board_disarm(board, 2));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_board_wait_count(board, 0, UINT64_MAX, 0));
    EXPECT(NETVM_ERR_TIMED_OUT, netvm_board_spin(board, 0, NETVM_MICROSECONDS(1)));

    /* Handles of another kind, no handles, closed handles. */
    ARGUMENT(netvm_node_poll((netvm_node *)(void *)region));
    ARGUMENT(netvm_flush((netvm_region *)(void *)board));
    ARGUMENT(netvm_region_close((netvm_region *)(void *)node));
    ARGUMENT(netvm_flush((netvm_region *)(void *)place));
    ARGUMENT(netvm_flush((netvm_region *)(void *)((char *)place + 1)));
    ARGUMENT(netvm_memory_free((netvm_memory *)(void *)place));

    /* Keys. */
    ARGUMENT(netvm_key_from_text("", &key));
    ARGUMENT(netvm_key_from_text("0123456789abcdef0123456789abcde", &key));
    ARGUMENT(netvm_key_from_text("0123456789abcdef0123456789abcdeg", &key));
    ARGUMENT(netvm_key_from_text("0123456789abcdef0123456789abcdef0", &key));
    OK(netvm_key_from_text("0123456789ABCDEF0123456789abcdef", &key));
    OK(netvm_key_to_text(&key, text));
    CHECK(strcmp(text, "0123456789abcdef0123456789abcdef") == 0);

    /* What has been taken away, and what has gone. */
    OK(netvm_unexport(node, "write"));
    EXPECT(NETVM_ERR_GONE, netvm_get(region, 0, buffer, 8));
    EXPECT(NETVM_ERR_GONE, netvm_atomic_load_u32(region, 0, &word));
    OK(netvm_put(region, 0, buffer, 8));
    EXPECT(NETVM_ERR_GONE, netvm_flush(region));
    OK(netvm_node_destroy(node));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_get(region, 0, buffer, 8));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_put(region, 0, buffer, 8));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_flush(region));
    netvm_region *again;
    EXPECT(NETVM_ERR_PEER_LOST, netvm_import(peer, "read", &key, &again));
    OK(netvm_region_close(region));
    OK(netvm_peer_close(peer));
    OK(netvm_board_notify(board, 0, 0));
    OK(netvm_board_wait(board, 0, 0));
    OK(netvm_board_close(board));
    OK(netvm_memory_free(memory));
}

static void security(void) {
    netvm_node_options options = NETVM_NODE_OPTIONS_INIT;
    uint8_t secret[NETVM_SECRET_BYTES] = {7};
    netvm_node *server, *client;
    netvm_peer *peer;
    char address[64];
    options.secret = secret;
    OK(netvm_node_create(&options, &server));
    OK(netvm_node_listen(server, "127.0.0.1:0", address, sizeof address));
    secret[0] = 8;
    OK(netvm_node_create(&options, &client));
    EXPECT(NETVM_ERR_SECURITY, netvm_connect(client, address, NULL, &peer));
    CHECK(strstr(netvm_last_error(), address) != NULL);
    OK(netvm_node_destroy(client));
    OK(netvm_node_create(NULL, &client));
    EXPECT(NETVM_ERR_SECURITY, netvm_connect(client, address, NULL, &peer));
    OK(netvm_node_destroy(client));
    OK(netvm_node_destroy(server));
}

/* Every thread has a message of its own. */
static void *other_thread(void *user) {
    (void)user;
    CHECK(netvm_last_error()[0] == 0);
    ARGUMENT(netvm_node_poll(NULL));
    return NULL;
}

static void messages(void) {
    ARGUMENT(netvm_key_from_text("x", &key));
    char *before = strdup(netvm_last_error());
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(strcmp(before, netvm_last_error()) == 0);
    free(before);
    for (int status = -100; status < 100; status++)
        CHECK(netvm_strerror(status) != NULL && netvm_strerror(status)[0] != 0);
}

int main(void) {
    nulls();
    posts();
    channels();
    null_objects();
    values();
    security();
    messages();
    puts("ok");
    return 0;
}
