/* [per path] Blocks of coefficients from bits: ITU-T T.81, F.2.2, by the tables of huffman.h. */
#ifndef TRAINYARD_ENTROPY_H
#define TRAINYARD_ENTROPY_H

#include "jpeg/huffman.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

/* The next bits, the first of them highest. Bits below those counted are zero or what follows. */
typedef struct {
    uint64_t bits;
    uint64_t count; /* 0 to 63 */
    const uint8_t *next;
} BitReader;

/* Afterwards there are at least 56 bits. Up to 8 bytes are read. */
static ALWAYS_INLINE void refill(BitReader *reader) {
    reader->bits |= load_be64(reader->next) >> reader->count;
    reader->next += (reader->count ^ 63) >> 3;
    reader->count |= 56;
}

static ALWAYS_INLINE void drop_bits(BitReader *reader, unsigned length) {
    reader->bits <<= length;
    reader->count -= length;
}

/* A DC difference, or false for a code that does not exist. At least MAX_DC_LENGTH bits are there;
 * the reader is full afterwards. */
static ALWAYS_INLINE bool read_dc(BitReader *reader, const DcTable *table, uint32_t *predictor) {
    const DcLookUp *found = &table->look_up[reader->bits >> (64 - DC_BITS)];
    if (UNLIKELY(found->length == 0)) {
        refill(reader);
        Symbol symbol = huffman_symbol(&table->codes, reader->bits);
        if (symbol.length == 0)
            return false;
        drop_bits(reader, symbol.length);
        *predictor += (uint32_t)(int32_t)symbol.value;
    } else {
        int value = table->values[found->mask + (reader->bits >> found->start & found->mask)];
        *predictor += (uint32_t)value;
        drop_bits(reader, found->length);
    }
    refill(reader);
    return true;
}

static ALWAYS_INLINE size_t next_index(const BitReader *reader) {
    return reader->bits >> (64 - AC_BITS);
}

/* The coefficients of a look-up, from `place` on; returns what comes next. */
static ALWAYS_INLINE const uint8_t *read_pair(BitReader *reader, const AcTable *table, size_t index,
                                              int16_t *block, const uint8_t *place) {
    uint64_t bits = reader->bits;
    drop_bits(reader, table->length[index]);
    const AcLookUp *found = &table->look_up[index];
    block[place[found->run]] = found->value;
    place += found->advance;
    block[place[-1]] = table->values[found->mask + (bits >> (found->start & 63) & found->mask)];
    return place;
}

static ALWAYS_INLINE size_t next_skip(const BitReader *reader) {
    return (1 << SKIP_BITS) + (reader->bits >> (64 - SKIP_BITS));
}

static ALWAYS_INLINE size_t skip_some(BitReader *reader, const AcTable *table, size_t index,
                                      size_t place) {
    drop_bits(reader, table->skip_length[index]);
    return place + table->skip_advance[index];
}

static ALWAYS_INLINE bool block_is_whole(size_t place) {
    return place == 64 || place - END_BLOCK < 64;
}

/* Back by some bits, at most 18, and full again. */
static ALWAYS_INLINE void rewind_bits(BitReader *reader, unsigned length) {
    size_t ahead = reader->count + length, bytes = (ahead + 7) >> 3;
    *reader = (BitReader){.next = reader->next - bytes};
    refill(reader);
    drop_bits(reader, (unsigned)(bytes * 8 - ahead));
    refill(reader);
}

/* One coefficient of any code, which may end the block; the reader is full before and afterwards.
 * The new place, or 0 for damage: a code that does not exist, or a run past the end. */
static ALWAYS_INLINE size_t read_slowly(BitReader *reader, const AcTable *table, int16_t *block,
                                        size_t place) {
    Symbol symbol = huffman_symbol(&table->codes, reader->bits);
    size_t last = place + (symbol.symbol >> 4);
    if (symbol.length == 0)
        return 0;
    drop_bits(reader, symbol.length);
    refill(reader);
    if ((symbol.symbol & 15) == 0 && symbol.symbol != 0xF0)
        return END_BLOCK;
    if (last > 63)
        return 0;
    if (block)
        block[natural_place[last]] = symbol.value;
    return last + 1;
}

/* Not memset, which GCC makes a string instruction of that takes longer than the coefficients. */
static ALWAYS_INLINE void clear_block(int16_t *block) {
    typedef int16_t Quarter __attribute__((vector_size(32), may_alias));
    for (int i = 0; i < 4; i++)
        ((Quarter *)block)[i] = (Quarter){0};
}

/* A block's coefficients in natural order; false for damage. */
static ALWAYS_INLINE bool read_block(BitReader *reader, const DcTable *dc, const AcTable *ac,
                                     uint32_t *predictor, int16_t *block) {
    clear_block(block);
    if (UNLIKELY(!read_dc(reader, dc, predictor)))
        return false;
    const uint8_t *place = natural_place + 1, *const end = natural_place + 64;
    size_t index = next_index(reader);
    for (;;) {
        place = read_pair(reader, ac, index, block, place);
        if (LIKELY(place < end)) {
            index = next_index(reader);
            place = read_pair(reader, ac, index, block, place);
            if (LIKELY(place < end)) {
                index = next_index(reader); /* at least 20 bits are left: no need to wait */
                refill(reader);
                continue;
            }
        }
        if (LIKELY(block_is_whole((size_t)(place - natural_place))))
            break;
        rewind_bits(reader, ac->length[index]);
        size_t next = read_slowly(reader, ac, block,
                                  (size_t)(place - natural_place) - ac->look_up[index].advance);
        if (next == 0)
            return false;
        if (next > 63)
            break;
        place = natural_place + next;
        index = next_index(reader);
    }
    block[0] = (int16_t)*predictor;
    return true;
}

/* Past a block, by lengths alone; false for damage. */
static ALWAYS_INLINE bool skip_block(BitReader *reader, const DcTable *dc, const AcTable *ac,
                                     uint32_t *predictor) {
    if (UNLIKELY(!read_dc(reader, dc, predictor)))
        return false;
    size_t place = 1, index = next_skip(reader);
    for (;;) {
        place = skip_some(reader, ac, index, place);
        if (LIKELY(place < 64)) {
            index = next_skip(reader);
            place = skip_some(reader, ac, index, place);
            if (LIKELY(place < 64)) {
                index = next_skip(reader); /* at least 20 bits are left: no need to wait */
                refill(reader);
                continue;
            }
        }
        if (LIKELY(block_is_whole(place)))
            return true;
        rewind_bits(reader, ac->skip_length[index]);
        place = read_slowly(reader, ac, NULL, place - ac->skip_advance[index]);
        if (place == 0)
            return false;
        if (place > 63)
            return true;
        index = next_skip(reader);
    }
}

#endif
