/* [per path] What of an image a crop looks at: taps, blocks, planes. */
#ifndef TRAINYARD_TAKING_H
#define TRAINYARD_TAKING_H

#include <math.h>

#include "jpeg/idct.h"
#include "simd/path.h"

/* Pillow's own limit: larger images are taken for decompression bombs. */
#define LARGEST_IMAGE 178956970

/* Make the box of an image of this size, if it is not given; OK if it lies inside. */
static Status settle_box(Crop *crop, int width, int height) {
    int64_t size[2] = {width, height};
    if (crop->rule->kind != GIVEN && size[0] * size[1] > LARGEST_IMAGE)
        return NOT_OURS;
    make_box(crop->rule, crop->number, size, crop->box);
    const double *box = crop->box; /* written so that NaN is outside */
    bool is_inside = box[0] >= 0 && box[1] >= 0 && box[2] <= width && box[3] <= height &&
                     box[2] > box[0] && box[3] > box[1];
    return is_inside ? OK : BAD_BOX;
}

/* What of an image a crop looks at, and how it is resized. */
typedef struct {
    const Taps *x[2], *y[2]; /* of luma, and of chroma */
} Taking;

/* Components that a target needs: of luma alone, the first. */
static int components_needed(const JpegHeader *header, const Target *target) {
    return target->channels == 1 ? 1 : header->num_components;
}

static Axis make_axis(double from, double to, int size, int length, bool flip, bool beyond) {
    int low = beyond ? 0 : (int)floor(from), high = beyond ? size : (int)ceil(to);
    return (Axis){from, to, clamp_int(low, 0, size), clamp_int(high, 0, size), size, length, flip};
}

/* The taps of both axes; chroma has its own where it is stored at half resolution. */
static Status make_taking(Taking *taking, Scratch *scratch, const JpegHeader *header,
                          const Crop *crop, const Target *target) {
    const double *box = crop->box;
    Axis across =
        make_axis(box[0], box[2], header->width, target->width, crop->flip, crop->beyond);
    Axis down = make_axis(box[1], box[3], header->height, target->height, false, crop->beyond);
    Status status = taps_make(&scratch->x[0], &across, crop->filter);
    if (status == OK)
        status = taps_make(&scratch->y[0], &down, crop->filter);
    *taking = (Taking){{&scratch->x[0], &scratch->x[0]}, {&scratch->y[0], &scratch->y[0]}};
    const JpegComponent *chroma = &header->components[header->num_components - 1];
    /* As libjpeg: narrow chroma is repeated, in both directions; but that of 4:4:0 never is. */
    bool smooth = header->max_h == chroma->h || chroma->width > 2;
    if (status == OK && header->max_h > chroma->h) {
        status = taps_make_upsampled(&scratch->x[1], &across, crop->filter, chroma->width, smooth);
        taking->x[1] = &scratch->x[1];
    }
    if (status == OK && header->max_v > chroma->v) {
        status = taps_make_upsampled(&scratch->y[1], &down, crop->filter, chroma->height, smooth);
        taking->y[1] = &scratch->y[1];
    }
    return status;
}

/* Blocks [left, right) x [top, bottom) of a component. */
typedef struct {
    int left, top, right, bottom;
} Blocks;

static Blocks blocks_needed(const Taking *taking, int component) {
    const Taps *x = taking->x[component > 0], *y = taking->y[component > 0];
    return (Blocks){x->first / 8, y->first / 8, ceil_div(x->last, 8), ceil_div(y->last, 8)};
}

/* MCUs [first, last) x [top, bottom) that hold all blocks needed of the first `used` components. */
static Blocks mcus_needed(const JpegHeader *header, int used, const Taking *taking) {
    Blocks mcus = {header->mcus_across, header->mcus_down, 0, 0};
    for (int c = 0; c < used; c++) {
        const JpegComponent *component = &header->components[c];
        Blocks blocks = blocks_needed(taking, c);
        mcus.left = min_int(mcus.left, blocks.left / component->h);
        mcus.top = min_int(mcus.top, blocks.top / component->v);
        mcus.right = max_int(mcus.right, ceil_div(blocks.right, component->h));
        mcus.bottom = max_int(mcus.bottom, ceil_div(blocks.bottom, component->v));
    }
    return mcus;
}

/* Room for the samples of some blocks. */
static Status plane_reserve(Plane *plane, Buffer *buffer, Blocks blocks) {
    int columns = (blocks.right - blocks.left) * 8, rows = (blocks.bottom - blocks.top) * 8;
    size_t stride = round_up((size_t)columns + PLANE_MARGIN, 64);
    if (!buffer_reserve(buffer, stride * (size_t)rows))
        return NO_MEMORY;
    *plane = (Plane){buffer->data, stride, blocks.left * 8, blocks.top * 8};
    return OK;
}

#endif
