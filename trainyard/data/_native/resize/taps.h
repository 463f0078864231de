/* Antialiased filters as fixed-point taps: which samples make each output pixel, and by what
 * weight.
 *
 * They are Pillow's (ImagingResample): a triangle or a cubic (a = -0.5) as wide as the scale asks
 * for, over samples whose centres lie at halves. */
#ifndef TRAINYARD_TAPS_H
#define TRAINYARD_TAPS_H

#include "bytes.h"

typedef enum { BILINEAR = 0, BICUBIC = 1 } Filter;

/* Bits behind the point. Cubic taps overshoot, so that samples keep two bits less. */
static inline int weight_bits(Filter filter) { return filter == BICUBIC ? 14 : 15; }
static inline int sample_bits(Filter filter) { return filter == BICUBIC ? 5 : 7; }

/* One axis of a resize: [from, to) of an image of `size` pixels becomes `length` pixels. */
typedef struct {
    double from, to;
    int low, high; /* pixels [low, high) may be looked at */
    int size;
    int length;
    bool flip; /* the last output first */
} Axis;

typedef struct {
    int length;       /* outputs */
    int count;        /* taps of each output; shorter filters end in zeros */
    int first, last;  /* samples [first, last) are all that is needed */
    int *start;       /* [length]: the first sample; start + count <= last */
    int stride;       /* from one output's weights to the next */
    int16_t *weights; /* [length * stride], of weight_bits; an output's add up to about one */
    Buffer memory, exact;
} Taps;

/* Taps over pixels: luma, grey, or raw pixels. */
Status taps_make(Taps *taps, const Axis *axis, Filter filter);

/* Taps over chroma at half resolution: those over pixels, times libjpeg's triangle upsampling
 * (h2v1_fancy_upsample: 3/4 of the nearer sample and 1/4 of the next, none beyond the border), so
 * that chroma is never upsampled and yet comes out as if it had been. `samples` there are. Where
 * libjpeg repeats samples instead (see jdsample.c), `smooth` is false. */
Status taps_make_upsampled(Taps *taps, const Axis *axis, Filter filter, int samples, bool smooth);

#endif
