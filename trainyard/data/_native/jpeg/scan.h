/* [per path] From the entropy-coded bytes of a JPEG to coefficients, for a part of its MCUs.
 *
 * MCUs are numbered row by row. What lies before those asked for is passed over: by the seek table
 * or the restart intervals where there are some, else by decoding lengths alone. */
#ifndef TRAINYARD_SCAN_H
#define TRAINYARD_SCAN_H

#include "jpeg/entropy.h"
#include "jpeg/seek.h"
#include "jpeg/unstuff.h"

#define BLOCK_STRIDE 64 /* int16 from block to block, each in natural order */
#define MAX_MCU_BLOCKS 6

/* A block of each MCU. */
typedef struct {
    const DcTable *dc;
    const AcTable *ac;
    int component;
    int step;    /* int16 from MCU to MCU */
    int16_t *to; /* where the next MCU's goes */
} ScanBlock;

typedef struct {
    const JpegHeader *header;
    Scratch *scratch;
    const uint8_t *file, *file_end; /* the entropy-coded bytes */
    SeekTable seek;                 /* without entries if it is not to be used */
    Unstuffed unstuffed;
    BitReader reader;
    uint32_t predictor[3];
    int mcu; /* where the reader stands */
    ScanBlock blocks[MAX_MCU_BLOCKS];
    int num_blocks;
} Scan;

static void scan_list_blocks(Scan *scan) {
    scan->num_blocks = 0;
    for (int c = 0; c < scan->header->num_components; c++) {
        const JpegComponent *component = &scan->header->components[c];
        ScanBlock block = {&scan->scratch->tables.dc[component->dc],
                           &scan->scratch->tables.ac[component->ac], c, component->h * BLOCK_STRIDE,
                           NULL};
        for (int i = 0; i < component->h * component->v; i++)
            scan->blocks[scan->num_blocks++] = block;
    }
}

static void scan_place_blocks(Scan *scan, int mcus, int16_t *const blocks[3]) {
    ScanBlock *next = scan->blocks;
    for (int c = 0; c < scan->header->num_components; c++) {
        const JpegComponent *component = &scan->header->components[c];
        size_t line = (size_t)(mcus * component->h) * BLOCK_STRIDE;
        for (int y = 0; y < component->v; y++)
            for (int x = 0; x < component->h; x++)
                next++->to = blocks[c] + (size_t)y * line + (size_t)x * BLOCK_STRIDE;
    }
}

/* The reader at a byte, with predictors of zero. */
static Status scan_read_from(Scan *scan, const uint8_t *start) {
    if (!unstuff_reaches(&scan->unstuffed, start))
        return DAMAGED;
    scan->reader = (BitReader){.next = start};
    refill(&scan->reader);
    memset(scan->predictor, 0, sizeof scan->predictor);
    return OK;
}

static bool seek_fits(const SeekTable *seek, const JpegHeader *header) {
    return seek && seek->entries && seek->num_entries == seek_num_entries(header);
}

/* Begin. `seek` may be NULL or have no entries; a table that does not fit the header is not used.
 */
static Status scan_begin(Scan *scan, Scratch *scratch, const JpegHeader *header,
                         const uint8_t *bytes, size_t size, const SeekTable *seek) {
    *scan = (Scan){.header = header,
                   .scratch = scratch,
                   .file = bytes + header->scan,
                   .file_end = bytes + size};
    if (seek_fits(seek, header))
        scan->seek = *seek;
    int interval = header->restart_interval;
    int mcus = header->mcus_across * header->mcus_down;
    Status status = unstuff_reserve(&scan->unstuffed, scratch, size - header->scan,
                                    interval ? ceil_div(mcus, interval) : 0);
    if (status != OK)
        return status;
    unstuff_begin(&scan->unstuffed, scan->file, scan->file_end, 0);
    huffman_prepare(&scratch->tables, header);
    scan_list_blocks(scan);
    return scan_read_from(scan, scan->unstuffed.data);
}

/* The next `count` MCUs, all of one restart interval. */
static Status scan_decode(Scan *scan, int count) {
    BitReader reader = scan->reader;
    ScanBlock *const last = scan->blocks + scan->num_blocks;
    for (int i = 0; i < count; i++) {
        if (!unstuff_reaches(&scan->unstuffed, reader.next))
            return DAMAGED;
        for (ScanBlock *block = scan->blocks; block < last; block++) {
            if (!read_block(&reader, block->dc, block->ac, &scan->predictor[block->component],
                            block->to))
                return DAMAGED;
            block->to += block->step;
        }
    }
    scan->reader = reader;
    return OK;
}

static Status scan_skip(Scan *scan, int count) {
    huffman_prepare_skip(&scan->scratch->tables, scan->header);
    BitReader reader = scan->reader;
    const ScanBlock *const last = scan->blocks + scan->num_blocks;
    for (int i = 0; i < count; i++) {
        if (!unstuff_reaches(&scan->unstuffed, reader.next))
            return DAMAGED;
        for (const ScanBlock *block = scan->blocks; block < last; block++)
            if (!skip_block(&reader, block->dc, block->ac, &scan->predictor[block->component]))
                return DAMAGED;
    }
    scan->reader = reader;
    return OK;
}

/* Where the reader stands, in bits of the unstuffed data. */
static size_t scan_position(const Scan *scan) {
    return (size_t)(scan->reader.next - scan->unstuffed.data) * 8 - scan->reader.count;
}

/* Whether all bits so far were there: those of the interval that MCU `mcu` lies in. */
static Status scan_check(const Scan *scan, int mcu) {
    const Unstuffed *unstuffed = &scan->unstuffed;
    size_t end = unstuffed->size;
    if (scan->header->restart_interval) {
        int next = mcu / scan->header->restart_interval - unstuffed->first_interval + 1;
        if (next < unstuffed->num_starts)
            end = unstuffed->starts[next];
    }
    return scan_position(scan) <= end * 8 ? OK : DAMAGED;
}

/* The next `count` MCUs, kept or passed over. */
static Status scan_pass(Scan *scan, int count, bool keep) {
    int interval = scan->header->restart_interval;
    while (count > 0) {
        int run = count;
        if (interval) {
            run = min_int(count, interval - scan->mcu % interval);
            const uint8_t *start;
            if (scan->mcu % interval == 0) {
                if (!unstuff_find(&scan->unstuffed, scan->mcu / interval, &start) ||
                    scan_read_from(scan, start) != OK)
                    return DAMAGED;
            }
        }
        Status status = keep ? scan_decode(scan, run) : scan_skip(scan, run);
        if (status == OK)
            status = scan_check(scan, scan->mcu);
        if (status != OK)
            return status;
        scan->mcu += run;
        count -= run;
    }
    return OK;
}

static SeekEntry seek_entry(const SeekTable *seek, int index) {
    const uint8_t *at = seek->entries + (size_t)index * sizeof(SeekEntry);
    SeekEntry entry = {
        .offset = (uint32_t)(load_le64(at) & 0xFFFFFFFF), .bit = at[4] & 7, .check = at[5]};
    for (int c = 0; c < 3; c++)
        entry.dc[c] = (int16_t)(at[6 + 2 * c] | at[7 + 2 * c] << 8);
    return entry;
}

/* Go to a tile of the seek table, which begins at MCU `mcu`; `stop` is the first tile that is not
 * needed. */
static Status scan_jump(Scan *scan, int tile, int mcu, int stop) {
    const SeekTable *seek = &scan->seek;
    SeekEntry entry = seek_entry(seek, tile);
    size_t size = (size_t)(scan->file_end - scan->file), end = size;
    if (stop < seek->num_entries)
        end =
            (size_t)seek_entry(seek, stop).offset + 2; /* its first bits may be in a byte of ours */
    if (end > size)
        end = size;
    if (entry.offset >= end || entry.check != seek_check(scan->file + entry.offset, scan->file_end))
        return DAMAGED;
    int interval = scan->header->restart_interval;
    unstuff_begin(&scan->unstuffed, scan->file + entry.offset, scan->file + end,
                  interval ? mcu / interval : 0);
    if (scan_read_from(scan, scan->unstuffed.data) != OK)
        return DAMAGED;
    drop_bits(&scan->reader, entry.bit);
    for (int c = 0; c < 3; c++)
        scan->predictor[c] = (uint32_t)(int32_t)entry.dc[c];
    scan->mcu = mcu;
    return OK;
}

/* Forwards to MCU `first` of a row, of which those before `last` will be asked for. */
static Status scan_go_to(Scan *scan, int row, int first, int last) {
    int across = scan->header->mcus_across, target = row * across + first;
    int interval = scan->header->restart_interval;
    if (scan->seek.entries) {
        int size = seek_tile(scan->header), line = row * ceil_div(across, size);
        Status status = scan_jump(scan, line + first / size, row * across + first / size * size,
                                  line + ceil_div(last, size));
        if (status != OK)
            return status;
    } else if (interval && target / interval * interval > scan->mcu) {
        scan->mcu = target / interval * interval;
    }
    return scan_pass(scan, target - scan->mcu, false);
}

/* The coefficients of MCUs [first, last) of MCU row `row`, not dequantised. Rows are asked for in
 * rising order. blocks[c] has `v` rows of (last - first) x h blocks of component c, BLOCK_STRIDE
 * apart and 64-byte aligned.
 *
 * DAMAGED for invalid codes, a run past the end of a block, or bytes that end too early. */
static Status scan_row(Scan *scan, int row, int first, int last, int16_t *const blocks[3]) {
    Status status = scan_go_to(scan, row, first, last);
    if (status != OK)
        return status;
    scan_place_blocks(scan, last - first, blocks);
    return scan_pass(scan, last - first, true);
}

#endif
