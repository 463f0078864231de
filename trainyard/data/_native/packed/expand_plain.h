/* [per path] Packed blocks put together one coefficient after the other; see expand.h. */
#ifndef TRAINYARD_EXPAND_PLAIN_H
#define TRAINYARD_EXPAND_PLAIN_H

#include "packed/expand.h"

static inline void expand_narrow(int16_t *block, uint64_t mask, const uint8_t *values) {
    memset(block, 0, 64 * sizeof *block);
    for (mask &= ~(uint64_t)1; mask; mask &= mask - 1)
        block[__builtin_ctzll(mask)] = (int8_t)*values++;
}

static inline void expand_wide(int16_t *block, uint64_t mask, const uint8_t *low,
                               const uint8_t *high) {
    memset(block, 0, 64 * sizeof *block);
    for (; mask; mask &= mask - 1)
        block[__builtin_ctzll(mask)] = (int16_t)(*low++ | *high++ << 8);
}

static inline uint64_t nonzero_mask(const int16_t *block) {
    uint64_t mask = 0;
    for (int k = 0; k < 64; k++)
        mask |= (uint64_t)(block[k] != 0) << k;
    return mask;
}

#endif
