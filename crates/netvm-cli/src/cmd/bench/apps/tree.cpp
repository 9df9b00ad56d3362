// An ordered map of strings, filled in a random order and gone through again and again: its nodes lie anywhere, in the same order in each round.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

int main(int argc, char **argv) {
    const uint64_t entries = argc > 1 ? strtoull(argv[1], nullptr, 10) : 1000000;
    const int rounds = 20;
    std::map<uint64_t, std::string> tree;
    uint64_t key = 88172645463325252;
    for (uint64_t entry = 0; entry < entries; entry++) {
        key ^= key << 13, key ^= key >> 7, key ^= key << 17;
        tree.emplace(key, std::string(64 + key % 64, char('a' + key % 26)));
    }
    uint64_t sum = 0;
    for (int round = 0; round < rounds; round++) {
        for (const auto &[number, text] : tree)
            sum = sum * 31 + number + text[(number + round) % text.size()];
    }
    printf("%zu entries, %016llx\n", tree.size(), (unsigned long long)sum);
}
