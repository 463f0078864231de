#include "permute.h"

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15) /* 2**64 / golden ratio, odd */
enum { ROUNDS = 6 };

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static int bits_of(uint64_t x) {
    int bits = 0;
    for (; x; x >>= 1)
        bits++;
    return bits;
}

bool permute(int64_t count, const int64_t *positions, const uint64_t *keys, int64_t size,
             int64_t *out) {
    int bits = bits_of((uint64_t)size - 1);
    bits = bits < 8 ? 8 : bits; /* see rng.py */
    int low_bits = bits / 2;
    uint64_t low_mask = (UINT64_C(1) << low_bits) - 1;
    uint64_t high_mask = (UINT64_C(1) << (bits - low_bits)) - 1;
    for (int64_t i = 0; i < count; i++) {
        if (positions[i] < 0 || positions[i] >= size)
            return false;
        uint64_t rounds[ROUNDS], x = (uint64_t)positions[i];
        for (uint64_t r = 0; r < ROUNDS; r++)
            rounds[r] = mix(keys[i] + (r + 1) * GOLDEN);
        do {
            uint64_t high = x >> low_bits, low = x & low_mask;
            for (int r = 0; r < ROUNDS; r += 2) {
                high ^= mix(low + rounds[r]) & high_mask;
                low ^= mix(high + rounds[r + 1]) & low_mask;
            }
            x = high << low_bits | low;
        } while (x >= (uint64_t)size); /* back inside at last, as it began there */
        out[i] = (int64_t)x;
    }
    return true;
}
