/* The header and the rows of packed records; what a hostile one says is checked here. */
#include "packed/packed.h"

#include "jpeg/encode.h"
#include "jpeg/huffman.h"

static uint32_t load_le32(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static Status open_pixels(Packed *packed, int planes) {
    size_t plane = (size_t)packed->width * (size_t)packed->height;
    if (packed->size < PACKED_HEADER + (size_t)planes * plane + PACKED_MARGIN)
        return DAMAGED;
    packed->jpeg = jpeg_of_planes(planes, packed->width, packed->height);
    return OK;
}

static Status open_coefficients(Packed *packed) {
    size_t room = packed->size - PACKED_HEADER - PACKED_MARGIN;
    if (packed->head_size > room || packed->tail_size > room - packed->head_size)
        return DAMAGED;
    size_t outside = packed->head_size + packed->tail_size;
    if (jpeg_read_header(&packed->jpeg, packed->bytes + PACKED_HEADER, outside) != OK)
        return DAMAGED;
    const JpegHeader *jpeg = &packed->jpeg;
    if (jpeg->scan != packed->head_size || jpeg->width != packed->width ||
        jpeg->height != packed->height)
        return DAMAGED;
    if (packed->num_rows != (uint32_t)(jpeg->mcus_down * packed_rows_of_mcus(jpeg)))
        return DAMAGED;
    packed->offsets = round_up(PACKED_HEADER + outside, 4);
    packed->rows = packed->begin = packed->offsets + 4 * ((size_t)packed->num_rows + 1);
    if (packed->rows > packed->size - PACKED_MARGIN)
        return DAMAGED;
    size_t least = 0; /* bytes of the rows if all coefficients were zero */
    for (int c = 0; c < jpeg->num_components; c++)
        least += PACKED_BLOCK * (size_t)jpeg->components[c].blocks_across *
                 (size_t)jpeg->components[c].blocks_down;
    return least <= packed->size - PACKED_MARGIN - packed->rows ? OK : DAMAGED;
}

Status packed_open(Packed *packed, const uint8_t *bytes, size_t size) {
    if (!packed_is_record(bytes, size) || load_le32(bytes + 8) % 65536 != PACKED_VERSION)
        return NOT_OURS;
    if (size < PACKED_HEADER + PACKED_MARGIN || load_le64(bytes + 32) != size)
        return DAMAGED;
    uint32_t width = load_le32(bytes + 12), height = load_le32(bytes + 16);
    if (width < 1 || width > 65535 || height < 1 || height > 65535 || bytes[11] > 1)
        return DAMAGED;
    packed->kind = bytes[10];
    packed->fill = bytes[11];
    packed->width = (int)width;
    packed->height = (int)height;
    packed->bytes = bytes;
    packed->size = size;
    packed->head_size = load_le32(bytes + 20);
    packed->tail_size = load_le32(bytes + 24);
    packed->num_rows = load_le32(bytes + 28);
    packed->offsets = packed->rows = packed->begin = PACKED_HEADER;
    packed->end = size - PACKED_MARGIN;
    switch (packed->kind) {
    case PACKED_COEFFICIENTS:
        return open_coefficients(packed);
    case PACKED_RGB:
        return open_pixels(packed, 3);
    case PACKED_GREY:
        return open_pixels(packed, 1);
    default:
        return DAMAGED;
    }
}

size_t packed_before_rows(const uint8_t *bytes, size_t size) {
    if (!packed_is_record(bytes, size) || bytes[10] != PACKED_COEFFICIENTS)
        return 0;
    size_t outside = (size_t)load_le32(bytes + 20) + load_le32(bytes + 24);
    return round_up(PACKED_HEADER + outside, 4) + 4 * ((size_t)load_le32(bytes + 28) + 1);
}

Status packed_span(const Packed *packed, int top, int bottom, size_t *begin, size_t *end) {
    const uint8_t *offsets = packed->bytes + packed->offsets;
    size_t rows = (size_t)packed_rows_of_mcus(&packed->jpeg);
    *begin = load_le32(offsets + 4 * rows * (size_t)top);
    *end = load_le32(offsets + 4 * rows * (size_t)bottom);
    return packed->begin <= *begin && *begin <= *end && *end <= packed->end ? OK : DAMAGED;
}

Status packed_size(const uint8_t *bytes, size_t size, int *width, int *height) {
    Packed packed;
    Status status = packed_open(&packed, bytes, size);
    if (status == OK) {
        *width = packed.width;
        *height = packed.height;
    }
    return status;
}

/* Its place in the table of rows. */
static size_t row_number(const JpegHeader *jpeg, int component, int number) {
    int v = jpeg->components[component].v;
    size_t found = (size_t)(number / v) * (size_t)packed_rows_of_mcus(jpeg) + (size_t)(number % v);
    for (int c = 0; c < component; c++)
        found += (size_t)jpeg->components[c].v;
    return found;
}

Status packed_row(PackedRow *row, const Packed *packed, int component, int number) {
    const uint8_t *entry =
        packed->bytes + packed->offsets + 4 * row_number(&packed->jpeg, component, number);
    size_t begin = load_le32(entry), end = load_le32(entry + 4);
    size_t across = (size_t)packed->jpeg.components[component].blocks_across;
    if (begin < packed->begin || end > packed->end || begin > end ||
        end - begin < PACKED_BLOCK * across)
        return DAMAGED;
    row->masks = packed->bytes + begin;
    row->first = row->masks + 8 * across;
    row->values = row->first + 2 * across;
    row->values_size = end - begin - PACKED_BLOCK * across;
    return OK;
}

/* --- back to a JPEG --- */

/* A row of blocks, read one after the other. */
typedef struct {
    PackedRow row;
    int block;
    size_t used; /* bytes of the values */
} Cursor;

typedef struct {
    const Packed *packed;
    BitWriter writer;
    Encoding dc[3], ac[3]; /* of each component */
    int before[3];         /* first coefficient of the block before */
    uint8_t place[64];     /* where in zigzag order a coefficient stands */
    Cursor cursors[3][2];
} Unpacking;

static Status write_block(Unpacking *unpacking, int component, Cursor *cursor) {
    uint64_t mask = packed_mask(&cursor->row, cursor->block), found = 0;
    int first = packed_first(&cursor->row, cursor->block++);
    size_t size = (size_t)packed_values_size(mask);
    if (size > cursor->row.values_size - cursor->used)
        return DAMAGED;
    const uint8_t *low = cursor->row.values + cursor->used;
    const uint8_t *high = packed_is_wide(mask) ? low + size / 2 : NULL;
    cursor->used += size;
    int16_t zigzag[64];
    for (uint64_t left = mask & ~(uint64_t)1; left; left &= left - 1) {
        int place = unpacking->place[__builtin_ctzll(left)];
        zigzag[place] = high ? (int16_t)(*low | *high++ << 8) : (int8_t)*low;
        low++;
        found |= (uint64_t)1 << place;
    }
    encode_block(&unpacking->writer, &unpacking->dc[component], &unpacking->ac[component],
                 first - unpacking->before[component], found, zigzag);
    unpacking->before[component] = first;
    return OK;
}

static Status write_mcu(Unpacking *unpacking) {
    const JpegHeader *jpeg = &unpacking->packed->jpeg;
    for (int c = 0; c < jpeg->num_components; c++)
        for (int y = 0; y < jpeg->components[c].v; y++)
            for (int x = 0; x < jpeg->components[c].h; x++) {
                Status status = write_block(unpacking, c, &unpacking->cursors[c][y]);
                if (status != OK)
                    return status;
            }
    return OK;
}

static Status begin_row(Unpacking *unpacking, int row) {
    const JpegHeader *jpeg = &unpacking->packed->jpeg;
    for (int c = 0; c < jpeg->num_components; c++)
        for (int y = 0; y < jpeg->components[c].v; y++) {
            Cursor *cursor = &unpacking->cursors[c][y];
            *cursor = (Cursor){0};
            Status status =
                packed_row(&cursor->row, unpacking->packed, c, row * jpeg->components[c].v + y);
            if (status != OK)
                return status;
        }
    return OK;
}

static void write_restart(Unpacking *unpacking, int number) {
    encode_align(&unpacking->writer, unpacking->packed->fill);
    *unpacking->writer.at++ = 0xff;
    *unpacking->writer.at++ = (uint8_t)(0xd0 + number % 8);
    memset(unpacking->before, 0, sizeof unpacking->before);
}

static Status write_scan(Unpacking *unpacking) {
    const JpegHeader *jpeg = &unpacking->packed->jpeg;
    int interval = jpeg->restart_interval, in_interval = 0, restarts = 0;
    for (int row = 0; row < jpeg->mcus_down; row++) {
        Status status = begin_row(unpacking, row);
        for (int column = 0; column < jpeg->mcus_across && status == OK; column++) {
            if (interval && in_interval++ == interval) {
                write_restart(unpacking, restarts++);
                in_interval = 1;
            }
            status = write_mcu(unpacking);
        }
        if (status != OK)
            return status;
    }
    encode_align(&unpacking->writer, unpacking->packed->fill);
    return unpacking->writer.has_no_code ? DAMAGED : OK;
}

Status packed_unpack(const uint8_t *record, size_t size, Buffer *jpeg, size_t *jpeg_size) {
    Packed packed;
    Status status = packed_open(&packed, record, size);
    if (status != OK)
        return status;
    if (packed.kind != PACKED_COEFFICIENTS)
        return NOT_OURS;
    /* Each block takes PACKED_BLOCK bytes in the record, and each value one. */
    size_t blocks = (size - packed.rows) / PACKED_BLOCK;
    size_t outside = packed.head_size + packed.tail_size;
    size_t most = outside + blocks * encode_most_bytes(0) + encode_most_bytes(size - packed.rows);
    if (!buffer_reserve(jpeg, most))
        return NO_MEMORY;
    Unpacking unpacking = {.packed = &packed};
    for (int i = 0; i < 64; i++)
        unpacking.place[natural_place[i]] = (uint8_t)i;
    for (int c = 0; c < packed.jpeg.num_components; c++) {
        encoding_make(&unpacking.dc[c], &packed.jpeg.dc[packed.jpeg.components[c].dc]);
        encoding_make(&unpacking.ac[c], &packed.jpeg.ac[packed.jpeg.components[c].ac]);
    }
    uint8_t *to = jpeg->data;
    memcpy(to, record + PACKED_HEADER, packed.head_size);
    unpacking.writer.at = to + packed.head_size;
    status = write_scan(&unpacking);
    memcpy(unpacking.writer.at, record + PACKED_HEADER + packed.head_size, packed.tail_size);
    *jpeg_size = (size_t)(unpacking.writer.at - to) + packed.tail_size;
    return status;
}
