/* Huffman coding of blocks (ITU-T T.81, annex F.1.2). */
#include "jpeg/encode.h"

void encoding_make(Encoding *encoding, const JpegCodes *codes) {
    memset(encoding, 0, sizeof *encoding);
    unsigned code = 0;
    int number = 0;
    for (int length = 1; length <= 16; length++, code <<= 1)
        for (int i = 0; i < codes->counts[length - 1] && number < codes->num_symbols; i++) {
            uint8_t symbol = codes->symbols[number++];
            encoding->code[symbol] = (uint16_t)code++;
            encoding->length[symbol] = (uint8_t)length;
        }
}

static void write_byte(BitWriter *writer, uint8_t byte) {
    *writer->at++ = byte;
    if (byte == 0xff)
        *writer->at++ = 0;
}

/* At most 32 bits. */
static inline void put(BitWriter *writer, uint32_t bits, int count) {
    writer->bits = writer->bits << count | bits;
    writer->count += count;
    if (writer->count < 32)
        return;
    writer->count -= 32;
    uint32_t word = (uint32_t)(writer->bits >> writer->count);
    if (LIKELY((word & 0x80808080 & ~(word + 0x01010101)) == 0)) { /* no byte is ff */
        for (int i = 0; i < 4; i++)
            writer->at[i] = (uint8_t)(word >> (24 - 8 * i));
        writer->at += 4;
    } else {
        for (int i = 0; i < 4; i++)
            write_byte(writer, (uint8_t)(word >> (24 - 8 * i)));
    }
}

/* A symbol, and behind it the bits of a value that has `size` of them. */
static inline void put_value(BitWriter *writer, const Encoding *encoding, int symbol, int value,
                             int size) {
    uint32_t below = (uint32_t)(value - (value < 0)) & ((1u << size) - 1);
    writer->has_no_code |= encoding->length[symbol] == 0;
    put(writer, (uint32_t)encoding->code[symbol] << size | below, encoding->length[symbol] + size);
}

/* Bits of a number without its sign. */
static inline int bit_length(int value) {
    unsigned size = (unsigned)(value < 0 ? -value : value);
    return size ? 32 - __builtin_clz(size) : 0;
}

void encode_block(BitWriter *writer, const Encoding *dc, const Encoding *ac, int difference,
                  uint64_t mask, const int16_t *zigzag) {
    int size = bit_length(difference);
    writer->has_no_code |= size > 16;
    if (writer->has_no_code)
        return;
    put_value(writer, dc, size, difference, size);
    int last = 0;
    for (; mask; mask &= mask - 1) {
        int place = __builtin_ctzll(mask), run = place - last - 1;
        last = place;
        for (; run > 15; run -= 16)
            put_value(writer, ac, 0xf0, 0, 0);
        size = bit_length(zigzag[place]);
        writer->has_no_code |= size == 0 || size > 15;
        put_value(writer, ac, run << 4 | (size & 15), zigzag[place], size & 15);
    }
    if (last < 63)
        put_value(writer, ac, 0, 0, 0);
}

void encode_align(BitWriter *writer, int fill) {
    int missing = -writer->count & 7;
    put(writer, fill ? (1u << missing) - 1 : 0, missing);
    for (; writer->count > 0; writer->count -= 8)
        write_byte(writer, (uint8_t)(writer->bits >> (writer->count - 8)));
}
