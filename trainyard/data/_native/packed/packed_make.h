/* [per path] A JPEG as a packed record of its coefficients.
 *
 * Only what comes back is packed: the JPEG is written again from the record, and must be the same to
 * the byte. */
#ifndef TRAINYARD_PACKED_MAKE_H
#define TRAINYARD_PACKED_MAKE_H

#include "packed/packed.h"
#include "jpeg/scan.h"

static inline void store_le16(uint8_t *at, unsigned value) {
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
}

static inline void store_le32(uint8_t *at, uint32_t value) {
    store_le16(at, value & 0xffff);
    store_le16(at + 2, value >> 16);
}

static inline void store_le64(uint8_t *at, uint64_t value) {
    store_le32(at, (uint32_t)value);
    store_le32(at + 4, (uint32_t)(value >> 32));
}

/* Where the entropy-coded bytes end: at the first marker that restarts nothing. */
static size_t end_of_scan(const uint8_t *bytes, size_t size, size_t at) {
    while (at + 1 < size) {
        const uint8_t *found = memchr(bytes + at, 0xff, size - 1 - at);
        if (found == NULL)
            return size;
        int marker = found[1];
        at = (size_t)(found - bytes);
        if (marker != 0 && marker != 0xff && (marker < 0xd0 || marker > 0xd7))
            return at;
        at += marker == 0xff ? 1 : 2;
    }
    return size;
}

/* Room for the coefficients of a row of MCUs of all components. */
static Status reserve_row(Scratch *scratch, const JpegHeader *jpeg, int16_t *blocks[3]) {
    for (int c = 0; c < jpeg->num_components; c++) {
        const JpegComponent *component = &jpeg->components[c];
        size_t count = (size_t)component->blocks_across * (size_t)component->v;
        if (!buffer_reserve(&scratch->blocks[c], (count + 1) * BLOCK_STRIDE * sizeof(int16_t)))
            return NO_MEMORY;
        blocks[c] = scratch->blocks[c].data;
    }
    return OK;
}

/* Bytes that a row of so many blocks may take. */
static size_t most_of_row(int count) { return (PACKED_BLOCK + 2 * 63) * (size_t)count; }

/* The values of a block, and its mask at `mask`; where they end. */
static uint8_t *write_values(uint8_t *values, const int16_t *block, uint8_t *mask) {
    uint64_t which = nonzero_mask(block) & ~(uint64_t)1;
    uint8_t *end = values;
    bool is_wide = false;
    for (uint64_t left = which; left; left &= left - 1) {
        int value = block[__builtin_ctzll(left)];
        is_wide |= value != (int8_t)value;
        *end++ = (uint8_t)value;
    }
    if (is_wide)
        for (uint64_t left = which; left; left &= left - 1)
            *end++ = (uint8_t)((uint16_t)block[__builtin_ctzll(left)] >> 8);
    store_le64(mask, which | is_wide);
    return end;
}

/* A record that is being written. */
typedef struct {
    uint8_t *record;
    size_t capacity;
    uint8_t *offset; /* that comes next */
    uint8_t *end;
} Writing;

/* Row `y` of rows of `count` blocks. */
static Status write_row(Writing *to, const int16_t *blocks, int count, int y) {
    size_t used = (size_t)(to->end - to->record);
    if (most_of_row(count) > to->capacity - used)
        return DAMAGED; /* more values than the file has codes */
    store_le32(to->offset, (uint32_t)used);
    to->offset += 4;
    uint8_t *masks = to->end, *first = masks + 8 * (size_t)count;
    to->end = first + 2 * (size_t)count;
    blocks += (size_t)y * (size_t)count * BLOCK_STRIDE;
    for (int i = 0; i < count; i++, blocks += BLOCK_STRIDE) {
        to->end = write_values(to->end, blocks, masks + 8 * (size_t)i);
        store_le16(first + 2 * (size_t)i, (uint16_t)blocks[0]);
    }
    return OK;
}

static Status write_rows(Writing *to, Scratch *scratch, const JpegHeader *jpeg,
                         const uint8_t *bytes, size_t size) {
    int16_t *blocks[3] = {0};
    Scan scan;
    Status status = reserve_row(scratch, jpeg, blocks);
    if (status == OK)
        status = scan_begin(&scan, scratch, jpeg, bytes, size, NULL);
    for (int row = 0; row < jpeg->mcus_down && status == OK; row++) {
        status = scan_row(&scan, row, 0, jpeg->mcus_across, blocks);
        for (int c = 0; c < jpeg->num_components && status == OK; c++) {
            const JpegComponent *component = &jpeg->components[c];
            for (int y = 0; y < component->v && status == OK; y++)
                status = write_row(to, blocks[c], component->blocks_across, y);
        }
    }
    store_le32(to->offset, (uint32_t)(to->end - to->record));
    return status;
}

/* Rows of blocks of all components. */
static size_t num_rows(const JpegHeader *jpeg) {
    return (size_t)(jpeg->mcus_down * packed_rows_of_mcus(jpeg));
}

/* The most bytes that a record may take; 0 for a JPEG that cannot have one. */
static size_t most_bytes(const JpegHeader *jpeg, size_t size) {
    size_t scan = size - jpeg->scan, blocks = 0;
    for (int c = 0; c < jpeg->num_components; c++) {
        const JpegComponent *component = &jpeg->components[c];
        blocks += (size_t)component->blocks_across * (size_t)component->blocks_down;
    }
    if (size > UINT32_MAX / 16 || blocks > 4 * scan)
        return 0; /* each block has two codes at least, each value a code and a bit */
    return PACKED_HEADER + size + 4 * (num_rows(jpeg) + 2) + PACKED_BLOCK * blocks + 8 * scan +
           most_of_row(jpeg->components[0].blocks_across) + 2 * PACKED_MARGIN;
}

static void write_header(uint8_t *record, const JpegHeader *jpeg, size_t tail_size) {
    memcpy(record, PACKED_MAGIC, 8);
    store_le16(record + 8, PACKED_VERSION);
    record[10] = PACKED_COEFFICIENTS;
    record[11] = 1;
    store_le32(record + 12, (uint32_t)jpeg->width);
    store_le32(record + 16, (uint32_t)jpeg->height);
    store_le32(record + 20, (uint32_t)jpeg->scan);
    store_le32(record + 24, (uint32_t)tail_size);
    store_le32(record + 28, (uint32_t)num_rows(jpeg));
}

/* The record, unchecked. */
static Status write_record(Buffer *record, size_t *record_size, Scratch *scratch,
                           const JpegHeader *jpeg, const uint8_t *bytes, size_t size) {
    size_t most = most_bytes(jpeg, size);
    if (most == 0)
        return NOT_OURS;
    if (!buffer_reserve(record, most))
        return NO_MEMORY;
    size_t scan_end = end_of_scan(bytes, size, jpeg->scan), tail_size = size - scan_end;
    size_t offsets = round_up(PACKED_HEADER + jpeg->scan + tail_size, 4);
    size_t rows = offsets + 4 * (num_rows(jpeg) + 1);
    uint8_t *at = record->data;
    memset(at, 0, offsets);
    write_header(at, jpeg, tail_size);
    memcpy(at + PACKED_HEADER, bytes, jpeg->scan);
    memcpy(at + PACKED_HEADER + jpeg->scan, bytes + scan_end, tail_size);
    Writing to = {at, most - 2 * PACKED_MARGIN, at + offsets, at + rows};
    Status status = write_rows(&to, scratch, jpeg, bytes, size);
    size_t used = (size_t)(to.end - at);
    *record_size = round_up(used + PACKED_MARGIN, 64);
    memset(to.end, 0, *record_size - used);
    store_le64(at + 32, *record_size);
    return *record_size > UINT32_MAX ? NOT_OURS : status;
}

/* OK if the record gives the file back to the byte; its fill is set to the bit that does. */
static Status check_record(const uint8_t *bytes, size_t size, uint8_t *record, size_t record_size) {
    Buffer jpeg = {0};
    size_t jpeg_size = 0;
    Status status = OK;
    bool is_same = false;
    for (int fill = 1; fill >= 0 && status == OK && !is_same; fill--) {
        record[11] = (uint8_t)fill;
        status = packed_unpack(record, record_size, &jpeg, &jpeg_size);
        is_same = status == OK && jpeg_size == size && memcmp(jpeg.data, bytes, size) == 0;
    }
    buffer_free(&jpeg);
    return is_same || status == NO_MEMORY ? status : NOT_OURS;
}

static Status make_packed(Scratch *scratch, const uint8_t *bytes, size_t size, Buffer *record,
                          size_t *record_size) {
    JpegHeader jpeg;
    Status status = jpeg_read_header(&jpeg, bytes, size);
    if (status == OK && !jpeg_is_whole(bytes, size))
        status = DAMAGED;
    if (status != OK)
        return status;
    status = write_record(record, record_size, scratch, &jpeg, bytes, size);
    return status == OK ? check_record(bytes, size, record->data, *record_size) : status;
}

#endif
