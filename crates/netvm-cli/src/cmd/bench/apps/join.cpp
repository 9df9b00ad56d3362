// A hash join: builds a chained table of one relation, probes it with another in random order, and sums what matches.
// Arguments: rows of the first; the second has twice as many.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

struct Row {
    uint64_t key, payload[3];
    uint32_t next;
};

static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

int main(int, char **arguments) {
    const uint32_t rows = strtoul(arguments[1], nullptr, 10);
    std::vector<Row> first(rows);
    size_t buckets = 1;
    while (buckets < rows) buckets *= 2;
    std::vector<uint32_t> heads(buckets, UINT32_MAX);
    for (uint32_t i = 0; i < rows; i++) {
        Row &row = first[i];
        row.key = mix(i + 1) % (uint64_t(rows) * 2);
        for (int p = 0; p < 3; p++) row.payload[p] = mix(row.key + p);
        uint32_t &head = heads[mix(row.key) & (buckets - 1)];
        row.next = head;
        head = i;
    }
    uint64_t matches = 0, sum = 0;
    // Three in four probes go to one eighth of the keys, as in the facts of a star schema.
    for (uint64_t i = 0; i < uint64_t(rows) * 2; i++) {
        const uint64_t random = mix(i + 0x1234567), span = uint64_t(rows) * 2;
        const uint64_t key = random % 4 ? mix(random) % (span / 8) : mix(random) % span;
        for (uint32_t at = heads[mix(key) & (buckets - 1)]; at != UINT32_MAX; at = first[at].next) {
            if (first[at].key == key) {
                matches++;
                sum = sum * 31 + first[at].payload[i % 3];
            }
        }
    }
    printf("%llu %llu\n", (unsigned long long)matches, (unsigned long long)sum);
}
