/* [per path] A stored image and a box in, pixels out: header, taps, planes, resize. */
#ifndef TRAINYARD_CROP_H
#define TRAINYARD_CROP_H

#include "packed/packed_read.h"
#include "resize/resize.h"
#include "jpeg/scan.h"
#include "resize/taking.h"

/* A row of blocks of a component: coefficients to samples. */
static void put_row(const int16_t *blocks, int count, const int16_t *quant, uint8_t *to,
                    size_t stride) {
    for (int i = 0; i < count; i += 2) {
        int second = min_int(i + 1, count - 1); /* an odd last one, twice */
        idct_pair(blocks + (size_t)i * BLOCK_STRIDE, blocks + (size_t)second * BLOCK_STRIDE, quant,
                  to + 8 * i, to + 8 * second, stride);
    }
}

/* The first `used` components as samples. The others are read, as they lie in between. */
static Status jpeg_planes(Plane planes[3], int used, Scratch *scratch, const JpegHeader *header,
                          const Stored *stored, const Taking *taking) {
    Blocks mcus = mcus_needed(header, used, taking);
    int16_t *blocks[3] = {0};
    for (int c = 0; c < header->num_components; c++) {
        const JpegComponent *component = &header->components[c];
        int across = (mcus.right - mcus.left) * component->h;
        Blocks all = {mcus.left * component->h, mcus.top * component->v, mcus.right * component->h,
                      mcus.bottom * component->v};
        size_t size = (size_t)(across * component->v + 1) * BLOCK_STRIDE * sizeof(int16_t);
        if (!buffer_reserve(&scratch->blocks[c], size))
            return NO_MEMORY;
        blocks[c] = scratch->blocks[c].data;
        Status status = c < used ? plane_reserve(&planes[c], &scratch->planes[c], all) : OK;
        if (status != OK)
            return status;
    }
    Scan scan;
    Status status = scan_begin(&scan, scratch, header, stored->bytes, stored->size, &stored->seek);
    for (int row = mcus.top; row < mcus.bottom && status == OK; row++) {
        status = scan_row(&scan, row, mcus.left, mcus.right, blocks);
        for (int c = 0; c < used && status == OK; c++) {
            const JpegComponent *component = &header->components[c];
            int across = (mcus.right - mcus.left) * component->h;
            uint8_t *samples = scratch->planes[c].data;
            size_t line = planes[c].stride * 8;
            for (int y = 0; y < component->v; y++)
                put_row(blocks[c] + (size_t)y * across * BLOCK_STRIDE, across,
                        header->quant[component->quant],
                        samples + (size_t)((row - mcus.top) * component->v + y) * line,
                        planes[c].stride);
        }
    }
    return status;
}

static Status decode(Scratch *scratch, const Stored *stored, Crop *crop,
                     const Target *target) {
    if (packed_is_record(stored->bytes, stored->size))
        return decode_packed(scratch, stored, crop, target);
    JpegHeader header;
    Status status = jpeg_read_header(&header, stored->bytes, stored->size);
    if (status == OK && crop->rule->kind != GIVEN && !jpeg_is_whole(stored->bytes, stored->size))
        status = DAMAGED; /* whatever the box is */
    if (status == OK)
        status = settle_box(crop, header.width, header.height);
    if (status != OK)
        return status;
    Taking taking;
    Plane planes[3];
    int used = components_needed(&header, target);
    status = make_taking(&taking, scratch, &header, crop, target);
    if (status == OK)
        status = jpeg_planes(planes, used, scratch, &header, stored, &taking);
    if (status != OK)
        return status;
    return resize(scratch, planes, used == 1 ? GREY : YCBCR, taking.x, taking.y, crop->filter,
                  target);
}

#endif
