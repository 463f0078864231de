/* Many images in one call, without the interpreter lock. */
#ifndef TRAINYARD_BATCH_H
#define TRAINYARD_BATCH_H

#include "simd/path.h"

/* Where images lie: image i has lengths[i] bytes at bytes[i]. */
typedef struct {
    int64_t count;
    const uint8_t *const *bytes;
    const int64_t *lengths;
} Images;

/* Seek tables of many images end to end; image i has entries [begins[i], ends[i]). */
typedef struct {
    const uint8_t *entries; /* NULL: none */
    const int64_t *begins, *ends;
} SeekTables;

typedef struct {
    const double *boxes;  /* [count][4] */
    const uint8_t *flips; /* [count] */
    bool beyond;
    Filter filter;
} Crops;

/* Width and height of each image; 1 x 1 where the status is not OK. */
void batch_sizes(const Images *images, int64_t *sizes, uint8_t *status);

/* Decode those whose status is OK, one after another in `target`, and set their status. */
void batch_decode(const Path *path, Scratch *scratch, const Images *images, const Crops *crops,
                  const SeekTables *seek, const Target *target, uint8_t *status);

#endif
