/* What one thread needs to decode, kept from image to image. */
#ifndef TRAINYARD_SCRATCH_H
#define TRAINYARD_SCRATCH_H

#include "jpeg/huffman.h"
#include "resize/taps.h"

typedef struct {
    DecodeTables tables;
    Buffer file, seek; /* an image, and its seek table, as they lie in their files */
    Buffer entropy;    /* entropy-coded bytes without stuffing */
    Buffer restarts;   /* where in them intervals begin */
    Buffer blocks[3];  /* coefficients of a row of MCUs */
    Buffer planes[3];  /* samples of what the crop needs */
    Taps x[2], y[2];   /* of luma and of chroma */
    Buffer columns[2]; /* taps across, prepared for vectors */
    Buffer rows;       /* rows resized across */
} Scratch;

Scratch *scratch_new(void); /* NULL if there is no memory */
void scratch_free(Scratch *scratch);

/* Give back what an unusually large image took. */
void scratch_trim(Scratch *scratch);

#endif
