/* [per path] Planes to pixels: across, then down, then colours, each only for what the target
 * needs.
 *
 * Chroma goes straight from its own size to the target's; colours are converted there. */
#ifndef TRAINYARD_RESIZE_H
#define TRAINYARD_RESIZE_H

#include "resize/colours.h"
#include "resize/columns.h"
#include "scratch.h"

/* Rows of a component, resized across: those that the next rows of the target need, and some
 * ahead. */
typedef struct {
    const Plane *plane;
    const Columns *columns;
    int16_t *rows;
    size_t stride;
    int first, last; /* rows of the component that are there */
    int room;        /* rows */
} Window;

enum { ROWS_AHEAD = 16, MOST_IN_16_BITS = 32 };

/* Rows [first, last) of the component, and some ahead up to `end`. */
static const int16_t *window_rows(Window *window, int first, int last, int end) {
    if (last > window->last) {
        int kept = max_int(window->last - first, 0);
        size_t stride = window->stride;
        const int16_t *from = window->rows + (size_t)(window->last - window->first - kept) * stride;
        memmove(window->rows, from, (size_t)kept * stride * sizeof(int16_t));
        window->first = first;
        window->last = min_int(first + window->room, end);
        const Plane *plane = window->plane;
        const uint8_t *row = plane->samples + (size_t)(first + kept - plane->top) * plane->stride;
        resize_rows(window->columns, row - plane->left, plane->stride,
                    window->rows + (size_t)kept * stride, stride, window->last - first - kept);
    }
    return window->rows + (size_t)(first - window->first) * window->stride;
}

/* Weighted sums of `count` rows that follow each other. */
static inline __attribute__((always_inline)) void
blend_rows(const int16_t *rows, size_t stride, const int16_t *weights, int count, int16_t *to) {
    Lanes by[6];
    for (int k = 0; k < count; k++)
        by[k] = splat(weights[k]);
    for (size_t x = 0; x < stride; x += 16) {
        Lanes sum = multiply_rounded(load(rows + x), by[0]);
        for (int k = 1; k < count; k++)
            sum = add(sum, multiply_rounded(load(rows + k * stride + x), by[k]));
        store(to + x, sum);
    }
}

static void blend_many_rows(const int16_t *rows, size_t stride, const int16_t *weights, int count,
                            int16_t *to) {
    for (size_t x = 0; x < stride; x += 16) {
        Lanes sum = splat(0);
        for (int k = 0; k < count; k++)
            sum = add(sum, multiply_rounded(load(rows + k * stride + x), splat(weights[k])));
        store(to + x, sum);
    }
}

/* Where weights are so small that rounding each product would add up. */
static void blend_in_32_bits(const int16_t *rows, size_t stride, const int16_t *weights, int count,
                             int16_t *to) {
    for (size_t x = 0; x < stride; x += 16) {
        Wide sum = wide_splat(1 << 14);
        for (int k = 0; k < count; k += 2) {
            int second = min_int(k + 1, count - 1); /* of an odd last one, none */
            sum =
                wide_add(sum, rotate(load(rows + k * stride + x), load(rows + second * stride + x),
                                     weights[k], second > k ? weights[second] : 0));
        }
        store(to + x, narrow(sum, 15));
    }
}

static void blend(const int16_t *rows, size_t stride, const int16_t *weights, int count,
                  int16_t *to) {
    switch (count) {
    case 1:
        blend_rows(rows, stride, weights, 1, to);
        return;
    case 2:
        blend_rows(rows, stride, weights, 2, to);
        return;
    case 3:
        blend_rows(rows, stride, weights, 3, to);
        return;
    case 4:
        blend_rows(rows, stride, weights, 4, to);
        return;
    case 5:
        blend_rows(rows, stride, weights, 5, to);
        return;
    case 6:
        blend_rows(rows, stride, weights, 6, to);
        return;
    default:
        if (count <= MOST_IN_16_BITS)
            blend_many_rows(rows, stride, weights, count, to);
        else
            blend_in_32_bits(rows, stride, weights, count, to);
    }
}

/* Windows, and behind them a row for each of three components. */
static Status make_windows(Window windows[3], int16_t *blended[3], Scratch *scratch,
                           const Plane *planes, int num_planes, const Columns columns[2],
                           const Taps *const y[2], int width) {
    size_t stride = round_up((size_t)width, 32), rows = 3;
    for (int c = 0; c < num_planes; c++)
        rows += (size_t)y[c > 0]->count + ROWS_AHEAD;
    if (!buffer_reserve(&scratch->rows, rows * stride * sizeof(int16_t)))
        return NO_MEMORY;
    int16_t *memory = scratch->rows.data;
    memset(memory, 0, rows * stride * sizeof(int16_t)); /* what no row writes is read, too */
    for (int c = 0; c < num_planes; c++) {
        int room = y[c > 0]->count + ROWS_AHEAD;
        windows[c] = (Window){&planes[c], &columns[c > 0], memory, stride, 0, 0, room};
        memory += (size_t)room * stride;
    }
    for (int c = 0; c < 3; c++)
        blended[c] = memory + (size_t)c * stride;
    return OK;
}

static Status make_columns(Columns columns[2], Scratch *scratch, const Taps *const x[2]) {
    bool made = columns_make(&columns[0], x[0], &scratch->columns[0]);
    columns[1] = columns[0];
    if (x[1] != x[0])
        made = made && columns_make(&columns[1], x[1], &scratch->columns[1]);
    return made ? OK : NO_MEMORY;
}

/* Resize planes to a target. Taps 0 are of luma or of all planes, and 1 of chroma. Planes have at
 * least the samples [first, last) of the taps; GREY has one plane, and gives R = G = B, or luma for
 * a target of one channel. */
static Status resize(Scratch *scratch, const Plane *planes, Colours colours, const Taps *const x[2],
                     const Taps *const y[2], Filter filter, const Target *target) {
    Columns columns[2];
    Window windows[3];
    int16_t *blended[3];
    int num_planes = colours == GREY ? 1 : 3;
    Status status = make_columns(columns, scratch, x);
    if (status == OK)
        status =
            make_windows(windows, blended, scratch, planes, num_planes, columns, y, target->width);
    for (int row = 0; row < target->height && status == OK; row++) {
        for (int c = 0; c < num_planes; c++) {
            const Taps *taps = y[c > 0];
            int first = taps->start[row], count = taps->count;
            const int16_t *rows = window_rows(&windows[c], first, first + count, taps->last);
            blend(rows, windows[c].stride, taps->weights + (size_t)row * taps->stride, count,
                  blended[c]);
        }
        put_pixels((const int16_t *const *)blended, colours, filter, target, row);
    }
    return status;
}

#endif
