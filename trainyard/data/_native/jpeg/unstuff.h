/* [per path] The entropy-coded bytes of a JPEG without their stuffing, made as they are asked for.
 *
 * In the file a 0xFF is followed by a zero that is not data, or by a marker (ITU-T T.81, B.1.1.5).
 * Restart markers are taken out too; where their intervals begin is noted. */
#ifndef TRAINYARD_UNSTUFF_H
#define TRAINYARD_UNSTUFF_H

#include "scratch.h"

#ifndef UNSTUFF_PIECE       /* tests make it small */
#define UNSTUFF_PIECE 16384 /* bytes of the file at a time */
#endif

/* More than the bytes of an MCU of 6 blocks, of up to 27 + 63 x 26 bits each, and of what the
 * reader has read ahead. */
#define UNSTUFF_MARGIN 1536

typedef struct {
    const uint8_t *file, *file_end; /* what is still to come */
    uint8_t *data;
    size_t size;         /* bytes of data so far */
    const uint8_t *safe; /* a reader that stands before it may read a whole MCU */
    bool ended;          /* no more will come; zeros follow */
    size_t *starts;      /* where the intervals begin in data */
    int num_starts, max_starts;
    int first_interval; /* what starts[0] is of */
} Unstuffed;

/* Room for `size` bytes of a file, in at most `intervals` intervals. */
static Status unstuff_reserve(Unstuffed *unstuffed, Scratch *scratch, size_t size,
                              int64_t intervals) {
    int64_t most = min_int64(intervals, (int64_t)(size / 2)) + 1; /* a marker has two bytes */
    if (!buffer_reserve(&scratch->entropy, size + 2 * UNSTUFF_MARGIN) ||
        !buffer_reserve(&scratch->restarts, (size_t)most * sizeof(size_t)))
        return NO_MEMORY;
    *unstuffed = (Unstuffed){
        .data = scratch->entropy.data, .starts = scratch->restarts.data, .max_starts = (int)most};
    return OK;
}

/* Begin anew, at a byte of an interval. */
static void unstuff_begin(Unstuffed *unstuffed, const uint8_t *file, const uint8_t *file_end,
                          int interval) {
    unstuffed->file = file;
    unstuffed->file_end = file_end;
    unstuffed->size = 0;
    unstuffed->safe = unstuffed->data;
    unstuffed->ended = false;
    unstuffed->starts[0] = 0;
    unstuffed->num_starts = 1;
    unstuffed->first_interval = interval;
}

static void unstuff_end(Unstuffed *unstuffed) {
    unstuffed->ended = true;
    memset(unstuffed->data + unstuffed->size, 0, 2 * UNSTUFF_MARGIN);
    unstuffed->safe =
        unstuffed->data + unstuffed->size + 9; /* a reader is up to 8 ahead of what it has used */
}

/* Whether a marker is the next restart; if so the next interval begins here. */
static bool unstuff_restart(Unstuffed *unstuffed, uint8_t marker) {
    int interval = unstuffed->first_interval + unstuffed->num_starts;
    if (unstuffed->num_starts >= unstuffed->max_starts || marker != 0xD0 + ((interval - 1) & 7))
        return false;
    unstuffed->starts[unstuffed->num_starts++] = unstuffed->size;
    return true;
}

/* Another piece of the file, or the end. */
static void unstuff_more(Unstuffed *unstuffed) {
    const uint8_t *from = unstuffed->file;
    size_t left = (size_t)(unstuffed->file_end - from);
    const uint8_t *stop = from + (left < UNSTUFF_PIECE ? left : UNSTUFF_PIECE);
    while (from < stop) {
        const uint8_t *found = memchr(from, 0xFF, (size_t)(stop - from));
        size_t length = (size_t)((found ? found : stop) - from);
        memcpy(unstuffed->data + unstuffed->size, from, length);
        unstuffed->size += length;
        from += length;
        if (!found)
            continue;
        if (unstuffed->file_end - from < 2 ||
            (from[1] != 0 && !unstuff_restart(unstuffed, from[1]))) {
            unstuff_end(unstuffed);
            return;
        }
        if (from[1] == 0)
            unstuffed->data[unstuffed->size++] = 0xFF;
        from += 2;
    }
    unstuffed->file = from;
    if (from == unstuffed->file_end)
        unstuff_end(unstuffed);
    else if (unstuffed->size > UNSTUFF_MARGIN)
        unstuffed->safe = unstuffed->data + unstuffed->size - UNSTUFF_MARGIN;
}

/* Whether a whole MCU may be read from `next` on; feeds what is needed for it. */
static inline bool unstuff_reaches(Unstuffed *unstuffed, const uint8_t *next) {
    while (UNLIKELY(next >= unstuffed->safe)) {
        if (unstuffed->ended)
            return false;
        unstuff_more(unstuffed);
    }
    return true;
}

/* The byte of data at which an interval begins; false if it is not there. */
static bool unstuff_find(Unstuffed *unstuffed, int interval, const uint8_t **start) {
    int index = interval - unstuffed->first_interval;
    while (index >= unstuffed->num_starts && !unstuffed->ended)
        unstuff_more(unstuffed);
    if (index < 0 || index >= unstuffed->num_starts)
        return false;
    *start = unstuffed->data + unstuffed->starts[index];
    return true;
}

#endif
