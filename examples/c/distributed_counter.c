/*
 * Processes count in another one's memory: with one atomic, and under a lock for what no atomic can do.
 *
 *   distributed_counter listen 0.0.0.0:7070 PROCESSES   prints the command for the others
 *   distributed_counter connect HOST:7070 KEY LOCK_KEY
 */
#include <math.h>
#include <netvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNTS 500
#define TIMEOUT NETVM_SECONDS(60)

/* The only notification number. */
enum { DONE, NUMBERS };

/* What the listener exports. */
struct counters {
    uint64_t count;
    double mean; /* of numbers that the processes add under the lock */
    double added;
};

static int check(int status, const char *what) {
    if (status < 0) {
        fprintf(stderr, "%s: %s: %s\n", what, netvm_strerror(status), netvm_last_error());
        exit(1);
    }
    return status;
}

static void home(netvm_node *node, const char *address, unsigned processes) {
    netvm_memory *memory;
    void *place;
    check(netvm_memory_alloc(sizeof(struct counters), 0, &memory), "allocate memory");
    check(netvm_memory_query(memory, &place, NULL), "find the memory");
    netvm_key key, lock_key;
    netvm_board *board;
    check(netvm_export_notified(node, "counters", memory, NETVM_READ_WRITE, NUMBERS, &key, &board), "export");
    check(netvm_export_lock(node, "lock", &lock_key), "export a lock");
    char actual[128], text[NETVM_KEY_TEXT_BYTES], lock_text[NETVM_KEY_TEXT_BYTES];
    check(netvm_node_listen(node, address, actual, sizeof actual), "listen");
    check(netvm_key_to_text(&key, text), "write a key");
    check(netvm_key_to_text(&lock_key, lock_text), "write a key");
    printf("distributed_counter connect %s %s %s\n", actual, text, lock_text);
    fflush(stdout);

    check(netvm_board_wait_count(board, DONE, processes, TIMEOUT), "wait for the processes");
    struct counters *counters = place;
    uint64_t count = __atomic_load_n(&counters->count, __ATOMIC_ACQUIRE);
    printf("counted to %llu, mean %.6f of %.0f\n", (unsigned long long)count, counters->mean, counters->added);
    uint64_t expected = (uint64_t)processes * COUNTS;
    if (count != expected || counters->added != (double)expected || fabs(counters->mean - (COUNTS - 1) / 2.0) > 1e-6) {
        fprintf(stderr, "expected %llu\n", (unsigned long long)expected);
        exit(1);
    }
    netvm_board_close(board);
    netvm_memory_free(memory);
}

static void count(netvm_node *node, const char *address, const char *text, const char *lock_text) {
    netvm_key key, lock_key;
    netvm_peer *peer;
    netvm_region *counters;
    netvm_lock *lock;
    check(netvm_key_from_text(text, &key), "read a key");
    check(netvm_key_from_text(lock_text, &lock_key), "read a key");
    check(netvm_connect(node, address, NULL, &peer), "connect");
    check(netvm_import(peer, "counters", &key, &counters), "import");
    check(netvm_lock_open(peer, "lock", &lock_key, &lock), "open the lock");
    for (int number = 0; number < COUNTS; number++) {
        uint64_t old;
        check(netvm_atomic_fetch_add_u64(counters, offsetof(struct counters, count), 1, &old), "count");

        if (check(netvm_lock_acquire(lock, TIMEOUT), "lock") == NETVM_ABANDONED)
            fprintf(stderr, "somebody died with the lock: the mean may be off\n");
        double values[2];
        check(netvm_get(counters, offsetof(struct counters, mean), values, sizeof values), "get");
        values[1] += 1;
        values[0] += (number - values[0]) / values[1];
        check(netvm_put(counters, offsetof(struct counters, mean), values, sizeof values), "put");
        /* The next one sees what we put: it goes the same way before the lock's end. */
        check(netvm_lock_release(lock, 0), "unlock");
    }
    check(netvm_notify(counters, DONE, 0), "notify");
    /* We are heard before we go: confirmed by an answer. The home may go as soon as all are done. */
    int status = netvm_flush(counters);
    if (status != NETVM_OK && status != NETVM_ERR_PEER_LOST)
        check(status, "flush");
    netvm_lock_close(lock);
    netvm_region_close(counters);
    netvm_peer_close(peer);
}

int main(int argc, char **argv) {
    netvm_node_options options = NETVM_NODE_OPTIONS_INIT;
    options.secret_file = getenv("NETVM_SECRET_FILE");
    netvm_node *node;
    check(netvm_node_create(&options, &node), "start a node");
    if (argc == 4 && strcmp(argv[1], "listen") == 0 && atoi(argv[3]) > 0) {
        home(node, argv[2], (unsigned)atoi(argv[3]));
    } else if (argc == 5 && strcmp(argv[1], "connect") == 0) {
        count(node, argv[2], argv[3], argv[4]);
    } else {
        fprintf(stderr, "usage: %s listen ADDRESS PROCESSES | connect ADDRESS KEY LOCK_KEY\n", argv[0]);
        return 2;
    }
    netvm_node_destroy(node);
    return 0;
}
