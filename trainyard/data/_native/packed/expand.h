/* Where the values of each row of 8 coefficients of a packed block stand, for all ways of putting
 * them there: expand_plain.h, expand_avx2.h, expand_neon.h, of which each path includes one. They
 * give
 *
 *     expand_narrow   a block of its mask and its values, a byte each
 *     expand_wide     the same, of low and high bytes
 *     nonzero_mask    which coefficients are not zero
 *
 * and may read 64 bytes from the first value, or high byte, of a block on. Coefficient 0 comes out
 * as anything. */
#ifndef TRAINYARD_EXPAND_H
#define TRAINYARD_EXPAND_H

#include "bytes.h"

/* Byte r: how many bits of the mask are set below its byte r. */
static inline uint64_t counts_before_rows(uint64_t mask) {
    uint64_t counts = mask - (mask >> 1 & 0x5555555555555555);
    counts = (counts & 0x3333333333333333) + (counts >> 2 & 0x3333333333333333);
    counts = (counts + (counts >> 4)) & 0x0f0f0f0f0f0f0f0f;
    return counts * 0x0101010101010101 << 8;
}

/* For shuffles of 8 bytes: of each mask of a row, which value goes to byte i; 0x80 is a zero. */
#define EXPAND_BYTE(mask, i)                                                                       \
    ((mask) >> (i) & 1 ? __builtin_popcount((mask) & ((1 << (i)) - 1)) : 0x80)
#define EXPAND_ROW(mask)                                                                           \
    {EXPAND_BYTE(mask, 0), EXPAND_BYTE(mask, 1), EXPAND_BYTE(mask, 2), EXPAND_BYTE(mask, 3),       \
     EXPAND_BYTE(mask, 4), EXPAND_BYTE(mask, 5), EXPAND_BYTE(mask, 6), EXPAND_BYTE(mask, 7)}
#define EXPAND_ROWS_4(mask)                                                                        \
    EXPAND_ROW(mask), EXPAND_ROW(mask + 1), EXPAND_ROW(mask + 2), EXPAND_ROW(mask + 3)
#define EXPAND_ROWS_16(mask)                                                                       \
    EXPAND_ROWS_4(mask), EXPAND_ROWS_4(mask + 4), EXPAND_ROWS_4(mask + 8), EXPAND_ROWS_4(mask + 12)
#define EXPAND_ROWS_64(mask)                                                                       \
    EXPAND_ROWS_16(mask), EXPAND_ROWS_16(mask + 16), EXPAND_ROWS_16(mask + 32),                    \
        EXPAND_ROWS_16(mask + 48)
#define EXPAND_SHUFFLES                                                                            \
    {EXPAND_ROWS_64(0), EXPAND_ROWS_64(64), EXPAND_ROWS_64(128), EXPAND_ROWS_64(192)}

#endif
