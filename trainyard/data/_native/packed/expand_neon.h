/* [per path] Packed blocks put together by table look-ups of 8 bytes; see expand.h. */
#ifndef TRAINYARD_EXPAND_NEON_H
#define TRAINYARD_EXPAND_NEON_H

#include <arm_neon.h>

#include "packed/expand.h"

static const uint8_t EXPAND_SHUFFLE[256][8] = EXPAND_SHUFFLES;

/* Row `row` of a block as 8 bytes. */
static inline uint8x8_t expanded_row(uint64_t mask, uint64_t before, int row,
                                     const uint8_t *values) {
    const uint8_t *at = values + (before >> 8 * row & 255);
    return vtbl1_u8(vld1_u8(at), vld1_u8(EXPAND_SHUFFLE[mask >> 8 * row & 255]));
}

static inline void expand_narrow(int16_t *block, uint64_t mask, const uint8_t *values) {
    uint64_t before = counts_before_rows(mask);
    for (int row = 0; row < 8; row++) {
        uint8x8_t bytes = expanded_row(mask, before, row, values);
        vst1q_s16(block + 8 * row, vmovl_s8(vreinterpret_s8_u8(bytes)));
    }
}

static inline void expand_wide(int16_t *block, uint64_t mask, const uint8_t *low,
                               const uint8_t *high) {
    uint64_t before = counts_before_rows(mask);
    for (int row = 0; row < 8; row++) {
        uint16x8_t lows = vmovl_u8(expanded_row(mask, before, row, low));
        uint16x8_t highs = vmovl_u8(expanded_row(mask, before, row, high));
        vst1q_s16(block + 8 * row, vreinterpretq_s16_u16(vorrq_u16(lows, vshlq_n_u16(highs, 8))));
    }
}

static inline uint64_t nonzero_mask(const int16_t *block) {
    static const uint16_t BITS[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    uint64_t mask = 0;
    for (int row = 0; row < 8; row++) {
        int16x8_t values = vld1q_s16(block + 8 * row);
        uint16x8_t set = vandq_u16(vtstq_s16(values, values), vld1q_u16(BITS));
        mask |= (uint64_t)vaddvq_u16(set) << 8 * row;
    }
    return mask;
}

#endif
