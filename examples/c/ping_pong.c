/*
 * Two processes put a message into each other's memory in turn, and measure how long that takes.
 *
 *   ping_pong listen 0.0.0.0:7070      prints the command for the other process
 *   ping_pong connect HOST:7070 KEY
 *
 * Both use the one connection. Machines on a network need a secret that both know: `netvm secret new FILE`, and
 * NETVM_SECRET_FILE=FILE for both.
 */
#include <netvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUNDS 1000
#define MESSAGE_BYTES 64
#define TIMEOUT NETVM_SECONDS(60)

/* Notification numbers of both. */
enum { MESSAGE, HELLO, NUMBERS };

/* What each exports. */
struct mailbox {
    char message[MESSAGE_BYTES];
    char key[NETVM_KEY_TEXT_BYTES]; /* of the other one's mailbox */
};

static int check(int status, const char *what) {
    if (status < 0) {
        fprintf(stderr, "%s: %s: %s\n", what, netvm_strerror(status), netvm_last_error());
        exit(1);
    }
    return status;
}

static double now_us(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void send_message(netvm_region *other, const char *text) {
    char message[MESSAGE_BYTES] = {0};
    snprintf(message, sizeof message, "%s", text);
    check(netvm_put_notify(other, offsetof(struct mailbox, message), message, sizeof message, MESSAGE, 0), "put");
}

static void receive_message(netvm_board *board) {
    check(netvm_board_wait(board, MESSAGE, TIMEOUT), "wait for a message");
    check(netvm_board_acknowledge(board, MESSAGE, 1, NULL), "acknowledge");
}

int main(int argc, char **argv) {
    int listens = argc == 3 && strcmp(argv[1], "listen") == 0;
    if (!listens && !(argc == 4 && strcmp(argv[1], "connect") == 0)) {
        fprintf(stderr, "usage: %s listen ADDRESS | connect ADDRESS KEY\n", argv[0]);
        return 2;
    }
    netvm_node_options options = NETVM_NODE_OPTIONS_INIT;
    options.secret_file = getenv("NETVM_SECRET_FILE");
    netvm_node *node;
    check(netvm_node_create(&options, &node), "start a node");

    /* Both export a mailbox. */
    netvm_memory *memory;
    void *place;
    check(netvm_memory_alloc(sizeof(struct mailbox), 0, &memory), "allocate memory");
    check(netvm_memory_query(memory, &place, NULL), "find the memory");
    struct mailbox *mailbox = place;
    netvm_key key;
    netvm_board *board;
    check(netvm_export_notified(node, "mailbox", memory, NETVM_READ_WRITE, NUMBERS, &key, &board), "export");
    char text[NETVM_KEY_TEXT_BYTES];
    check(netvm_key_to_text(&key, text), "write a key");

    netvm_peer *peer;
    netvm_region *other;
    netvm_key other_key;
    if (listens) {
        char address[128];
        check(netvm_node_listen(node, argv[2], address, sizeof address), "listen");
        printf("ping_pong connect %s %s\n", address, text);
        fflush(stdout);
        check(netvm_accept(node, TIMEOUT, &peer), "wait for somebody");
        check(netvm_board_wait(board, HELLO, TIMEOUT), "wait for a key");
        /* The notification comes after the bytes. */
        check(netvm_key_from_text(mailbox->key, &other_key), "read a key");
        check(netvm_import(peer, "mailbox", &other_key, &other), "import");
        for (int round = 0; round < ROUNDS; round++) {
            receive_message(board);
            send_message(other, mailbox->message);
        }
    } else {
        check(netvm_connect(node, argv[2], NULL, &peer), "connect");
        check(netvm_key_from_text(argv[3], &other_key), "read a key");
        check(netvm_import(peer, "mailbox", &other_key, &other), "import");
        check(netvm_put_notify(other, offsetof(struct mailbox, key), text, sizeof text, HELLO, 0), "put");
        double start = now_us();
        for (int round = 0; round < ROUNDS; round++) {
            char message[MESSAGE_BYTES];
            snprintf(message, sizeof message, "ball %d", round);
            send_message(other, message);
            receive_message(board);
            if (strcmp(mailbox->message, message) != 0) {
                fprintf(stderr, "sent %s, got %s back\n", message, mailbox->message);
                return 1;
            }
        }
        printf("%d round trips, %.1f us each\n", ROUNDS, (now_us() - start) / ROUNDS);
    }
    /* What was put last may still be on its way. The other one may also have it and be gone. */
    int status = netvm_flush(other);
    if (status != NETVM_OK && status != NETVM_ERR_PEER_LOST)
        check(status, "flush");
    netvm_region_close(other);
    netvm_peer_close(peer);
    netvm_board_close(board);
    netvm_node_destroy(node);
    netvm_memory_free(memory);
    return 0;
}
