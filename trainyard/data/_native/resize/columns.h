/* [per path] Rows of samples, resized across.
 *
 * By gathering: out of 16 bytes, a shuffle picks neighbouring samples for 8 pixels (2 of each), or
 * for 4, 2 or 1 (4, 8, 16 of each), the wider the taps lie; they are multiplied by bytes, the upper
 * and then the lower halves of the weights, and added up in pairs. The sums fit 16 bits. Very long
 * taps are applied one by one. Gathered weights are rounded to as many bits as the sums have behind
 * the point; then nothing is rounded but the result. */
#ifndef TRAINYARD_COLUMNS_H
#define TRAINYARD_COLUMNS_H

#include "resize/taps.h"

enum { LONGEST_GATHERED = 33 };

typedef struct {
    const Taps *taps;
    int bits;    /* of a weight's lower half */
    int vectors; /* of gathered bytes for 16 pixels: 1, 2, 4 or 8; 0: taps are applied one by one */
    int steps;   /* times they are gathered */
    uint8_t *memory; /* groups of 16 pixels, or the weights of all pixels as int16 */
} Columns;

/* How a group of 16 pixels lies in memory: a ColumnGroup; for each vector, which bytes to pick; for
 * each step and vector, 32 upper and 32 lower halves of weights. */
typedef struct {
    int32_t from[16]; /* the sample where the window for each half of each vector begins */
} ColumnGroup;

static inline size_t group_size(int vectors, int steps) {
    return sizeof(ColumnGroup) + (size_t)vectors * (32 + 64 * (size_t)steps);
}

/* So many that the lower halves, none below 0, add up to less than 65536 / 255. That they do: all
 * weights add up to a multiple of 2 ** bits, and so do the lower halves, of which there are few. */
static inline int lower_bits(int count) {
    return count <= 5 ? 6 : count <= 9 ? 5 : count <= 17 ? 4 : count <= LONGEST_GATHERED ? 3 : 8;
}

/* Rows hold 32 pixels in the order that pack() undoes: 0 to 7, 16 to 23, 8 to 15, 24 to 31. */
static inline int place_of(int pixel) {
    return (pixel & ~24) | (pixel & 8) << 1 | (pixel & 16) >> 1;
}

/* The first and the last start of pixels [begin, begin + count), as far as there are such. */
static inline void find_window(const Taps *taps, int begin, int count, int *low, int *high) {
    *low = *high = begin < taps->length ? taps->start[begin] : taps->first;
    for (int i = begin + 1; i < begin + count && i < taps->length; i++) {
        *low = min_int(*low, taps->start[i]);
        *high = max_int(*high, taps->start[i]);
    }
}

/* Whether 16 bytes are enough for each window. */
static bool windows_fit(const Taps *taps, int vectors) {
    for (int i = 0; i < taps->length; i += 8 / vectors) {
        int low, high;
        find_window(taps, i, 8 / vectors, &low, &high);
        if (high - low > 16 - 2 * vectors)
            return false;
    }
    return true;
}

/* The weights of a pixel by fewer bits, in halves; what is rounded is their sum up to each, as in
 * taps.c. `together` stand side by side, the next ones `step` bytes behind. */
static inline void split_weights(uint8_t *to, const int16_t *weights, int count, int bits,
                                 int together, int step) {
    int shift = 8 - bits, sum = (1 << shift) / 2, before = 0;
    for (int k = 0; k < count; k++) {
        sum += weights[k];
        int weight = (sum >> shift) - before, upper = min_int(weight >> bits, 127);
        uint8_t *at = to + k / together * step + k % together;
        at[0] = (uint8_t)upper;
        at[32] = (uint8_t)(weight - upper * (1 << bits));
        before = sum >> shift;
    }
}

/* The group whose halves are the pixels from `first` and from `first` + 16. */
static inline __attribute__((always_inline)) void
make_group(const Columns *columns, uint8_t *memory, int first, int vectors) {
    const Taps *taps = columns->taps;
    int window = 8 / vectors, together = 2 * vectors;
    ColumnGroup *group = (ColumnGroup *)memory;
    memset(memory, 0, group_size(vectors, columns->steps));
    for (int part = 0; part < 2 * vectors; part++) {
        int vector = part / 2, half = part % 2, high;
        int begin = first + 16 * half + window * vector;
        find_window(taps, begin, window, &group->from[part], &high);
        uint8_t *which = memory + sizeof *group + 16 * part;
        uint8_t *weights = memory + sizeof *group + 32 * vectors + 64 * vector + 16 * half;
        for (int i = begin; i < begin + window && i < taps->length; i++) {
            split_weights(weights, taps->weights + (size_t)i * taps->stride, taps->count,
                          columns->bits, together, 64 * vectors);
            for (int k = 0; k < together; k++)
                *which++ = (uint8_t)(taps->start[i] - group->from[part] + k);
            weights += together;
        }
    }
}

/* Prepare taps; false if there is no memory. */
static bool columns_make(Columns *columns, const Taps *taps, Buffer *buffer) {
    *columns = (Columns){taps, lower_bits(taps->count), 0, 0, NULL};
    if (taps->count > LONGEST_GATHERED)
        return true;
    int vectors = 1;
    while (!windows_fit(taps, vectors)) /* 8 always do */
        vectors *= 2;
    columns->vectors = vectors;
    columns->steps = ceil_div(taps->count, 2 * vectors);
    size_t size = group_size(vectors, columns->steps);
    if (!buffer_reserve(buffer, size * (size_t)ceil_div(taps->length, 32) * 2))
        return false;
    uint8_t *memory = columns->memory = buffer->data;
    for (int i = 0; i < taps->length; i += 32)
        for (int first = i; first < i + 16; first += 8, memory += size)
            if (vectors == 1)
                make_group(columns, memory, first, 1);
            else
                make_group(columns, memory, first, vectors);
    return true;
}

static void resize_row_one_by_one(const Columns *columns, const uint8_t *row, int16_t *to) {
    const Taps *taps = columns->taps;
    for (int i = 0; i < taps->length; i++) {
        const int16_t *weights = taps->weights + (size_t)i * taps->stride;
        const uint8_t *samples = row + taps->start[i];
        int sum = 128;
        for (int k = 0; k < taps->count; k++)
            sum += samples[k] * weights[k];
        to[place_of(i)] = (int16_t)(sum >> 8);
    }
}

/* The sums of the pairs of `vectors` vectors, of the pairs of these, and so on, until there is one.
 */
static inline __attribute__((always_inline)) Lanes add_up(Lanes *sums, int vectors) {
    for (int n = vectors / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            sums[i] = add_pairs(sums[2 * i], sums[2 * i + 1]);
    return sums[0];
}

/* `num_rows` rows at once: as many as share what is loaded of the group. */
static inline __attribute__((always_inline)) void
gather_rows(const Columns *columns, const uint8_t *row, size_t row_stride, int16_t *to,
            size_t to_stride, int num_rows, int vectors, int steps) {
    const uint8_t *memory = columns->memory;
    const size_t size = group_size(vectors, steps);
    const int bits = columns->bits;
    const size_t width = round_up((size_t)columns->taps->length, 32);
    Lanes half = splat(1 << (bits - 1));
    for (size_t i = 0; i < width; i += 16, memory += size) {
        const ColumnGroup *group = (const ColumnGroup *)memory;
        const uint8_t *which = memory + sizeof *group;
        const int8_t *weights = (const int8_t *)which + 32 * vectors;
        Lanes upper[2][8], lower[2][8];
        for (int v = 0; v < vectors; v++) {
            Lanes high[2] = {splat(0), splat(0)}, low[2] = {splat(0), splat(0)};
            for (int step = 0; step < steps; step++) {
                const int8_t *by = weights + 64 * (vectors * step + v);
                for (int y = 0; y < num_rows; y++) {
                    const uint8_t *at = row + y * row_stride + 2 * vectors * step;
                    Octets samples = gather(at + group->from[2 * v], at + group->from[2 * v + 1],
                                            which + 32 * v);
                    high[y] = add(high[y], weigh_pairs(samples, by));
                    low[y] = add(low[y], weigh_pairs(samples, by + 32));
                }
            }
            for (int y = 0; y < num_rows; y++) {
                upper[y][v] = high[y];
                lower[y][v] = low[y];
            }
        }
        for (int y = 0; y < num_rows; y++) {
            Lanes rest = add(add_up(lower[y], vectors), half);
            store(to + y * to_stride + i,
                  add(add_up(upper[y], vectors), shift_right_unsigned(rest, bits)));
        }
    }
}

static inline __attribute__((always_inline)) void
resize_rows_by(const Columns *columns, const uint8_t *row, size_t row_stride, int16_t *to,
               size_t to_stride, int num_rows, int vectors, int steps) {
    int y = 0;
    for (; y + 2 <= num_rows; y += 2)
        gather_rows(columns, row + y * row_stride, row_stride, to + y * to_stride, to_stride, 2,
                    vectors, steps);
    if (y < num_rows)
        gather_rows(columns, row + y * row_stride, row_stride, to + y * to_stride, to_stride, 1,
                    vectors, steps);
}

/* `row` points to where the component's sample 0 would be; `to` has room for whole 32s. */
static void resize_rows(const Columns *columns, const uint8_t *row, size_t row_stride, int16_t *to,
                        size_t to_stride, int num_rows) {
    int steps = columns->steps;
    if (columns->vectors == 0)
        for (int y = 0; y < num_rows; y++)
            resize_row_one_by_one(columns, row + y * row_stride, to + y * to_stride);
    else if (columns->vectors == 1 && steps == 1)
        resize_rows_by(columns, row, row_stride, to, to_stride, num_rows, 1, 1);
    else if (columns->vectors == 1 && steps == 2)
        resize_rows_by(columns, row, row_stride, to, to_stride, num_rows, 1, 2);
    else if (columns->vectors == 1)
        resize_rows_by(columns, row, row_stride, to, to_stride, num_rows, 1, steps);
    else if (columns->vectors == 2)
        resize_rows_by(columns, row, row_stride, to, to_stride, num_rows, 2, steps);
    else if (columns->vectors == 4)
        resize_rows_by(columns, row, row_stride, to, to_stride, num_rows, 4, steps);
    else
        resize_rows_by(columns, row, row_stride, to, to_stride, num_rows, 8, steps);
}

#endif
