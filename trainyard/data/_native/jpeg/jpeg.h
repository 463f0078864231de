/* The header of a JPEG: what stands before its entropy-coded bytes (ITU-T T.81, annex B). */
#ifndef TRAINYARD_JPEG_H
#define TRAINYARD_JPEG_H

#include "bytes.h"

typedef struct {
    int h, v;                       /* sampling factors: of luma 1 or 2, of chroma 1 */
    int quant, dc, ac;              /* numbers of its tables */
    int width, height;              /* samples that belong to the image */
    int blocks_across, blocks_down; /* of whole MCUs */
} JpegComponent;

/* A Huffman table as it stands in the file: 16 counts of codes by length, then their symbols. */
typedef struct {
    const uint8_t *counts; /* NULL if there is no such table */
    const uint8_t *symbols;
    int num_symbols;
} JpegCodes;

typedef struct {
    int width, height;  /* pixels */
    int num_components; /* 1: grey; 3: YCbCr */
    int max_h, max_v;   /* of the sampling factors: an MCU has 8 max_h x 8 max_v pixels */
    int mcus_across, mcus_down;
    int restart_interval; /* MCUs; 0: the scan is one piece */
    JpegComponent components[3];
    int16_t quant[4][64];   /* natural order; as libjpeg's, 16 bits that may wrap */
    JpegCodes dc[4], ac[4]; /* point into the file */
    size_t scan;            /* offset of the entropy-coded bytes */
} JpegHeader;

/* Read the header of a file.
 *
 * OK for what the decoder takes: baseline or extended sequential Huffman, 8 bits, grey or YCbCr in
 * one interleaved scan, chroma at full or half resolution in either direction, and every table that
 * the scan names is there and sound. NOT_OURS for other JPEGs and other files, DAMAGED for what no
 * decoder can read. */
Status jpeg_read_header(JpegHeader *header, const uint8_t *bytes, size_t size);

/* The header of planes that are no JPEG's: all components at full resolution. */
static inline JpegHeader jpeg_of_planes(int num_components, int width, int height) {
    JpegHeader header = {.width = width, .height = height, .num_components = num_components};
    header.max_h = header.max_v = 1;
    for (int c = 0; c < num_components; c++)
        header.components[c] = (JpegComponent){.h = 1, .v = 1, .width = width, .height = height};
    return header;
}

/* Whether a file has its end marker, near its end. One that was cut short below a crop would
 * decode, and whether it is a bad sample would depend on the crop. */
bool jpeg_is_whole(const uint8_t *bytes, size_t size);

#endif
