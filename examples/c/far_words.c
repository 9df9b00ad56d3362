/*
 * Counts the words of a text, as `tr -cs A-Za-z '\n' | sort | uniq -c | sort -rn | head` does, in a hash table whose words need not fit into local memory.
 *
 *   netvm lend --size 2G &
 *   far_words 127.0.0.1:7070 TEXT [LOCAL_MIB]      16 if not given
 */
#include <netvm.h>
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORD_BYTES_MAX 256
#define MOST 10

/* A block of far memory, just as long as it must be. */
struct word {
    struct word *next;
    uint64_t count;
    uint32_t hash;
    char text[];
};

static struct word **table; /* another, which grows by moving its pages */
static size_t slots, words;

static int check(int status, const char *what) {
    if (status < 0) {
        fprintf(stderr, "%s: %s: %s\n", what, netvm_strerror(status), netvm_last_error());
        exit(1);
    }
    return status;
}

static uint32_t hash_of(const char *text) {
    uint32_t hash = 2166136261; /* FNV-1a */
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 16777619;
    return hash;
}

/* Twice as many slots: the words of each part between it and its new neighbour. */
static void grow(netvm_pager *pager) {
    void *grown;
    check(netvm_far_realloc(pager, table, 2 * slots * sizeof *table, &grown), "a larger table");
    table = grown;
    for (size_t slot = 0; slot < slots; slot++) {
        struct word *next = table[slot], *parted[2] = {NULL, NULL};
        for (struct word *word; (word = next) != NULL;) {
            size_t to = (word->hash & slots) != 0;
            next = word->next;
            word->next = parted[to];
            parted[to] = word;
        }
        table[slot] = parted[0];
        table[slot + slots] = parted[1];
    }
    slots *= 2;
}

static void count(netvm_pager *pager, const char *text) {
    uint32_t hash = hash_of(text);
    struct word **place = &table[hash & (slots - 1)];
    for (struct word *word = *place; word != NULL; word = word->next)
        if (word->hash == hash && strcmp(word->text, text) == 0) {
            word->count++;
            return;
        }
    if (words++ == slots) {
        grow(pager);
        place = &table[hash & (slots - 1)];
    }
    size_t bytes = strlen(text) + 1;
    void *block;
    check(netvm_far_alloc(pager, sizeof(struct word) + bytes, 0, &block), "a word");
    struct word *word = block;
    *word = (struct word){.next = *place, .count = 1, .hash = hash};
    memcpy(word->text, text, bytes);
    *place = word;
}

/* The most frequent ones first, then by the alphabet. */
static int is_before(const struct word *word, const struct word *other) {
    if (word->count != other->count)
        return word->count > other->count;
    return strcmp(word->text, other->text) < 0;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: far_words LENDER TEXT [LOCAL_MIB]\n");
        return 2;
    }
    FILE *file = fopen(argv[2], "r");
    if (file == NULL) {
        perror(argv[2]);
        return 1;
    }
    const char *lenders[] = {argv[1]};
    netvm_pager_options options = NETVM_PAGER_OPTIONS_INIT;
    options.lenders = lenders;
    options.lender_count = 1;
    options.local_bytes = (argc > 3 ? strtoull(argv[3], NULL, 10) : 16) << 20;
    options.secret_file = getenv("NETVM_SECRET_FILE");
    netvm_pager *pager;
    check(netvm_pager_start(&options, &pager), "pager");
    void *block;
    slots = 1 << 14;
    check(netvm_far_alloc(pager, slots * sizeof *table, 0, &block), "a table");
    table = memset(block, 0, slots * sizeof *table);

    char text[WORD_BYTES_MAX];
    size_t length = 0;
    for (int c; (c = getc(file)) != EOF || length > 0;) {
        if (c != EOF && isalpha(c) && length < sizeof text - 1) {
            text[length++] = (char)c;
        } else if (length > 0) {
            text[length] = 0;
            count(pager, text);
            length = 0;
        }
    }
    if (ferror(file)) {
        perror(argv[2]);
        return 1;
    }
    fclose(file);
    const struct word *most[MOST] = {NULL};
    for (size_t slot = 0; slot < slots; slot++)
        for (const struct word *word = table[slot]; word != NULL; word = word->next) {
            size_t place = MOST;
            for (; place > 0 && (most[place - 1] == NULL || is_before(word, most[place - 1])); place--)
                if (place < MOST)
                    most[place] = most[place - 1];
            if (place < MOST)
                most[place] = word;
        }
    for (size_t place = 0; place < MOST && most[place] != NULL; place++)
        printf("%7" PRIu64 " %s\n", most[place]->count, most[place]->text);

    netvm_far_counts counts;
    check(netvm_pager_query(pager, &counts), "counts");
    printf("%zu words, %" PRIu64 " MiB in %" PRIu64 " MiB: %" PRIu64 " pages came from the lender\n", words,
           counts.far_bytes >> 20, counts.local_bytes_peak >> 20, counts.pages_in);
    for (size_t slot = 0; slot < slots; slot++)
        for (struct word *word = table[slot], *next; word != NULL; word = next) {
            next = word->next;
            check(netvm_far_free(pager, word), "free");
        }
    check(netvm_far_free(pager, table), "free");
    check(netvm_pager_close(pager), "close");
    return 0;
}
