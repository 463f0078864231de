/* [per path] A crop of a packed record: only the blocks that it looks at are put together again. */
#ifndef TRAINYARD_PACKED_READ_H
#define TRAINYARD_PACKED_READ_H

#include "files.h"
#include "packed/packed.h"
#include "resize/resize.h"
#include "resize/taking.h"

/* Bytes of the values of the blocks before one. */
static size_t values_before(const PackedRow *row, int first) {
    size_t size = 0;
    for (int block = 0; block < first; block++)
        size += (size_t)packed_values_size(packed_mask(row, block));
    return size;
}

/* A block's coefficients, whose values begin at `*at` in the row's; then those of the next one do.
 * False if they are not all there. */
static inline bool unpack_block(int16_t *block, const PackedRow *row, int number, size_t *at) {
    uint64_t mask = packed_mask(row, number);
    const uint8_t *values = row->values + *at;
    *at += (size_t)packed_values_size(mask);
    if (UNLIKELY(*at > row->values_size))
        return false;
    if (UNLIKELY(packed_is_wide(mask)))
        expand_wide(block, mask & ~(uint64_t)1, values, values + packed_num_values(mask));
    else
        expand_narrow(block, mask, values);
    block[0] = packed_first(row, number);
    return true;
}

/* Ask the memory for a row, of which blocks [first, last) will be read: about the bytes that they
 * take. */
static void will_read(const PackedRow *row, int across, int first, int last) {
    size_t begin = row->values_size * (size_t)first / (size_t)across;
    size_t end = row->values_size * (size_t)last / (size_t)across;
    for (int block = first; block < last; block += 8)
        __builtin_prefetch(row->masks + 8 * (size_t)block);
    for (int block = first; block < last; block += 32)
        __builtin_prefetch(row->first + 2 * (size_t)block);
    for (size_t at = begin; at < end; at += 64)
        __builtin_prefetch(row->values + at);
}

/* Blocks [first, last) of a row as samples. */
static Status read_row(const PackedRow *row, int first, int last, const int16_t *quant, uint8_t *to,
                       size_t stride) {
    size_t at = values_before(row, first);
    if (at > row->values_size)
        return DAMAGED;
    _Alignas(64) int16_t blocks[2][64];
    for (int block = first; block < last; block += 2, to += 16) {
        bool is_pair = block + 1 < last; /* else the last one, twice */
        if (!unpack_block(blocks[0], row, block, &at) ||
            (is_pair && !unpack_block(blocks[1], row, block + 1, &at)))
            return DAMAGED;
        idct_pair(blocks[0], blocks[is_pair], quant, to, to + (is_pair ? 8 : 0), stride);
    }
    return OK;
}

/* Blocks of a component as samples; each row is asked for while the one before is being read. */
static Status read_component(const Plane *plane, uint8_t *to, const Packed *packed, int component,
                             Blocks blocks) {
    const JpegComponent *about = &packed->jpeg.components[component];
    const int16_t *quant = packed->jpeg.quant[about->quant];
    PackedRow row, next;
    Status status = packed_row(&next, packed, component, blocks.top);
    for (int y = blocks.top; y < blocks.bottom && status == OK; y++) {
        row = next;
        if (y + 1 < blocks.bottom) {
            status = packed_row(&next, packed, component, y + 1);
            if (status != OK)
                return status;
            will_read(&next, about->blocks_across, blocks.left, blocks.right);
        }
        status = read_row(&row, blocks.left, blocks.right, quant, to, plane->stride);
        to += 8 * plane->stride;
    }
    return status;
}

/* Reads the rows that the first `used` components need, if they were left in the file. */
static Status read_rows(Packed *packed, int used, const Stored *stored, const Taking *taking) {
    if (stored->has_rows)
        return OK;
    Blocks mcus = mcus_needed(&packed->jpeg, used, taking);
    size_t begin, end;
    Status status = packed_span(packed, mcus.top, mcus.bottom, &begin, &end);
    if (status != OK)
        return status;
    packed->begin = begin;
    packed->end = end;
    int error = read_span(stored->file, stored->bytes + begin, (int64_t)(end - begin),
                          stored->begin + (int64_t)begin);
    return error ? UNREADABLE : OK;
}

/* The first `used` components as samples. */
static Status coefficients_planes(Plane planes[3], int used, Scratch *scratch, Packed *packed,
                                  const Stored *stored, const Taking *taking) {
    Status status = read_rows(packed, used, stored, taking);
    for (int c = 0; c < used && status == OK; c++) {
        Blocks blocks = blocks_needed(taking, c);
        status = plane_reserve(&planes[c], &scratch->planes[c], blocks);
        if (status == OK)
            status = read_component(&planes[c], scratch->planes[c].data, packed, c, blocks);
    }
    return status;
}

static void pixels_planes(Plane planes[3], const Packed *packed) {
    size_t size = (size_t)packed->width * (size_t)packed->height;
    for (int c = 0; c < packed->jpeg.num_components; c++) {
        const uint8_t *samples = packed->bytes + PACKED_HEADER + (size_t)c * size;
        planes[c] = (Plane){samples, (size_t)packed->width, 0, 0};
    }
}

static Status decode_packed(Scratch *scratch, const Stored *stored, Crop *crop,
                            const Target *target) {
    Packed packed;
    Status status = packed_open(&packed, stored->bytes, stored->size);
    if (status != OK)
        return status;
    if (packed.kind == PACKED_RGB && target->channels == 1)
        return NOT_OURS; /* the libraries make luma of colours */
    Taking taking;
    status = settle_box(crop, packed.width, packed.height);
    if (status == OK)
        status = make_taking(&taking, scratch, &packed.jpeg, crop, target);
    if (status != OK)
        return status;
    Plane planes[3];
    int used = components_needed(&packed.jpeg, target);
    Colours colours = used == 1 ? GREY : packed.kind == PACKED_RGB ? RGB : YCBCR;
    if (packed.kind == PACKED_COEFFICIENTS)
        status = coefficients_planes(planes, used, scratch, &packed, stored, &taking);
    else
        pixels_planes(planes, &packed);
    if (status != OK)
        return status;
    return resize(scratch, planes, colours, taking.x, taking.y, crop->filter, target);
}

#endif
