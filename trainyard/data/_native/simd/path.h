/* The same work by different instructions: each path is the same C, compiled for one of them.
 *
 * A path gives the same bits as every other. The best that the machine has is picked at run time,
 * so that one build runs everywhere. */
#ifndef TRAINYARD_PATH_H
#define TRAINYARD_PATH_H

#include "resize/boxes.h"
#include "resize/plane.h"
#include "scratch.h"
#include "jpeg/seek.h"

/* An image as it is stored: a JPEG file, or a packed record.
 *
 * The rows of a record may be left in its file, which begins at a byte of an open one: `bytes` has
 * room for them. */
typedef struct {
    uint8_t *bytes;
    size_t size;
    SeekTable seek;
    bool has_rows;
    int file;
    int64_t begin;
} Stored;

typedef struct {
    double box[4]; /* left, top, right, bottom, in pixels of the stored image */
    bool flip;
    bool beyond; /* whether pixels around the box count, as where one resizes before cropping */
    Filter filter;
    const BoxRule *rule; /* makes the box, of image `number`, once its size is known */
    int64_t number;
} Crop;

typedef struct {
    const char *name;
    bool (*is_supported)(void);

    /* Decode a box, resize it (antialiased) to the target and flip it. */
    Status (*decode)(Scratch *scratch, const Stored *stored, Crop *crop, const Target *target);

    /* The seek table of a JPEG: seek_num_entries() entries. */
    Status (*seek)(Scratch *scratch, const JpegHeader *header, const uint8_t *bytes, size_t size,
                   SeekEntry *entries);

    /* A JPEG as a packed record of its coefficients, at the beginning of `record`; see packed.h. */
    Status (*pack)(Scratch *scratch, const uint8_t *bytes, size_t size, Buffer *record,
                   size_t *record_size);
} Path;

extern const Path path_plain;
#if defined(__x86_64__)
extern const Path path_avx2;
#elif defined(__aarch64__)
extern const Path path_neon;
#endif

#endif
