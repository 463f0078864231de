/* PNG files (W3C, third edition): 8 bits a sample, not interlaced; the rest is left to Pillow. */
#ifndef TRAINYARD_PNG_H
#define TRAINYARD_PNG_H

#include "scratch.h"
#include "resize/plane.h"

typedef struct {
    int width, height;
    int samples; /* bytes of a pixel */
    const uint8_t *palette;
    int num_colours;       /* of the palette; 0: none */
    size_t data, num_data; /* the first IDAT chunk, and the bytes of all */
    bool is_split;         /* into several of them */
} PngHeader;

static inline bool png_is_one(const uint8_t *bytes, size_t size) {
    return size >= 8 && memcmp(bytes, "\x89PNG\r\n\x1a\n", 8) == 0;
}

/* Read all chunks but the pixels. OK for what png_planes takes; NOT_OURS also for what can hold an
 * orientation or a second image. */
Status png_read_header(PngHeader *header, const uint8_t *bytes, size_t size);

/* The samples of the whole image, in the scratch: a plane of grey, or red, green and blue. */
Status png_planes(Plane planes[3], Scratch *scratch, const PngHeader *header, const uint8_t *bytes,
                  size_t size);

/* Grey, or RGB. */
static inline Colours png_colours(const PngHeader *header) {
    return header->samples < 3 && !header->num_colours ? GREY : RGB;
}

#endif
