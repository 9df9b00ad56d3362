/*
 * Workers take jobs from a queue in one process's memory: a semaphore counts the jobs, an atomic hands them out.
 *
 *   work_queue listen 0.0.0.0:7070 WORKERS     makes jobs; prints the command for workers
 *   work_queue connect HOST:7070 KEY SEMAPHORE_KEY
 */
#include <netvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define JOBS 2000
#define STOP UINT64_MAX
#define WORKERS_MAX 64
#define TIMEOUT NETVM_SECONDS(60)

/* The only notification number. */
enum { FINISHED, NUMBERS };

/* What the listener exports. */
struct queue {
    uint64_t next; /* the place of the next job */
    uint64_t sum;  /* of the results */
    uint64_t jobs[JOBS + WORKERS_MAX];
};

static int check(int status, const char *what) {
    if (status < 0) {
        fprintf(stderr, "%s: %s: %s\n", what, netvm_strerror(status), netvm_last_error());
        exit(1);
    }
    return status;
}

static void make_jobs(netvm_node *node, const char *address, unsigned workers) {
    netvm_memory *memory;
    void *place;
    check(netvm_memory_alloc(sizeof(struct queue), 0, &memory), "allocate memory");
    check(netvm_memory_query(memory, &place, NULL), "find the memory");
    struct queue *queue = place;
    netvm_key key, ready_key;
    netvm_board *board;
    check(netvm_export_notified(node, "queue", memory, NETVM_READ_WRITE, NUMBERS, &key, &board), "export");
    check(netvm_export_semaphore(node, "ready", 0, &ready_key), "export a semaphore");
    char actual[128], text[NETVM_KEY_TEXT_BYTES], ready_text[NETVM_KEY_TEXT_BYTES];
    check(netvm_node_listen(node, address, actual, sizeof actual), "listen");
    check(netvm_key_to_text(&key, text), "write a key");
    check(netvm_key_to_text(&ready_key, ready_text), "write a key");
    printf("work_queue connect %s %s %s\n", actual, text, ready_text);
    fflush(stdout);

    /* The home uses its own semaphore like everybody else. */
    netvm_peer *self;
    netvm_semaphore *ready;
    check(netvm_connect_local(node, node, &self), "connect to ourselves");
    check(netvm_semaphore_open(self, "ready", &ready_key, &ready), "open the semaphore");
    uint64_t expected = 0;
    for (uint64_t job = 0; job < JOBS + workers; job++) {
        /* Workers read jobs with atomic loads. */
        __atomic_store_n(&queue->jobs[job], job < JOBS ? job : STOP, __ATOMIC_RELEASE);
        check(netvm_semaphore_add(ready, 1, NULL), "add a job");
        if (job < JOBS)
            expected += job * job;
    }
    check(netvm_board_wait_count(board, FINISHED, workers, TIMEOUT), "wait for the workers");
    uint64_t sum = __atomic_load_n(&queue->sum, __ATOMIC_ACQUIRE);
    printf("sum of squares: %llu\n", (unsigned long long)sum);
    if (sum != expected) {
        fprintf(stderr, "expected %llu\n", (unsigned long long)expected);
        exit(1);
    }
    netvm_semaphore_close(ready);
    netvm_peer_close(self);
    netvm_board_close(board);
    netvm_memory_free(memory);
}

static void work(netvm_node *node, const char *address, const char *text, const char *ready_text) {
    netvm_key key, ready_key;
    netvm_peer *peer;
    netvm_region *queue;
    netvm_semaphore *ready;
    check(netvm_key_from_text(text, &key), "read a key");
    check(netvm_key_from_text(ready_text, &ready_key), "read a key");
    check(netvm_connect(node, address, NULL, &peer), "connect");
    check(netvm_import(peer, "queue", &key, &queue), "import");
    check(netvm_semaphore_open(peer, "ready", &ready_key, &ready), "open the semaphore");
    unsigned done = 0;
    uint64_t sum = 0, old;
    for (;;) {
        check(netvm_semaphore_consume(ready, 1, TIMEOUT), "wait for a job");
        uint64_t place, job;
        check(netvm_atomic_fetch_add_u64(queue, offsetof(struct queue, next), 1, &place), "take a place");
        check(netvm_atomic_load_u64(queue, offsetof(struct queue, jobs) + place * sizeof job, &job), "read the job");
        if (job == STOP)
            break;
        sum += job * job;
        done++;
    }
    check(netvm_atomic_fetch_add_u64(queue, offsetof(struct queue, sum), sum, &old), "add the results");
    printf("%u jobs\n", done);
    netvm_semaphore_close(ready);
    check(netvm_notify(queue, FINISHED, 0), "notify");
    int status = netvm_flush(queue);
    if (status != NETVM_OK && status != NETVM_ERR_PEER_LOST)
        check(status, "flush");
    netvm_region_close(queue);
    netvm_peer_close(peer);
}

int main(int argc, char **argv) {
    netvm_node_options options = NETVM_NODE_OPTIONS_INIT;
    options.secret_file = getenv("NETVM_SECRET_FILE");
    netvm_node *node;
    check(netvm_node_create(&options, &node), "start a node");
    if (argc == 4 && strcmp(argv[1], "listen") == 0 && atoi(argv[3]) > 0 && atoi(argv[3]) <= WORKERS_MAX) {
        make_jobs(node, argv[2], (unsigned)atoi(argv[3]));
    } else if (argc == 5 && strcmp(argv[1], "connect") == 0) {
        work(node, argv[2], argv[3], argv[4]);
    } else {
        fprintf(stderr, "usage: %s listen ADDRESS WORKERS | connect ADDRESS KEY SEMAPHORE_KEY\n", argv[0]);
        return 2;
    }
    netvm_node_destroy(node);
    return 0;
}
