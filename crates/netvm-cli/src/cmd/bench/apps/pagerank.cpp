// PageRank, ten rounds on a graph whose degrees follow a power law, in compressed rows. Arguments: vertices; 16 edges each.
// Ranks are whole numbers, so that the result does not depend on the compiler.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

int main(int, char **arguments) {
    const uint64_t vertices = strtoull(arguments[1], nullptr, 10), edges = vertices * 16;
    std::vector<uint64_t> start(vertices + 1);
    std::vector<uint32_t> source(edges), degree(vertices);
    // Edges come in from few vertices often and from many rarely: two random numbers multiplied.
    uint64_t at = 0;
    for (uint64_t to = 0; to < vertices; to++) {
        start[to] = at;
        for (int i = 0; i < 16; i++, at++) {
            const uint64_t random = mix(at + 1), low = random & 0xffffffff, high = random >> 32;
            const uint64_t rank = (((low * high) >> 32) * vertices) >> 32;
            source[at] = uint32_t(mix(rank + 99) % vertices);
            degree[source[at]]++;
        }
    }
    start[vertices] = at;
    std::vector<uint64_t> rank(vertices, uint64_t(1) << 40), next(vertices);
    for (int round = 0; round < 10; round++) {
        for (uint64_t v = 0; v < vertices; v++) rank[v] = degree[v] ? rank[v] / degree[v] : 0;
        for (uint64_t v = 0; v < vertices; v++) {
            uint64_t sum = 0;
            for (uint64_t e = start[v]; e < start[v + 1]; e++) sum += rank[source[e]];
            next[v] = (uint64_t(1) << 40) * 15 / 100 + sum / 100 * 85;
        }
        rank.swap(next);
    }
    uint64_t sum = 0;
    for (uint64_t v = 0; v < vertices; v++) sum = sum * 31 + rank[v];
    printf("%llu\n", (unsigned long long)sum);
}
