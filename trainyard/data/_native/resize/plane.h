/* A rectangle of samples of one component. */
#ifndef TRAINYARD_PLANE_H
#define TRAINYARD_PLANE_H

#include "bytes.h"

#define PLANE_MARGIN 64 /* bytes that may be read, not used, after the end of each row */

typedef struct {
    const uint8_t *samples;
    size_t stride; /* bytes from row to row */
    int left, top; /* where in the component it lies */
} Plane;

typedef enum { GREY, YCBCR, RGB } Colours;

/* Where an image goes: `height` x `width` x `channels` bytes. */
typedef struct {
    uint8_t *pixels;
    int width, height;
    int channels; /* 3: RGB; 1: luma */
} Target;

#endif
