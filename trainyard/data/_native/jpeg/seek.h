/* The seek table of an image: where in its entropy-coded bytes each tile of MCUs begins.
 *
 * With it, decoding starts where the crop starts, and not a byte of the image is rewritten. A tile
 * is a stretch of seek_tile() MCUs of one MCU row (the last one of a row may be shorter); the
 * entries stand row by row. */
#ifndef TRAINYARD_SEEK_H
#define TRAINYARD_SEEK_H

#include "jpeg/jpeg.h"

typedef struct {
    uint32_t offset; /* bytes from the start of the scan, stuffing counted */
    uint8_t bit;     /* 0 to 7, from the byte's highest */
    uint8_t check;   /* of the bytes there, so that another image's table is noticed */
    int16_t dc[3];   /* predictors */
} SeekEntry;         /* 12 bytes, little-endian in files */

static inline uint8_t seek_check(const uint8_t *at, const uint8_t *end) {
    unsigned sum = 0;
    for (int i = 0; i < 8 && at + i < end; i++)
        sum = 31 * sum + at[i];
    return (uint8_t)(sum ^ sum >> 8);
}

typedef struct {
    const uint8_t *entries; /* 12 bytes each, not aligned; NULL: no table */
    int num_entries;
} SeekTable;

/* A tile has about as many pixels across whatever the sampling. */
static inline int seek_tile(const JpegHeader *header) { return 128 / (8 * header->max_h); }

static inline int seek_num_entries(const JpegHeader *header) {
    return ceil_div(header->mcus_across, seek_tile(header)) * header->mcus_down;
}

#endif
