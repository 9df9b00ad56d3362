/* A peer that is stopped, and one that is killed, in the middle of what others do with it. Prints "ok". Called with "serve" it is that peer. */
#include "test.h"
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static netvm_key key;

/* The peer that dies. */
static int serve(void) {
    netvm_node *node;
    netvm_memory *memory;
    netvm_board *board;
    char address[64], keys[3][NETVM_KEY_TEXT_BYTES];
    OK(netvm_node_create(NULL, &node));
    OK(netvm_memory_alloc(1 << 20, 0, &memory));
    OK(netvm_export_notified(node, "memory", memory, NETVM_READ_WRITE, 1, &key, &board));
    OK(netvm_key_to_text(&key, keys[0]));
    OK(netvm_export_lock(node, "lock", &key));
    OK(netvm_key_to_text(&key, keys[1]));
    OK(netvm_export_group(node, "group", 2, &key));
    OK(netvm_key_to_text(&key, keys[2]));
    OK(netvm_node_listen(node, "127.0.0.1:0", address, sizeof address));
    printf("%s %s %s %s\n", address, keys[0], keys[1], keys[2]);
    fflush(stdout);
    for (;;)
        pause();
}

struct served {
    pid_t child;
    char address[64], keys[3][NETVM_KEY_TEXT_BYTES];
};

static struct served start(const char *program) {
    struct served served;
    int ends[2];
    CHECK(pipe(ends) == 0);
    served.child = fork();
    CHECK(served.child >= 0);
    if (served.child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* should a check fail */
        dup2(ends[1], 1);
        execl(program, program, "serve", (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    FILE *from = fdopen(ends[0], "r");
    CHECK(from != NULL);
    CHECK(fscanf(from, "%63s %32s %32s %32s", served.address, served.keys[0], served.keys[1], served.keys[2]) == 4);
    fclose(from);
    return served;
}

/* A peer that is stopped, not dead: nothing ends its connection. */
static void silent_peer(const char *program) {
    struct served served = start(program);
    netvm_node *node;
    netvm_peer *peer;
    netvm_region *region;
    netvm_lock *lock;
    char byte = 0;
    netvm_connect_options options = NETVM_CONNECT_OPTIONS_INIT;
    options.link = NETVM_LINK_SOCKET;
    OK(netvm_node_create(NULL, &node));
    OK(netvm_node_keep_alive(node, NETVM_MILLISECONDS(100), NETVM_MILLISECONDS(600)));
    OK(netvm_connect(node, served.address, &options, &peer));
    OK(netvm_key_from_text(served.keys[0], &key));
    OK(netvm_import(peer, "memory", &key, &region));
    OK(netvm_key_from_text(served.keys[1], &key));
    OK(netvm_lock_open(peer, "lock", &key, &lock));
    int status;
    CHECK(kill(served.child, SIGSTOP) == 0 && waitpid(served.child, &status, WUNTRACED) == served.child);
    status = netvm_get(region, 0, &byte, 1);
    CHECK(status == NETVM_ERR_NO_ANSWER || status == NETVM_ERR_PEER_LOST);
    CHECK(strstr(netvm_last_error(), served.address) != NULL);
    CHECK(netvm_lock_acquire(lock, NETVM_FOREVER) < 0);
    CHECK(kill(served.child, SIGKILL) == 0 && waitpid(served.child, &status, 0) == served.child);
    OK(netvm_lock_close(lock));
    OK(netvm_region_close(region));
    OK(netvm_peer_close(peer));
    OK(netvm_node_destroy(node));
}

static void *wait_for_lock(void *user) {
    EXPECT(NETVM_ERR_PEER_LOST, netvm_lock_acquire(user, NETVM_FOREVER));
    return NULL;
}

static void *wait_for_group(void *user) {
    EXPECT(NETVM_ERR_PEER_LOST, netvm_group_barrier(user, NETVM_FOREVER));
    return NULL;
}

static void dead_peer(const char *program) {
    struct served served = start(program);
    pid_t child = served.child;
    const char *address = served.address;
    netvm_node *node;
    netvm_peer *peer;
    netvm_region *region;
    netvm_lock *lock, *second;
    netvm_group *group;
    OK(netvm_node_create(NULL, &node));
    OK(netvm_connect(node, address, NULL, &peer));
    OK(netvm_key_from_text(served.keys[0], &key));
    OK(netvm_import(peer, "memory", &key, &region));
    OK(netvm_key_from_text(served.keys[1], &key));
    OK(netvm_lock_open(peer, "lock", &key, &lock));
    OK(netvm_lock_open(peer, "lock", &key, &second));
    OK(netvm_key_from_text(served.keys[2], &key));
    OK(netvm_group_join(peer, "group", &key, &group));
    OK(netvm_lock_acquire(lock, LIMIT));
    pthread_t waiters[2];
    CHECK(pthread_create(&waiters[0], NULL, wait_for_lock, second) == 0);
    CHECK(pthread_create(&waiters[1], NULL, wait_for_group, group) == 0);
    usleep(20000);
    static char big[1 << 20];
    OK(netvm_put(region, 0, big, sizeof big));
    CHECK(kill(child, SIGKILL) == 0);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(pthread_join(waiters[0], NULL) == 0 && pthread_join(waiters[1], NULL) == 0);
    EXPECT(NETVM_ERR_PEER_LOST, netvm_get(region, 0, big, sizeof big));
    CHECK(strstr(netvm_last_error(), address) != NULL); /* the message names the peer */
    EXPECT(NETVM_ERR_PEER_LOST, netvm_put(region, 0, big, 8));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_put(region, 0, big, sizeof big));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_put_notify(region, 0, big, 8, 0, 0));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_notify(region, 0, 0));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_flush(region));
    netvm_iov iov = {0, big, sizeof big};
    EXPECT(NETVM_ERR_PEER_LOST, netvm_putv(region, &iov, 1));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_getv(region, &iov, 1));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_atomic_fetch_add_u64(region, 0, 1, NULL));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_lock_release(lock, NETVM_CONFIRM));
    EXPECT(NETVM_ERR_PEER_LOST, netvm_lock_acquire(lock, LIMIT));
    netvm_peer *again;
    EXPECT(NETVM_ERR_CONNECT, netvm_connect(node, address, NULL, &again));
    CHECK(again == NULL);
    OK(netvm_peer_close(peer));
    OK(netvm_group_leave(group));
    OK(netvm_lock_close(second));
    OK(netvm_lock_close(lock));
    OK(netvm_region_close(region));
    OK(netvm_node_destroy(node));
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "serve") == 0)
        return serve();
    dead_peer(argv[0]);
    silent_peer(argv[0]);
    puts("ok");
    return 0;
}
