/* Huffman tables made for decoding: one look-up for a code, the bits behind it, and what follows.
 *
 * A symbol of an AC code is a run of zeros and the size in bits of the coefficient behind them,
 * which follow the code (ITU-T T.81, F.1.2). The tables are looked up by the next bits. */
#ifndef TRAINYARD_HUFFMAN_H
#define TRAINYARD_HUFFMAN_H

#include "jpeg/jpeg.h"

#define DC_BITS 9
#define AC_BITS 10
#define SKIP_BITS 12

/* Bits that a look-up takes at most. After two of AC coefficients, of the 56 of a refill as many
 * are left as a look-up of a DC difference may take. */
#define MAX_DC_LENGTH 20
#define MAX_AC_LENGTH 18

#define MAX_DC_SIZE 11 /* bits of a value, of 8-bit samples */
#define MAX_AC_SIZE 10

/* Where a block stands is its next coefficient, 1 to 64, as read (zigzag order). What ends the fast
 * loop adds so much to it that one comparison finds it out, and another one whether the block is
 * whole: at 64, or from END_BLOCK on by less than 64. */
#define END_SLOW 64   /* the look-up cannot tell: see huffman_symbol */
#define END_BLOCK 128 /* all that is left is zero */
#define MAX_PLACE (END_BLOCK + 63 + 64)

/* Coefficients from zigzag to natural order. What runs past a block's end falls on its DC
 * coefficient (all that is not listed is 0), which is written last. */
static const uint8_t natural_place[MAX_PLACE + 1] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

/* Codes of any length, for those too long for the look-ups. */
typedef struct {
    uint32_t limit[17]; /* codes of a length are below it, in 16 bits from the top; [0] is unused */
    int32_t offset[17]; /* added to the code of a length: the place of its symbol */
    uint8_t symbols[256];
    uint8_t counts[16]; /* with the symbols, what the table was made of */
    int num_symbols;    /* 0: not made yet */
} Codes;

/* All fields of a look-up are read from memory, one by one: that is quicker than to shift them out
 * of a word, since processors have more ways to memory than shifters.
 *
 * A value's bits end where the look-up ends: they are (bits >> start) & mask, and what they mean is
 * in `values`. */
typedef struct {
    uint8_t length; /* bits of code and value; 0: the code is too long */
    uint8_t start;  /* 64 - length */
    uint16_t mask;
} DcLookUp;

/* Up to two coefficients: a first one whose value is known, and a last one. */
typedef struct {
    uint8_t start;   /* 64 - length */
    uint8_t advance; /* coefficients passed: these and the zeros before them; END_... included */
    uint8_t run;     /* zeros before the first */
    uint16_t mask;   /* of the last one's bits */
    int16_t value;   /* of the first; 0 if there is but one, which is written later, or further */
} AcLookUp;

typedef struct {
    DcLookUp look_up[1 << DC_BITS];
    int16_t values[1 << (MAX_DC_SIZE + 1)]; /* [mask + bits] */
    Codes codes;
} DcTable;

typedef struct {
    uint8_t length[1 << AC_BITS]; /* of look-ups: apart, since the next one waits for it */
    AcLookUp look_up[1 << AC_BITS];
    int16_t values[1 << (MAX_AC_SIZE + 1)];

    /* To skip by: length and advance of as many symbols as have their codes in the look-up. What
     * n bits tell begins at 1 << n; that of fewer than SKIP_BITS is what the rest is made of. */
    uint8_t skip_length[2 << SKIP_BITS];
    uint8_t skip_advance[2 << SKIP_BITS];
    bool has_skip; /* made when it is first asked for */
    Codes codes;
} AcTable;

typedef struct {
    DcTable dc[4];
    AcTable ac[4];
} DecodeTables;

/* A symbol and the value behind it. */
typedef struct {
    int16_t value;
    uint8_t symbol;
    uint8_t length; /* bits of both; 0: there is no such code */
} Symbol;

/* Whether a table as it stands in a file is sound: codes fit their lengths, none is all ones, and
 * no symbol asks for more than 8-bit samples can hold. */
Status huffman_check(const JpegCodes *spec, bool is_dc);

/* Make the tables that a header's scan names. Those of the image before are kept where they are the
 * same, as they are with most encoders. */
void huffman_prepare(DecodeTables *tables, const JpegHeader *header);

/* The same, to skip by. */
void huffman_prepare_skip(DecodeTables *tables, const JpegHeader *header);

/* The symbol at the top of `bits`, of which 26 at least are there; for codes of any length. */
Symbol huffman_symbol(const Codes *codes, uint64_t bits);

#endif
