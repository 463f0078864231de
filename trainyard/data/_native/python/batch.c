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

/* In functions of their own: what is in registers where sigsetjmp is called may be lost. The signal
 * mask is not saved, which would be a system call per image: see SA_NODEFER in files.c. */
static __attribute__((noinline)) Status guarded_size(const uint8_t *bytes, size_t length,
                                                     int64_t size[2]) {
    BusGuard guard;
    volatile Status status = UNREADABLE;
    bus_guard_set(&guard);
    if (sigsetjmp(guard.back, 0) == 0)
        status = size_of(bytes, length, size);
    bus_guard_release(&guard);
    return status;
}

static __attribute__((noinline)) Status guarded_decode(const Path *path, Scratch *scratch,
                                                       const Stored *stored, const Crop *crop,
                                                       const Target *target) {
    BusGuard guard;
    volatile Status status = UNREADABLE;
    bus_guard_set(&guard);
    if (sigsetjmp(guard.back, 0) == 0)
        status = path->decode(scratch, stored, crop, target);
    bus_guard_release(&guard);
    return status;
}

void batch_sizes(const Images *images, int64_t *sizes, uint8_t *status) {
    for (int64_t i = 0; i < images->count; i++) {
        int64_t *size = sizes + 2 * i;
        size[0] = size[1] = 1;
        status[i] = (uint8_t)guarded_size(images->bytes[i], (size_t)images->lengths[i], size);
    }
}

static SeekTable seek_of(const SeekTables *seek, int64_t image) {
    if (!seek->entries)
        return (SeekTable){0};
    int64_t begin = seek->begins[image], count = seek->ends[image] - begin;
    if (count <= 0 || count > INT32_MAX)
        return (SeekTable){0};
    return (SeekTable){seek->entries + (size_t)begin * sizeof(SeekEntry), (int)count};
}

void batch_decode(const Path *path, Scratch *scratch, const Images *images, const Crops *crops,
                  const SeekTables *seek, const Target *target, uint8_t *status) {
    size_t image_bytes = (size_t)target->width * (size_t)target->height * (size_t)target->channels;
    for (int64_t i = 0; i < images->count; i++) {
        if (status[i] != OK)
            continue;
        const double *box = crops->boxes + 4 * i;
        Stored stored = {images->bytes[i], (size_t)images->lengths[i], seek_of(seek, i)};
        Crop crop = {box[0],        box[1],       box[2], box[3], crops->flips[i] != 0,
                     crops->beyond, crops->filter};
        Target own = *target;
        own.pixels += (size_t)i * image_bytes;
        Status found = guarded_decode(path, scratch, &stored, &crop, &own);
        if (found == DAMAGED && stored.seek.entries) {
            stored.seek = (SeekTable){0}; /* perhaps it is the table that is wrong */
            found = guarded_decode(path, scratch, &stored, &crop, &own);
        }
        status[i] = (uint8_t)found;
        scratch_trim(scratch);
    }
}
