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

static Status read_image(const Image *image, Buffer *buffer, size_t from, size_t to) {
    uint8_t *bytes = buffer->data;
    int64_t begin = image->begin + (int64_t)from;
    return read_span(image->file, bytes + from, (int64_t)(to - from), begin) ? UNREADABLE : OK;
}

Status image_bytes(const Image *image, Buffer *buffer, const uint8_t **bytes) {
    *bytes = image->bytes;
    if (image->bytes)
        return OK;
    if (!buffer_reserve(buffer, (size_t)image->length + 1))
        return NO_MEMORY;
    *bytes = buffer->data;
    return read_image(image, buffer, 0, (size_t)image->length);
}

#define HEAD 4096 /* bytes of an image that are read first */

/* An image, without the rows of a packed record that lies in a file. */
static Status open_image(Stored *stored, const Image *image, Buffer *buffer) {
    size_t size = (size_t)image->length, head = size < HEAD ? size : HEAD;
    *stored = (Stored){(uint8_t *)image->bytes, size, {0}, true, image->file, image->begin};
    if (image->bytes)
        return OK;
    if (!buffer_reserve(buffer, size + 1))
        return NO_MEMORY;
    stored->bytes = buffer->data;
    Status status = read_image(image, buffer, 0, head);
    if (status != OK)
        return status;
    size_t before = packed_before_rows(stored->bytes, head);
    stored->has_rows = !before || before > head;
    return stored->has_rows ? read_image(image, buffer, head, size) : OK;
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
        Stored stored;
        Crop crop = {{box[0], box[1], box[2], box[3]}, crops->flips[i] != 0, crops->beyond,
                     crops->filter, &crops->rule, i};
        Target own = *target;
        own.pixels += (size_t)i * pixels;
        Status found = open_image(&stored, &images->all[i], &scratch->file);
        stored.seek = seek_of(seek, i, &scratch->seek);
        if (found == OK)
            found = decode_one(path, scratch, &stored, &crop, &own);
        memcpy(box, crop.box, sizeof crop.box);
        status[i] = (uint8_t)found;
        scratch_trim(scratch);
    }
}
