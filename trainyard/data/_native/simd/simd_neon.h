/* The vector primitives in NEON (AArch64). What each one means: simd_plain.h. */
#ifndef TRAINYARD_SIMD_NEON_H
#define TRAINYARD_SIMD_NEON_H

#include <arm_neon.h>

#include "bytes.h"

typedef int16x8x2_t Lanes;   /* 16 of 16 bits */
typedef uint8x16x2_t Octets; /* 32 of 8 bits */

typedef struct {
    int32x4_t v[4];
} Wide;

static inline Lanes load(const int16_t *from) {
    return (Lanes){{vld1q_s16(from), vld1q_s16(from + 8)}};
}

static inline void store(int16_t *to, Lanes lanes) {
    vst1q_s16(to, lanes.val[0]);
    vst1q_s16(to + 8, lanes.val[1]);
}

static inline Lanes load_two(const int16_t *a, const int16_t *b) {
    return (Lanes){{vld1q_s16(a), vld1q_s16(b)}};
}

static inline Lanes splat(int value) {
    return (Lanes){{vdupq_n_s16((int16_t)value), vdupq_n_s16((int16_t)value)}};
}

static inline Lanes add(Lanes a, Lanes b) {
    return (Lanes){{vaddq_s16(a.val[0], b.val[0]), vaddq_s16(a.val[1], b.val[1])}};
}

static inline Lanes subtract(Lanes a, Lanes b) {
    return (Lanes){{vsubq_s16(a.val[0], b.val[0]), vsubq_s16(a.val[1], b.val[1])}};
}

static inline Lanes add_saturated(Lanes a, Lanes b) {
    return (Lanes){{vqaddq_s16(a.val[0], b.val[0]), vqaddq_s16(a.val[1], b.val[1])}};
}

static inline Lanes subtract_saturated(Lanes a, Lanes b) {
    return (Lanes){{vqsubq_s16(a.val[0], b.val[0]), vqsubq_s16(a.val[1], b.val[1])}};
}

static inline Lanes multiply(Lanes a, Lanes b) {
    return (Lanes){{vmulq_s16(a.val[0], b.val[0]), vmulq_s16(a.val[1], b.val[1])}};
}

static inline Lanes multiply_rounded(Lanes a, Lanes b) {
    return (Lanes){{vqrdmulhq_s16(a.val[0], b.val[0]), vqrdmulhq_s16(a.val[1], b.val[1])}};
}

static inline Lanes shift_right(Lanes lanes, int bits) {
    int16x8_t by = vdupq_n_s16((int16_t)-bits);
    return (Lanes){{vshlq_s16(lanes.val[0], by), vshlq_s16(lanes.val[1], by)}};
}

static inline Lanes shift_right_unsigned(Lanes lanes, int bits) {
    int16x8_t by = vdupq_n_s16((int16_t)-bits);
    uint16x8_t a = vshlq_u16(vreinterpretq_u16_s16(lanes.val[0]), by);
    uint16x8_t b = vshlq_u16(vreinterpretq_u16_s16(lanes.val[1]), by);
    return (Lanes){{vreinterpretq_s16_u16(a), vreinterpretq_s16_u16(b)}};
}

static inline Lanes add_pairs(Lanes a, Lanes b) {
    return (Lanes){{vpaddq_s16(a.val[0], b.val[0]), vpaddq_s16(a.val[1], b.val[1])}};
}

/* Transpose one 8 x 8 matrix. */
static inline void transpose_one(int16x8_t rows[8]) {
    int32x4_t pairs[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = vreinterpretq_s32_s16(vtrn1q_s16(rows[i], rows[i + 1]));
        pairs[i + 1] = vreinterpretq_s32_s16(vtrn2q_s16(rows[i], rows[i + 1]));
    }
    int64x2_t quads[8];
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            quads[i + j] = vreinterpretq_s64_s32(vtrn1q_s32(pairs[i + j], pairs[i + j + 2]));
            quads[i + j + 2] = vreinterpretq_s64_s32(vtrn2q_s32(pairs[i + j], pairs[i + j + 2]));
        }
    for (int i = 0; i < 4; i++) {
        rows[i] = vreinterpretq_s16_s64(vtrn1q_s64(quads[i], quads[i + 4]));
        rows[i + 4] = vreinterpretq_s16_s64(vtrn2q_s64(quads[i], quads[i + 4]));
    }
}

static inline void transpose_two(Lanes rows[8]) {
    for (int half = 0; half < 2; half++) {
        int16x8_t one[8];
        for (int i = 0; i < 8; i++)
            one[i] = rows[i].val[half];
        transpose_one(one);
        for (int i = 0; i < 8; i++)
            rows[i].val[half] = one[i];
    }
}

static inline Wide rotate(Lanes x, Lanes y, int by_x, int by_y) {
    Wide wide;
    for (int half = 0; half < 2; half++) {
        int16x8_t a = x.val[half], b = y.val[half];
        int32x4_t low = vmull_n_s16(vget_low_s16(a), (int16_t)by_x);
        int32x4_t high = vmull_n_s16(vget_high_s16(a), (int16_t)by_x);
        wide.v[2 * half] = vmlal_n_s16(low, vget_low_s16(b), (int16_t)by_y);
        wide.v[2 * half + 1] = vmlal_n_s16(high, vget_high_s16(b), (int16_t)by_y);
    }
    return wide;
}

static inline Wide widen_13(Lanes lanes) {
    return (Wide){{vshll_n_s16(vget_low_s16(lanes.val[0]), 13),
                   vshll_n_s16(vget_high_s16(lanes.val[0]), 13),
                   vshll_n_s16(vget_low_s16(lanes.val[1]), 13),
                   vshll_n_s16(vget_high_s16(lanes.val[1]), 13)}};
}

static inline Wide wide_splat(int value) {
    int32x4_t four = vdupq_n_s32(value);
    return (Wide){{four, four, four, four}};
}

static inline Wide wide_add(Wide a, Wide b) {
    for (int i = 0; i < 4; i++)
        a.v[i] = vaddq_s32(a.v[i], b.v[i]);
    return a;
}

static inline Wide wide_subtract(Wide a, Wide b) {
    for (int i = 0; i < 4; i++)
        a.v[i] = vsubq_s32(a.v[i], b.v[i]);
    return a;
}

static inline Lanes narrow(Wide wide, int bits) {
    int32x4_t by = vdupq_n_s32(-bits);
    int16x4_t four[4];
    for (int i = 0; i < 4; i++)
        four[i] = vqmovn_s32(vshlq_s32(wide.v[i], by));
    return (Lanes){{vcombine_s16(four[0], four[1]), vcombine_s16(four[2], four[3])}};
}

/* 8 samples around zero as bytes around 128. */
static inline uint8x8_t to_samples(int16x8_t row) {
    return vadd_u8(vreinterpret_u8_s8(vqmovn_s16(row)), vdup_n_u8(128));
}

static inline void store_rows(Lanes row, Lanes next, uint8_t *a, uint8_t *b, size_t stride) {
    vst1_u8(a, to_samples(row.val[0]));
    vst1_u8(b, to_samples(row.val[1]));
    vst1_u8(a + stride, to_samples(next.val[0]));
    vst1_u8(b + stride, to_samples(next.val[1]));
}

static inline Octets gather(const uint8_t *a, const uint8_t *b, const uint8_t which[32]) {
    return (Octets){
        {vqtbl1q_u8(vld1q_u8(a), vld1q_u8(which)), vqtbl1q_u8(vld1q_u8(b), vld1q_u8(which + 16))}};
}

static inline Lanes weigh_pairs(Octets octets, const int8_t weights[32]) {
    Lanes lanes;
    for (int half = 0; half < 2; half++) {
        uint16x8_t pairs = vreinterpretq_u16_u8(octets.val[half]);
        int16x8_t by = vreinterpretq_s16_s8(vld1q_s8(weights + 16 * half));
        int16x8_t first = vreinterpretq_s16_u16(vandq_u16(pairs, vdupq_n_u16(255)));
        int16x8_t second = vreinterpretq_s16_u16(vshrq_n_u16(pairs, 8));
        int16x8_t by_first = vshrq_n_s16(vshlq_n_s16(by, 8), 8);
        lanes.val[half] = vmlaq_s16(vmulq_s16(first, by_first), second, vshrq_n_s16(by, 8));
    }
    return lanes;
}

static inline Octets pack(Lanes a, Lanes b) {
    return (Octets){{vcombine_u8(vqmovun_s16(a.val[0]), vqmovun_s16(b.val[0])),
                     vcombine_u8(vqmovun_s16(a.val[1]), vqmovun_s16(b.val[1]))}};
}

static inline void store_octets(uint8_t *to, Octets octets) {
    vst1q_u8(to, octets.val[0]);
    vst1q_u8(to + 16, octets.val[1]);
}

static inline void store_rgb(uint8_t *to, Octets red, Octets green, Octets blue) {
    vst3q_u8(to, (uint8x16x3_t){{red.val[0], green.val[0], blue.val[0]}});
    vst3q_u8(to + 48, (uint8x16x3_t){{red.val[1], green.val[1], blue.val[1]}});
}

#endif
