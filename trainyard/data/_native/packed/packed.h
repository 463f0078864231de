/* A packed record: a JPEG's coefficients, or pixels, laid out so that a crop is read, not decoded.
 *
 * Numbers are little-endian. A record has a multiple of 64 bytes, and the last 64 are zeros: what
 * is read a register at a time never leaves it.
 *
 *     byte  0  8 bytes  PACKED_MAGIC
 *           8  2        version: 1
 *          10  1        kind: 1 coefficients, 2 RGB pixels, 3 grey pixels
 *          11  1        the bit that fills the last byte of an interval of the scan (1 by the book)
 *          12  4        width, pixels
 *          16  4        height
 *          20  4        bytes of the head
 *          24  4        bytes of the tail
 *          28  4        number of rows of blocks of all components
 *          32  8        bytes of the record
 *          40  24       zeros
 *
 * then, of coefficients
 *
 *     head     the JPEG up to its entropy-coded bytes: its tables, sampling, EXIF as they were
 *     tail     what followed them: the end marker, and whatever comes after it
 *     zeros    to a multiple of 4
 *     offsets  4 bytes for each row: its first byte in the record; and the end of the last row
 *     rows     end to end; for each row of MCUs those of each component in turn
 *
 * and a row of n blocks is
 *
 *     masks    8 bytes for each block: bit k says that coefficient k (natural order) is not zero,
 *              and bit 0, whose coefficient is stored apart, that the block is wide
 *     first    2 bytes for each block: coefficient 0 (a difference to none)
 *     values   the others that are not zero, in rising order: a byte each; of a wide block the
 *              low bytes of all, then the high bytes of all
 *
 * so that where a block's values begin is the sum of the popcounts of the masks before it. Of
 * pixels, planes of height x width bytes follow byte 64: red, green, blue; or grey alone. */
#ifndef TRAINYARD_PACKED_H
#define TRAINYARD_PACKED_H

#include "jpeg/jpeg.h"

#define PACKED_MAGIC "\xa7TYpack\n"
#define PACKED_VERSION 1
#define PACKED_HEADER 64
#define PACKED_MARGIN 64
#define PACKED_BLOCK 10 /* bytes of a block beside its values */

typedef enum { PACKED_COEFFICIENTS = 1, PACKED_RGB = 2, PACKED_GREY = 3 } PackedKind;

typedef struct {
    PackedKind kind;
    int fill; /* bit */
    int width, height;
    const uint8_t *bytes;
    size_t size;
    size_t head_size, tail_size;
    size_t offsets, rows; /* where these begin */
    size_t begin, end;    /* of the rows that are in memory */
    uint32_t num_rows;
    JpegHeader jpeg; /* of pixels: that of their planes, as components at full resolution */
} Packed;

/* Read the header of a record and check all that it says but the rows. */
Status packed_open(Packed *packed, const uint8_t *bytes, size_t size);

/* Bytes before the rows of a record of coefficients, of which the header is there; 0 for others. */
size_t packed_before_rows(const uint8_t *bytes, size_t size);

/* The bytes [begin, end) of rows of MCUs; OK if they lie in the record. */
Status packed_span(const Packed *packed, int top, int bottom, size_t *begin, size_t *end);

typedef struct {
    const uint8_t *masks, *first, *values;
    size_t values_size;
} PackedRow;

/* A row of blocks of a component: its parts, which lie inside the record with PACKED_MARGIN after
 * them. What the masks say of the values is not checked. */
Status packed_row(PackedRow *row, const Packed *packed, int component, int number);

/* The JPEG that a record was made of. */
Status packed_unpack(const uint8_t *record, size_t size, Buffer *jpeg, size_t *jpeg_size);

static inline bool packed_is_record(const uint8_t *bytes, size_t size) {
    return size >= PACKED_HEADER && memcmp(bytes, PACKED_MAGIC, 8) == 0;
}

Status packed_size(const uint8_t *bytes, size_t size, int *width, int *height);

static inline uint64_t packed_mask(const PackedRow *row, int block) {
    return load_le64(row->masks + 8 * (size_t)block);
}

static inline int16_t packed_first(const PackedRow *row, int block) {
    const uint8_t *at = row->first + 2 * (size_t)block;
    return (int16_t)(at[0] | at[1] << 8);
}

static inline bool packed_is_wide(uint64_t mask) { return mask & 1; }

static inline int packed_num_values(uint64_t mask) {
    return __builtin_popcountll(mask & ~(uint64_t)1);
}

/* Bytes of a block's values. */
static inline int packed_values_size(uint64_t mask) {
    return packed_num_values(mask) << (mask & 1);
}

/* Rows of blocks of all components in a row of MCUs. */
static inline int packed_rows_of_mcus(const JpegHeader *jpeg) {
    int rows = 0;
    for (int c = 0; c < jpeg->num_components; c++)
        rows += jpeg->components[c].v;
    return rows;
}

#endif
