/* Coefficients to the entropy-coded bytes of a JPEG, with the tables that it came with. */
#ifndef TRAINYARD_ENCODE_H
#define TRAINYARD_ENCODE_H

#include "jpeg/jpeg.h"

/* Codes by symbol; a symbol without one has length 0. */
typedef struct {
    uint16_t code[256];
    uint8_t length[256];
} Encoding;

void encoding_make(Encoding *encoding, const JpegCodes *codes);

/* Bits on their way out. A put writes at most 8 bytes at `at`, ff00 for ff. */
typedef struct {
    uint8_t *at;
    uint64_t bits;    /* the lowest `count` are still to be written */
    int count;        /* fewer than 32 between puts */
    bool has_no_code; /* a symbol was wanted that the tables lack */
} BitWriter;

/* Bytes that a block with so many values may take, and a restart marker after it. */
static inline size_t encode_most_bytes(size_t num_values) { return 32 + 8 * num_values; }

/* A block: the difference of its first coefficient to that of the block before, and the others.
 * `mask` says which of them, in zigzag order, are not zero; only those are read. */
void encode_block(BitWriter *writer, const Encoding *dc, const Encoding *ac, int difference,
                  uint64_t mask, const int16_t *zigzag);

/* Fill up the last byte with a bit. */
void encode_align(BitWriter *writer, int fill);

#endif
