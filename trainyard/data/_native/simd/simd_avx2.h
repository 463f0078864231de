/* The vector primitives in AVX2. What each one means: simd_plain.h. */
#ifndef TRAINYARD_SIMD_AVX2_H
#define TRAINYARD_SIMD_AVX2_H

#include <immintrin.h>

#include "bytes.h"

typedef __m256i Lanes;  /* 16 of 16 bits */
typedef __m256i Octets; /* 32 of 8 bits */

/* Within each half of a register, lanes 0 to 3 lie in `low` and 4 to 7 in `high`. */
typedef struct {
    __m256i low, high;
} Wide;

static inline Lanes load(const int16_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
static inline void store(int16_t *to, Lanes lanes) { _mm256_storeu_si256((__m256i *)to, lanes); }

static inline __m256i load_halves(const void *low, const void *high) {
    __m256i halves = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)low));
    return _mm256_inserti128_si256(halves, _mm_loadu_si128((const __m128i *)high), 1);
}

static inline Lanes load_two(const int16_t *a, const int16_t *b) { return load_halves(a, b); }
static inline Lanes splat(int value) { return _mm256_set1_epi16((int16_t)value); }
static inline Lanes add(Lanes a, Lanes b) { return _mm256_add_epi16(a, b); }
static inline Lanes subtract(Lanes a, Lanes b) { return _mm256_sub_epi16(a, b); }
static inline Lanes add_saturated(Lanes a, Lanes b) { return _mm256_adds_epi16(a, b); }
static inline Lanes subtract_saturated(Lanes a, Lanes b) { return _mm256_subs_epi16(a, b); }
static inline Lanes multiply(Lanes a, Lanes b) { return _mm256_mullo_epi16(a, b); }
static inline Lanes multiply_rounded(Lanes a, Lanes b) { return _mm256_mulhrs_epi16(a, b); }
static inline Lanes shift_right(Lanes lanes, int bits) { return _mm256_srai_epi16(lanes, bits); }
static inline Lanes shift_right_unsigned(Lanes lanes, int bits) {
    return _mm256_srli_epi16(lanes, bits);
}
static inline Lanes add_pairs(Lanes a, Lanes b) { return _mm256_hadd_epi16(a, b); }

static inline void transpose_two(Lanes rows[8]) {
    __m256i pairs[8], quads[8];
    for (int i = 0; i < 4; i++) {
        pairs[2 * i] = _mm256_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm256_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        quads[4 * i] = _mm256_unpacklo_epi32(pairs[4 * i], pairs[4 * i + 2]);
        quads[4 * i + 1] = _mm256_unpackhi_epi32(pairs[4 * i], pairs[4 * i + 2]);
        quads[4 * i + 2] = _mm256_unpacklo_epi32(pairs[4 * i + 1], pairs[4 * i + 3]);
        quads[4 * i + 3] = _mm256_unpackhi_epi32(pairs[4 * i + 1], pairs[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        rows[2 * i] = _mm256_unpacklo_epi64(quads[i], quads[4 + i]);
        rows[2 * i + 1] = _mm256_unpackhi_epi64(quads[i], quads[4 + i]);
    }
}

static inline Wide rotate(Lanes x, Lanes y, int by_x, int by_y) {
    __m256i by = _mm256_set1_epi32((by_x & 0xffff) | (int)((unsigned)by_y << 16));
    return (Wide){_mm256_madd_epi16(_mm256_unpacklo_epi16(x, y), by),
                  _mm256_madd_epi16(_mm256_unpackhi_epi16(x, y), by)};
}

static inline Wide widen_13(Lanes lanes) {
    __m256i zero = _mm256_setzero_si256();
    return (Wide){_mm256_srai_epi32(_mm256_unpacklo_epi16(zero, lanes), 3),
                  _mm256_srai_epi32(_mm256_unpackhi_epi16(zero, lanes), 3)};
}

static inline Wide wide_splat(int value) {
    return (Wide){_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}

static inline Wide wide_add(Wide a, Wide b) {
    return (Wide){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

static inline Wide wide_subtract(Wide a, Wide b) {
    return (Wide){_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}

static inline Lanes narrow(Wide wide, int bits) {
    return _mm256_packs_epi32(_mm256_srai_epi32(wide.low, bits),
                              _mm256_srai_epi32(wide.high, bits));
}

static inline void store_rows(Lanes row, Lanes next, uint8_t *a, uint8_t *b, size_t stride) {
    __m256i bytes = _mm256_add_epi8(_mm256_packs_epi16(row, next), _mm256_set1_epi8(-128));
    __m128i of_a = _mm256_castsi256_si128(bytes), of_b = _mm256_extracti128_si256(bytes, 1);
    _mm_storel_epi64((__m128i *)a, of_a);
    _mm_storel_epi64((__m128i *)b, of_b);
    _mm_storeh_pd((double *)(a + stride), _mm_castsi128_pd(of_a));
    _mm_storeh_pd((double *)(b + stride), _mm_castsi128_pd(of_b));
}

static inline Octets gather(const uint8_t *a, const uint8_t *b, const uint8_t which[32]) {
    return _mm256_shuffle_epi8(load_halves(a, b), _mm256_loadu_si256((const __m256i *)which));
}

static inline Lanes weigh_pairs(Octets octets, const int8_t weights[32]) {
    return _mm256_maddubs_epi16(octets, _mm256_loadu_si256((const __m256i *)weights));
}

static inline Octets pack(Lanes a, Lanes b) { return _mm256_packus_epi16(a, b); }

static inline void store_octets(uint8_t *to, Octets octets) {
    _mm256_storeu_si256((__m256i *)to, octets);
}

/* Of 16 bytes, which go where in the n-th 16 of 48 interleaved bytes, if they are those of
 * `channel`; -1: none. */
static inline __m256i interleaving(int n, int channel) {
    int8_t which[16];
    for (int i = 0; i < 16; i++)
        which[i] = (int8_t)((16 * n + i) % 3 == channel ? (16 * n + i) / 3 : -1);
    return load_halves(which, which);
}

static inline __m256i interleave(int n, Octets red, Octets green, Octets blue) {
    __m256i reds = _mm256_shuffle_epi8(red, interleaving(n, 0));
    __m256i greens = _mm256_shuffle_epi8(green, interleaving(n, 1));
    __m256i blues = _mm256_shuffle_epi8(blue, interleaving(n, 2));
    return _mm256_or_si256(_mm256_or_si256(reds, greens), blues);
}

static inline void store_rgb(uint8_t *to, Octets red, Octets green, Octets blue) {
    __m256i first = interleave(0, red, green, blue); /* of both halves */
    __m256i second = interleave(1, red, green, blue);
    __m256i third = interleave(2, red, green, blue);
    store_octets(to, _mm256_permute2x128_si256(first, second, 0x20));
    store_octets(to + 32, _mm256_permute2x128_si256(third, first, 0x30));
    store_octets(to + 64, _mm256_permute2x128_si256(second, third, 0x31));
}

#endif
