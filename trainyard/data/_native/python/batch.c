#include "python/batch.h"

#include "files.h"
#include "packed/packed.h"

static Status size_of(const uint8_t *bytes, size_t length, int64_t size[2]) {
    if (packed_is_record(bytes, length)) {
        int width, height;
        Status status = packed_size(bytes, length, &width, &height);
        if (status == OK) {
            size[0] = width;
            size[1] = height;
        }
        return status;
    }
    JpegHeader header;
    Status status = jpeg_read_header(&header, bytes, length);
    if (status == OK && !jpeg_is_whole(bytes, length))
        return DAMAGED;
    if (status == OK) {
        size[0] = header.width;
        size[1] = header.height;
    }
    return status;
}

Status image_bytes(const Image *image, Buffer *buffer, const uint8_t **bytes) {
    *bytes = image->bytes;
    if (image->bytes)
        return OK;
    if (!buffer_reserve(buffer, (size_t)image->length + 1))
        return NO_MEMORY;
    *bytes = buffer->data;
    return read_span(image->file, buffer->data, image->length, image->begin) ? UNREADABLE : OK;
}

void batch_sizes(const Images *images, Scratch *scratch, int64_t *sizes, uint8_t *status) {
    for (int64_t i = 0; i < images->count; i++) {
        int64_t *size = sizes + 2 * i;
        size[0] = size[1] = 1;
        const uint8_t *bytes;
        Status found = image_bytes(&images->all[i], &scratch->file, &bytes);
        if (found == OK)
            found = size_of(bytes, (size_t)images->all[i].length, size);
        status[i] = (uint8_t)found;
        scratch_trim(scratch);
    }
}

static SeekTable seek_of(const Images *seek, int64_t number, Buffer *buffer) {
    const uint8_t *entries;
    if (!seek->all || image_bytes(&seek->all[number], buffer, &entries) != OK)
        return (SeekTable){0};
    int64_t count = seek->all[number].length / (int64_t)sizeof(SeekEntry);
    return (SeekTable){count ? entries : NULL, (int)min_int64(count, INT32_MAX)};
}

static Status decode_one(const Path *path, Scratch *scratch, Stored *stored, Crop *crop,
                         const Target *target) {
    Status status = path->decode(scratch, stored, crop, target);
    if (status != DAMAGED || !stored->seek.entries)
        return status;
    stored->seek = (SeekTable){0}; /* perhaps it is the table that is wrong */
    return path->decode(scratch, stored, crop, target);
}

void batch_decode(const Path *path, Scratch *scratch, const Images *images, const Crops *crops,
                  const Images *seek, const Target *target, uint8_t *status) {
    size_t pixels = (size_t)target->width * (size_t)target->height * (size_t)target->channels;
    for (int64_t i = 0; i < images->count; i++) {
        if (status[i] != OK)
            continue;
        double *box = crops->boxes + 4 * i;
        Stored stored = {NULL, (size_t)images->all[i].length, seek_of(seek, i, &scratch->seek)};
        Crop crop = {{box[0], box[1], box[2], box[3]}, crops->flips[i] != 0, crops->beyond,
                     crops->filter, &crops->rule, i};
        Target own = *target;
        own.pixels += (size_t)i * pixels;
        Status found = image_bytes(&images->all[i], &scratch->file, &stored.bytes);
        if (found == OK)
            found = decode_one(path, scratch, &stored, &crop, &own);
        memcpy(box, crop.box, sizeof crop.box);
        status[i] = (uint8_t)found;
        scratch_trim(scratch);
    }
}
