/* Crop boxes, of an image's size: see RandomCropParameters and CentralCrop in crops.py. */
#ifndef TRAINYARD_BOXES_H
#define TRAINYARD_BOXES_H

#include <stdint.h>

enum { TRIES = 10, DRAWN = 2 + 2 * TRIES };

/* How the boxes (left, top, right, bottom) of many images are made of their sizes. */
typedef struct {
    enum { GIVEN, RANDOM, CENTRAL } kind; /* GIVEN: they are there */

    /* RANDOM: drawn[i] has where the box of image i lies, across and down, in [0, 1), then of each
     * try the share of the area, then of each try the width over the height, from `ratio`. */
    const double (*drawn)[DRAWN];
    double ratio[2];

    /* CENTRAL: width and height of the box, and what the image is resized to cover before. */
    int64_t size[2], covered[2];
} BoxRule;

/* The box of image `i`, which has such a size; left as it is if it is given. */
void make_box(const BoxRule *rule, int64_t i, const int64_t size[2], double box[4]);

#endif
