/* Many images in one call, without the interpreter lock. */
#ifndef TRAINYARD_BATCH_H
#define TRAINYARD_BATCH_H

#include "simd/path.h"

/* Where an image lies: in memory, or from a byte on in an open file. */
typedef struct {
    const uint8_t *bytes; /* NULL: in the file */
    int file;
    int64_t begin, length;
} Image;

typedef struct {
    int64_t count;
    const Image *all;
} Images;

/* The bytes of an image, read into `buffer` if they lie in a file. */
Status image_bytes(const Image *image, Buffer *buffer, const uint8_t **bytes);

typedef struct {
    double *boxes;        /* [count][4]: given, or made by the rule */
    const uint8_t *flips; /* [count] */
    bool beyond;
    Filter filter;
    BoxRule rule;
} Crops;

/* Width and height of each image; 1 x 1 where the status is not OK. */
void batch_sizes(const Images *images, Scratch *scratch, int64_t *sizes, uint8_t *status);

/* Decode those whose status is OK, one after another in `target`, and set their status. `seek`: the
 * seek table of each, or none at all. */
void batch_decode(const Path *path, Scratch *scratch, const Images *images, const Crops *crops,
                  const Images *seek, const Target *target, uint8_t *status);

#endif
