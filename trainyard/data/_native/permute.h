/* Keyed permutations of range(size); see permute in rng.py. */
#ifndef TRAINYARD_PERMUTE_H
#define TRAINYARD_PERMUTE_H

#include <stdbool.h>
#include <stdint.h>

/* Where the permutation of keys[i] sends positions[i]; false if one of them is not below size. */
bool permute(int64_t count, const int64_t *positions, const uint64_t *keys, int64_t size,
             int64_t *out);

#endif
