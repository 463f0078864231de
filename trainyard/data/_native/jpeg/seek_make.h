/* [per path] Making the seek table of a JPEG: one pass over its bits, by lengths alone. */
#ifndef TRAINYARD_SEEK_MAKE_H
#define TRAINYARD_SEEK_MAKE_H

#include "jpeg/scan.h"

/* The same byte in the file and in the unstuffed data. */
typedef struct {
    const uint8_t *file;
    size_t data;
} SameByte;

/* Forwards to byte `data`: counts the stuffing and the restart markers on the way. */
static void same_byte_advance(SameByte *same, size_t data, const uint8_t *file_end) {
    for (;;) {
        size_t left = (size_t)(file_end - same->file);
        size_t wanted = data - same->data;
        const uint8_t *found = memchr(same->file, 0xFF, wanted < left ? wanted + 1 : left);
        if (!found || found + 1 >= file_end) {
            same->file += wanted < left ? wanted : left;
            same->data = data;
            return;
        }
        size_t length = (size_t)(found - same->file);
        bool is_data = found[1] == 0;
        if (length == wanted && is_data) {
            same->file = found;
            same->data = data;
            return;
        }
        same->file = found + 2;
        same->data += length + is_data;
    }
}

/* At the beginning of an interval the reader moves only when the next MCU is asked for. */
static Status make_seek_entry(Scan *scan, SameByte *same, SeekEntry *entry) {
    int interval = scan->header->restart_interval;
    if (interval && scan->mcu % interval == 0) {
        const uint8_t *start;
        if (!unstuff_find(&scan->unstuffed, scan->mcu / interval, &start) ||
            scan_read_from(scan, start) != OK)
            return DAMAGED;
    }
    size_t position = scan_position(scan);
    same_byte_advance(same, position / 8, scan->file_end);
    size_t offset = (size_t)(same->file - scan->file);
    if (offset > UINT32_MAX)
        return NOT_OURS;
    *entry = (SeekEntry){.offset = (uint32_t)offset,
                         .bit = position % 8,
                         .check = seek_check(same->file, scan->file_end)};
    for (int c = 0; c < 3; c++)
        entry->dc[c] = (int16_t)scan->predictor[c];
    return OK;
}

/* The seek table of a JPEG: seek_num_entries() entries. */
static Status make_seek_entries(Scratch *scratch, const JpegHeader *header, const uint8_t *bytes,
                                size_t size, SeekEntry *entries) {
    Scan scan;
    Status status = scan_begin(&scan, scratch, header, bytes, size, NULL);
    SameByte same = {scan.file, 0};
    int tile = seek_tile(header), across = header->mcus_across;
    for (int row = 0; row < header->mcus_down; row++) {
        for (int first = 0; first < across && status == OK; first += tile) {
            status = make_seek_entry(&scan, &same, entries++);
            if (status == OK)
                status = scan_pass(&scan, min_int(tile, across - first), false);
        }
    }
    return status;
}

#endif
