/* [per path] Packed blocks put together by shuffles of 8 bytes; see expand.h. */
#ifndef TRAINYARD_EXPAND_AVX2_H
#define TRAINYARD_EXPAND_AVX2_H

#include <immintrin.h>

#include "packed/expand.h"

static const uint8_t EXPAND_SHUFFLE[256][8] = EXPAND_SHUFFLES;

/* Row `row` of a block as 8 bytes. */
static inline __m128i expanded_row(uint64_t mask, uint64_t before, int row, const uint8_t *values) {
    const uint8_t *shuffle = EXPAND_SHUFFLE[mask >> 8 * row & 255];
    const uint8_t *at = values + (before >> 8 * row & 255);
    return _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)at),
                            _mm_loadl_epi64((const __m128i *)shuffle));
}

static inline void expand_narrow(int16_t *block, uint64_t mask, const uint8_t *values) {
    uint64_t before = counts_before_rows(mask);
    for (int row = 0; row < 8; row++) {
        __m128i bytes = expanded_row(mask, before, row, values);
        _mm_store_si128((__m128i *)(block + 8 * row), _mm_cvtepi8_epi16(bytes));
    }
}

static inline void expand_wide(int16_t *block, uint64_t mask, const uint8_t *low,
                               const uint8_t *high) {
    uint64_t before = counts_before_rows(mask);
    for (int row = 0; row < 8; row++) {
        __m128i lows = expanded_row(mask, before, row, low);
        __m128i highs = expanded_row(mask, before, row, high);
        _mm_store_si128((__m128i *)(block + 8 * row), _mm_unpacklo_epi8(lows, highs));
    }
}

static inline uint64_t nonzero_mask(const int16_t *block) {
    uint64_t zeros = 0;
    for (int half = 0; half < 2; half++) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(block + 32 * half));
        __m256i b = _mm256_loadu_si256((const __m256i *)(block + 32 * half + 16));
        __m256i bytes = _mm256_packs_epi16(a, b); /* saturates: none but zero becomes zero */
        bytes = _mm256_permute4x64_epi64(bytes, 0xd8);
        __m256i are_zero = _mm256_cmpeq_epi8(bytes, _mm256_setzero_si256());
        zeros |= (uint64_t)(uint32_t)_mm256_movemask_epi8(are_zero) << 32 * half;
    }
    return ~zeros;
}

#endif
