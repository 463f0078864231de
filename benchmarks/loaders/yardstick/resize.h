/* The yardstick's resize: antialiased, bilinear, of interleaved RGB; AVX2, 16 rows at a time.
 *
 * Weights are Pillow's (ImagingResample) in 15 bits, pixels between the two passes have 7 bits
 * behind the point. Vertical first; then 16 rows are transposed, so that the horizontal pass is
 * 16 rows wide whatever pixels an output needs. */
#ifndef YARDSTICK_RESIZE_H
#define YARDSTICK_RESIZE_H

#include <immintrin.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { STRIP = 16 };

typedef struct {
    int count;        /* taps of each output, padded with zeros */
    int *start;       /* the first pixel of each */
    int16_t *weights; /* `count` of each */
    double *exact;    /* those of one */
    size_t start_bytes, weight_bytes, exact_bytes;
} Taps;

typedef struct {
    Taps across, down;
    int16_t *strip, *columns; /* 16 rows, and the same transposed */
    size_t strip_bytes, column_bytes;
} Resizer;

/* Memory of at least so many bytes; what was in it is lost. */
static inline void *grown(void *memory, size_t *bytes, size_t wanted) {
    if (wanted <= *bytes)
        return memory;
    free(memory);
    *bytes = (wanted + 63) / 64 * 64;
    return aligned_alloc(64, *bytes);
}

static inline double triangle(double x) { return fabs(x) < 1 ? 1 - fabs(x) : 0; }

/* Leave out the last taps where no output uses them. */
static inline void drop_empty(Taps *taps, int length) {
    int most = 1;
    for (int i = 0; i < length * taps->count; i++)
        if (taps->weights[i] && i % taps->count >= most)
            most = i % taps->count + 1;
    for (int i = 0; i < length; i++)
        memmove(taps->weights + i * most, taps->weights + i * taps->count,
                sizeof(int16_t) * (size_t)most);
    taps->count = most;
}

/* Weights of `size` pixels that become `length`; flipped, the last output comes first. */
static inline void make_taps(Taps *taps, int size, int length, bool flip) {
    double scale = (double)size / length, support = fmax(scale, 1), narrow = 1 / support;
    int count = (int)ceil(support) * 2 + 1;
    taps->count = count;
    taps->start = grown(taps->start, &taps->start_bytes, sizeof(int) * (size_t)length);
    size_t bytes = sizeof(int16_t) * (size_t)(length * count);
    taps->weights = grown(taps->weights, &taps->weight_bytes, bytes);
    taps->exact = grown(taps->exact, &taps->exact_bytes, sizeof(double) * (size_t)count);
    memset(taps->weights, 0, bytes);
    for (int i = 0; i < length; i++) {
        double centre = (i + 0.5) * scale, sum = 0;
        int first = (int)fmax(centre - support + 0.5, 0), total = 0, largest = 0;
        int used = (int)fmin(centre + support + 0.5, size) - first;
        for (int k = 0; k < used; k++)
            sum += taps->exact[k] = triangle((k + first - centre + 0.5) * narrow);
        int at = flip ? length - 1 - i : i;
        int16_t *weights = taps->weights + at * count;
        for (int k = 0; k < used; k++) {
            weights[k] = (int16_t)(taps->exact[k] * (32767 / sum) + 0.5);
            total += weights[k];
            if (weights[k] > weights[largest])
                largest = k;
        }
        weights[largest] = (int16_t)(weights[largest] + 32767 - total);
        taps->start[at] = first;
    }
    drop_empty(taps, length);
}

/* One row out of `count`, each `stride` bytes after the other. */
static inline void resize_down(const uint8_t *row, size_t stride, int bytes, const int16_t *weights,
                               int count, int16_t *out) {
    for (int x = 0; x < bytes; x += 16) {
        const uint8_t *at = row + x;
        __m256i sum = _mm256_setzero_si256();
        for (int i = 0; i < count; i++, at += stride) {
            __m256i pixels = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at));
            __m256i weight = _mm256_set1_epi16(weights[i]);
            pixels = _mm256_mulhrs_epi16(_mm256_slli_epi16(pixels, 7), weight);
            sum = _mm256_add_epi16(sum, pixels);
        }
        _mm256_store_si256((__m256i *)(out + x), sum);
    }
}

static inline void transpose(__m256i rows[16]) {
    __m256i a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm256_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi16(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        b[4 * i] = _mm256_unpacklo_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm256_unpackhi_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm256_unpacklo_epi32(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm256_unpackhi_epi32(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[4 + i]);
        a[4 + i] = _mm256_unpackhi_epi64(b[i], b[4 + i]);
        a[8 + i] = _mm256_unpacklo_epi64(b[8 + i], b[12 + i]);
        a[12 + i] = _mm256_unpackhi_epi64(b[8 + i], b[12 + i]);
    }
    for (int i = 0; i < 4; i++) {
        rows[2 * i] = _mm256_permute2x128_si256(a[i], a[8 + i], 0x20);
        rows[2 * i + 1] = _mm256_permute2x128_si256(a[4 + i], a[12 + i], 0x20);
        rows[8 + 2 * i] = _mm256_permute2x128_si256(a[i], a[8 + i], 0x31);
        rows[9 + 2 * i] = _mm256_permute2x128_si256(a[4 + i], a[12 + i], 0x31);
    }
}

static inline void transpose_strip(const int16_t *strip, size_t line, int16_t *columns) {
    for (size_t x = 0; x < line; x += STRIP) {
        __m256i rows[STRIP];
        for (int i = 0; i < STRIP; i++)
            rows[i] = _mm256_load_si256((const __m256i *)(strip + (size_t)i * line + x));
        transpose(rows);
        for (int i = 0; i < STRIP; i++)
            _mm256_store_si256((__m256i *)(columns + (x + (size_t)i) * STRIP), rows[i]);
    }
}

/* One value, of 16 rows, out of `count` columns. */
static inline __m256i resize_across(const int16_t *column, const int16_t *weights, int count) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < count; i++, column += STRIP * 3) {
        __m256i pixels = _mm256_load_si256((const __m256i *)column);
        sum = _mm256_add_epi16(sum, _mm256_mulhrs_epi16(pixels, _mm256_set1_epi16(weights[i])));
    }
    return _mm256_srai_epi16(_mm256_add_epi16(sum, _mm256_set1_epi16(64)), 7);
}

/* `rows` rows of `length` x 3 bytes. */
static inline void finish_strip(const Taps *taps, const int16_t *columns, int rows, int length,
                                uint8_t *out) {
    int line = length * 3;
    for (int at = 0; at < line; at += STRIP) {
        int some = line - at < STRIP ? line - at : STRIP;
        __m256i values[STRIP];
        for (int i = 0; i < some; i++) {
            int pixel = (at + i) / 3, channel = (at + i) % 3;
            const int16_t *column = columns + (taps->start[pixel] * 3 + channel) * STRIP;
            values[i] = resize_across(column, taps->weights + pixel * taps->count, taps->count);
        }
        for (int i = some; i < STRIP; i++)
            values[i] = _mm256_setzero_si256();
        transpose(values);
        for (int i = 0; i < rows; i++) {
            __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(values[i]),
                                              _mm256_extracti128_si256(values[i], 1));
            uint8_t bytes[STRIP];
            if (some == STRIP) {
                _mm_storeu_si128((__m128i *)(out + (size_t)i * line + at), packed);
                continue;
            }
            _mm_storeu_si128((__m128i *)bytes, packed);
            memcpy(out + (size_t)i * line + at, bytes, (size_t)some);
        }
    }
}

/* `pixels`: `height` rows of `width` RGB pixels; 16 bytes after each, and as many rows after the
 * last as an output has taps, may be read. `out` has `side` x `side` RGB pixels. */
static inline void resize(Resizer *resizer, const uint8_t *pixels, size_t stride, int width,
                          int height, int side, bool flip, uint8_t *out) {
    make_taps(&resizer->across, width, side, flip);
    make_taps(&resizer->down, height, side, false);
    size_t line = ((size_t)width * 3 + STRIP - 1) / STRIP * STRIP;
    size_t room = (line + (size_t)resizer->across.count * 3 + STRIP) * STRIP * sizeof(int16_t);
    resizer->strip = grown(resizer->strip, &resizer->strip_bytes, room);
    resizer->columns = grown(resizer->columns, &resizer->column_bytes, room);
    const Taps *down = &resizer->down;
    for (int top = 0; top < side; top += STRIP) {
        int rows = side - top < STRIP ? side - top : STRIP;
        for (int i = 0; i < rows; i++) {
            int y = top + i;
            resize_down(pixels + stride * (size_t)down->start[y], stride, width * 3,
                        down->weights + y * down->count, down->count,
                        resizer->strip + (size_t)i * line);
        }
        transpose_strip(resizer->strip, line, resizer->columns);
        finish_strip(&resizer->across, resizer->columns, rows, side,
                     out + (size_t)top * (size_t)side * 3);
    }
}

#endif
