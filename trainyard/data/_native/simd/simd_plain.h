/* The vector primitives of simd_avx2.h and simd_neon.h in plain C: same names, same bits.
 *
 * It says what each primitive means. All additions wrap unless they are called saturated. */
#ifndef TRAINYARD_SIMD_PLAIN_H
#define TRAINYARD_SIMD_PLAIN_H

#include "bytes.h"

typedef struct {
    int16_t v[16];
} Lanes;

typedef struct {
    int32_t v[16];
} Wide;

typedef struct {
    uint8_t v[32];
} Octets;

static inline int16_t wrap16(int value) { return (int16_t)(uint16_t)value; }
static inline int32_t wrap32(int64_t value) { return (int32_t)(uint32_t)value; }
static inline int16_t saturate16(int value) { return (int16_t)clamp_int(value, -32768, 32767); }

static inline Lanes load(const int16_t *from) {
    Lanes lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

static inline void store(int16_t *to, Lanes lanes) { memcpy(to, &lanes, sizeof lanes); }

/* 8 of each. */
static inline Lanes load_two(const int16_t *a, const int16_t *b) {
    Lanes lanes;
    memcpy(lanes.v, a, 16);
    memcpy(lanes.v + 8, b, 16);
    return lanes;
}

static inline Lanes splat(int value) {
    Lanes lanes;
    for (int i = 0; i < 16; i++)
        lanes.v[i] = (int16_t)value;
    return lanes;
}

static inline Lanes add(Lanes a, Lanes b) {
    for (int i = 0; i < 16; i++)
        a.v[i] = wrap16(a.v[i] + b.v[i]);
    return a;
}

static inline Lanes subtract(Lanes a, Lanes b) {
    for (int i = 0; i < 16; i++)
        a.v[i] = wrap16(a.v[i] - b.v[i]);
    return a;
}

static inline Lanes add_saturated(Lanes a, Lanes b) {
    for (int i = 0; i < 16; i++)
        a.v[i] = saturate16(a.v[i] + b.v[i]);
    return a;
}

static inline Lanes subtract_saturated(Lanes a, Lanes b) {
    for (int i = 0; i < 16; i++)
        a.v[i] = saturate16(a.v[i] - b.v[i]);
    return a;
}

/* The lower half of the product. */
static inline Lanes multiply(Lanes a, Lanes b) {
    for (int i = 0; i < 16; i++)
        a.v[i] = wrap16(a.v[i] * b.v[i]);
    return a;
}

/* The product / 32768, rounded. Not for -32768 x -32768. */
static inline Lanes multiply_rounded(Lanes a, Lanes b) {
    for (int i = 0; i < 16; i++)
        a.v[i] = wrap16((a.v[i] * b.v[i] + 16384) >> 15);
    return a;
}

static inline Lanes shift_right(Lanes lanes, int bits) {
    for (int i = 0; i < 16; i++)
        lanes.v[i] = (int16_t)(lanes.v[i] >> bits);
    return lanes;
}

static inline Lanes shift_right_unsigned(Lanes lanes, int bits) {
    for (int i = 0; i < 16; i++)
        lanes.v[i] = (int16_t)((uint16_t)lanes.v[i] >> bits);
    return lanes;
}

/* The sums of pairs: 4 of a, 4 of b, 4 of a, 4 of b. */
static inline Lanes add_pairs(Lanes a, Lanes b) {
    Lanes sums;
    for (int i = 0; i < 16; i++) {
        const int16_t *pair = (i & 4 ? b : a).v + (i & 8) + 2 * (i & 3);
        sums.v[i] = wrap16(pair[0] + pair[1]);
    }
    return sums;
}

/* Transpose two 8 x 8 matrices: rows[i] has row i of both. */
static inline void transpose_two(Lanes rows[8]) {
    Lanes from[8];
    memcpy(from, rows, sizeof from);
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            rows[i].v[j] = from[j].v[i];
            rows[i].v[8 + j] = from[j].v[8 + i];
        }
}

/* x * by_x + y * by_y. */
static inline Wide rotate(Lanes x, Lanes y, int by_x, int by_y) {
    Wide wide;
    for (int i = 0; i < 16; i++)
        wide.v[i] = x.v[i] * by_x + y.v[i] * by_y;
    return wide;
}

/* Times 8192. */
static inline Wide widen_13(Lanes lanes) {
    Wide wide;
    for (int i = 0; i < 16; i++)
        wide.v[i] = lanes.v[i] * 8192;
    return wide;
}

static inline Wide wide_splat(int value) {
    Wide wide;
    for (int i = 0; i < 16; i++)
        wide.v[i] = value;
    return wide;
}

static inline Wide wide_add(Wide a, Wide b) {
    for (int i = 0; i < 16; i++)
        a.v[i] = wrap32((int64_t)a.v[i] + b.v[i]);
    return a;
}

static inline Wide wide_subtract(Wide a, Wide b) {
    for (int i = 0; i < 16; i++)
        a.v[i] = wrap32((int64_t)a.v[i] - b.v[i]);
    return a;
}

/* Shifted right, then saturated. */
static inline Lanes narrow(Wide wide, int bits) {
    Lanes lanes;
    for (int i = 0; i < 16; i++)
        lanes.v[i] = saturate16(wide.v[i] >> bits);
    return lanes;
}

/* Two rows of samples around zero of two blocks: 8 bytes each, around 128. */
static inline void store_rows(Lanes row, Lanes next, uint8_t *a, uint8_t *b, size_t stride) {
    for (int i = 0; i < 8; i++) {
        a[i] = (uint8_t)(clamp_int(row.v[i], -128, 127) + 128);
        b[i] = (uint8_t)(clamp_int(row.v[8 + i], -128, 127) + 128);
        a[stride + i] = (uint8_t)(clamp_int(next.v[i], -128, 127) + 128);
        b[stride + i] = (uint8_t)(clamp_int(next.v[8 + i], -128, 127) + 128);
    }
}

/* Any 16 of the 16 bytes at `a`, then any 16 of those at `b`. */
static inline Octets gather(const uint8_t *a, const uint8_t *b, const uint8_t which[32]) {
    Octets octets;
    for (int i = 0; i < 16; i++) {
        octets.v[i] = a[which[i]];
        octets.v[16 + i] = b[which[16 + i]];
    }
    return octets;
}

/* Of each pair of bytes a weighted sum, which must fit 16 bits. */
static inline Lanes weigh_pairs(Octets octets, const int8_t weights[32]) {
    Lanes lanes;
    for (int i = 0; i < 16; i++)
        lanes.v[i] =
            (int16_t)(octets.v[2 * i] * weights[2 * i] + octets.v[2 * i + 1] * weights[2 * i + 1]);
    return lanes;
}

/* Saturated to 8 bits: 8 of a, 8 of b, 8 of a, 8 of b. */
static inline Octets pack(Lanes a, Lanes b) {
    Octets octets;
    for (int i = 0; i < 32; i++)
        octets.v[i] = (uint8_t)clamp_int((i & 8 ? b : a).v[(i & 16) / 2 + (i & 7)], 0, 255);
    return octets;
}

static inline void store_octets(uint8_t *to, Octets octets) { memcpy(to, &octets, 32); }

/* 32 pixels. */
static inline void store_rgb(uint8_t *to, Octets red, Octets green, Octets blue) {
    for (int i = 0; i < 32; i++) {
        to[3 * i] = red.v[i];
        to[3 * i + 1] = green.v[i];
        to[3 * i + 2] = blue.v[i];
    }
}

#endif
