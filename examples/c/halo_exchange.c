/*
 * Heat spreads over a plate of which each process has some rows. After each step neighbours put their outermost rows, the halo, into
 * each other's memory; a notification says which step's they are.
 *
 *   halo_exchange listen 0.0.0.0:7070 PROCESSES      takes part, and prints the command for the others
 *   halo_exchange connect HOST:7070 GROUP_KEY TABLE_KEY [OWN_ADDRESS]
 *
 * The group hands out ranks, and the first process's table tells where everybody listens.
 */
#include <math.h>
#include <netvm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COLUMNS 64
#define ROWS 16 /* of each process */
#define STEPS 200
#define PROCESSES_MAX 64
#define TIMEOUT NETVM_SECONDS(60)

typedef double row[COLUMNS];

/* Where a process is found. */
struct entry {
    char address[128];
    char key[NETVM_KEY_TEXT_BYTES + 15];
};

/* What each exports to its neighbours. A step's halo goes where the next step's does not: who is a step ahead overwrites nothing. */
struct halo {
    row above[2];
    row below[2];
};

/* Notification numbers: a step's halo has come, with the step's number + 1 as its value. Odd and even steps have their own. */
enum { ABOVE, BELOW = ABOVE + 2, NUMBERS = BELOW + 2 };

static int check(int status, const char *what) {
    if (status < 0) {
        fprintf(stderr, "%s: %s: %s\n", what, netvm_strerror(status), netvm_last_error());
        exit(1);
    }
    return status;
}

static double at_start(int row_number, int column) {
    return row_number % 11 == 3 && column % 7 == 2 ? 100.0 : 0.0;
}

/* New values of `rows` rows; those above and below them are read only. The plate's sides stay cold. */
static double spread(const row *old, row *new, int rows) {
    double change = 0;
    for (int r = 1; r <= rows; r++) {
        for (int c = 1; c < COLUMNS - 1; c++) {
            new[r][c] = old[r][c] + 0.2 * (old[r - 1][c] + old[r + 1][c] + old[r][c - 1] + old[r][c + 1] - 4 * old[r][c]);
            change = fmax(change, fabs(new[r][c] - old[r][c]));
        }
    }
    return change;
}

/* What one process alone would get. */
static row *serial(int rows) {
    row *old = calloc((size_t)rows + 2, sizeof(row)), *new = calloc((size_t)rows + 2, sizeof(row));
    if (old == NULL || new == NULL)
        exit(1);
    for (int r = 0; r < rows; r++)
        for (int c = 1; c < COLUMNS - 1; c++)
            old[r + 1][c] = at_start(r, c);
    for (int step = 0; step < STEPS; step++) {
        spread((const row *)old, new, rows);
        row *swap = old;
        old = new;
        new = swap;
    }
    free(new);
    return old;
}

struct neighbour {
    netvm_peer *peer;
    netvm_region *halo; /* NULL at the plate's edge */
};

static struct neighbour meet(netvm_node *node, netvm_region *table, int rank, int parties) {
    struct neighbour neighbour = {NULL, NULL};
    if (rank < 0 || rank >= parties)
        return neighbour;
    struct entry entry;
    netvm_key key;
    check(netvm_get(table, (uint64_t)rank * sizeof entry, &entry, sizeof entry), "read the table");
    check(netvm_connect(node, entry.address, NULL, &neighbour.peer), "connect to a neighbour");
    check(netvm_key_from_text(entry.key, &key), "read a key");
    check(netvm_import(neighbour.peer, "halo", &key, &neighbour.halo), "import a halo");
    return neighbour;
}

static void receive(netvm_board *board, uint32_t number, int step, row to, const row from) {
    uint32_t value;
    check(netvm_board_wait(board, number, TIMEOUT), "wait for a halo");
    check(netvm_board_reset(board, number, &value), "take a notification");
    if (value != (uint32_t)step + 1) {
        fprintf(stderr, "the halo of step %u came in step %d\n", value - 1, step);
        exit(1);
    }
    memcpy(to, from, sizeof(row));
}

int main(int argc, char **argv) {
    int processes = argc == 4 ? atoi(argv[3]) : 0;
    int listens = processes > 0 && processes <= PROCESSES_MAX && strcmp(argv[1], "listen") == 0;
    if (!listens && !((argc == 5 || argc == 6) && strcmp(argv[1], "connect") == 0)) {
        fprintf(stderr, "usage: %s listen ADDRESS PROCESSES | connect ADDRESS GROUP_KEY TABLE_KEY [OWN_ADDRESS]\n", argv[0]);
        return 2;
    }
    netvm_node_options options = NETVM_NODE_OPTIONS_INIT;
    options.secret_file = getenv("NETVM_SECRET_FILE");
    netvm_node *node;
    check(netvm_node_create(&options, &node), "start a node");

    netvm_memory *memory;
    void *place;
    check(netvm_memory_alloc(sizeof(struct halo), 0, &memory), "allocate memory");
    check(netvm_memory_query(memory, &place, NULL), "find the memory");
    struct halo *halo = place;
    netvm_key key;
    netvm_board *board;
    check(netvm_export_notified(node, "halo", memory, NETVM_READ_WRITE, NUMBERS, &key, &board), "export");
    struct entry entry;
    memset(&entry, 0, sizeof entry);
    const char *own = listens ? argv[2] : argc == 6 ? argv[5] : "127.0.0.1:0";
    check(netvm_node_listen(node, own, entry.address, sizeof entry.address), "listen");
    check(netvm_key_to_text(&key, entry.key), "write a key");

    /* The first process is the home of the group and the table. */
    netvm_peer *home;
    netvm_memory *table_memory = NULL;
    netvm_key group_key, table_key;
    if (listens) {
        check(netvm_memory_alloc(PROCESSES_MAX * sizeof entry, 0, &table_memory), "allocate memory");
        check(netvm_export(node, "table", table_memory, NETVM_READ_WRITE, &table_key), "export");
        check(netvm_export_group(node, "group", (uint32_t)processes, &group_key), "export a group");
        char group_text[NETVM_KEY_TEXT_BYTES], table_text[NETVM_KEY_TEXT_BYTES];
        check(netvm_key_to_text(&group_key, group_text), "write a key");
        check(netvm_key_to_text(&table_key, table_text), "write a key");
        printf("halo_exchange connect %s %s %s\n", entry.address, group_text, table_text);
        fflush(stdout);
        check(netvm_connect_local(node, node, &home), "connect to ourselves");
    } else {
        check(netvm_key_from_text(argv[3], &group_key), "read a key");
        check(netvm_key_from_text(argv[4], &table_key), "read a key");
        check(netvm_connect(node, argv[2], NULL, &home), "connect");
    }
    netvm_region *table;
    netvm_group *group;
    uint32_t own_rank, parties;
    check(netvm_import(home, "table", &table_key, &table), "import the table");
    check(netvm_group_join(home, "group", &group_key, &group), "join the group");
    check(netvm_group_query(group, &own_rank, &parties), "ask for the rank");
    int rank = (int)own_rank;
    check(netvm_put(table, own_rank * sizeof entry, &entry, sizeof entry), "write into the table");
    check(netvm_flush(table), "flush");
    check(netvm_group_barrier(group, TIMEOUT), "wait for all");
    struct neighbour above = meet(node, table, rank - 1, (int)parties);
    struct neighbour below = meet(node, table, rank + 1, (int)parties);

    /* Our rows, with one of the neighbours' above and below. */
    static row first[ROWS + 2], second[ROWS + 2];
    row *old = first, *new = second;
    for (int r = 0; r < ROWS; r++)
        for (int c = 1; c < COLUMNS - 1; c++)
            old[r + 1][c] = at_start(rank * ROWS + r, c);
    double change = 0;
    for (int step = 0; step < STEPS; step++) {
        int half = step % 2;
        uint32_t value = (uint32_t)step + 1;
        /* A neighbour may be a step ahead, and then puts into the other half. */
        if (above.halo != NULL)
            check(netvm_put_notify(above.halo, offsetof(struct halo, below) + (size_t)half * sizeof(row), old[1],
                                   sizeof(row), (uint32_t)(BELOW + half), value), "put a row");
        if (below.halo != NULL)
            check(netvm_put_notify(below.halo, offsetof(struct halo, above) + (size_t)half * sizeof(row), old[ROWS],
                                   sizeof(row), (uint32_t)(ABOVE + half), value), "put a row");
        if (above.halo != NULL)
            receive(board, (uint32_t)(ABOVE + half), step, old[0], halo->above[half]);
        if (below.halo != NULL)
            receive(board, (uint32_t)(BELOW + half), step, old[ROWS + 1], halo->below[half]);
        change = spread((const row *)old, new, ROWS);
        row *swap = old;
        old = new;
        new = swap;
    }
    check(netvm_group_reduce(group, NETVM_MAX_F64, &change, 1, TIMEOUT), "reduce");

    row *expected = serial((int)parties * ROWS);
    for (int r = 1; r <= ROWS; r++) {
        if (memcmp(old[r], expected[rank * ROWS + r], sizeof(row)) != 0) {
            fprintf(stderr, "row %d of process %d differs from the serial result\n", r, rank);
            return 1;
        }
    }
    free(expected);
    printf("process %d of %d: as the serial result; last change %g\n", rank, (int)parties, change);

    netvm_region_close(above.halo);
    netvm_region_close(below.halo);
    netvm_peer_close(above.peer);
    netvm_peer_close(below.peer);
    netvm_region_close(table);
    /* The others still need what we export until they are here. */
    check(netvm_group_barrier(group, TIMEOUT), "wait for all");
    netvm_group_leave(group);
    netvm_peer_close(home);
    netvm_board_close(board);
    netvm_node_destroy(node);
    netvm_memory_free(memory);
    netvm_memory_free(table_memory);
    return 0;
}
