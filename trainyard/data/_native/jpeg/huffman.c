/* Making Huffman tables (ITU-T T.81, annex C and F.2.2.3). */
#include "jpeg/huffman.h"

#define ZERO_RUN 0xF0 /* the symbol of 16 zeros */

Status huffman_check(const JpegCodes *spec, bool is_dc) {
    if (spec->counts == NULL)
        return DAMAGED;
    if (spec->num_symbols == 0)
        return NOT_OURS;
    uint32_t code = 0;
    int num_symbols = 0;
    for (int length = 1; length <= 16; length++) {
        int count = spec->counts[length - 1];
        code = 2 * code + (uint32_t)count;
        num_symbols += count;
        if (count > 0 && code >= 1u << length)
            return DAMAGED;
    }
    if (num_symbols != spec->num_symbols)
        return DAMAGED;
    for (int i = 0; i < num_symbols; i++)
        if (is_dc ? spec->symbols[i] > MAX_DC_SIZE : (spec->symbols[i] & 15) > MAX_AC_SIZE)
            return NOT_OURS;
    return OK;
}

static bool has_codes(const Codes *codes, const JpegCodes *spec) {
    return codes->num_symbols == spec->num_symbols &&
           memcmp(codes->counts, spec->counts, sizeof codes->counts) == 0 &&
           memcmp(codes->symbols, spec->symbols, (size_t)spec->num_symbols) == 0;
}

static void keep_codes(Codes *codes, const JpegCodes *spec) {
    memcpy(codes->counts, spec->counts, sizeof codes->counts);
    memset(codes->symbols, 0, sizeof codes->symbols);
    memcpy(codes->symbols, spec->symbols, (size_t)spec->num_symbols);
    codes->num_symbols = spec->num_symbols;
    int32_t code = 0, place = 0;
    for (int length = 1; length <= 16; length++) {
        int count = codes->counts[length - 1];
        codes->offset[length] = place - code;
        code += count;
        place += count;
        codes->limit[length] = (uint32_t)code << (16 - length);
        code *= 2;
    }
}

Symbol huffman_symbol(const Codes *codes, uint64_t bits) {
    uint32_t next = (uint32_t)(bits >> 48);
    int length = 1;
    for (int i = 1; i <= 16; i++)
        length += next >= codes->limit[i];
    if (length > 16)
        return (Symbol){0};
    int place = (int)(next >> (16 - length)) + codes->offset[length];
    uint8_t symbol = codes->symbols[place & 255];
    int size = symbol & 15;
    int value = (int)(bits << length >> 1 >> (63 - size));
    if (size > 0 && value < 1 << (size - 1))
        value += 1 - (1 << size);
    return (Symbol){(int16_t)value, symbol, (uint8_t)(length + size)};
}

/* What bits mean, of all sizes: [2^size - 1 + bits]. The same in all tables: made but once. */
static void list_values(int16_t *values, int max_size) {
    if (values[1] != 0)
        return;
    for (int size = 1; size <= max_size; size++) {
        int mask = (1 << size) - 1;
        for (int bits = 0; bits <= mask; bits++)
            values[mask + bits] = (int16_t)(bits > mask / 2 ? bits : bits - mask);
    }
}

static void make_dc(DcTable *table) {
    list_values(table->values, MAX_DC_SIZE);
    const uint8_t *symbol = table->codes.symbols;
    DcLookUp *at = table->look_up;
    memset(at, 0, sizeof table->look_up);
    for (int bits = 1; bits <= DC_BITS; bits++) {
        for (int i = 0; i < table->codes.counts[bits - 1]; i++, symbol++) {
            int size = *symbol & 15, length = bits + size;
            for (int j = 0; j < 1 << (DC_BITS - bits); j++)
                *at++ = (DcLookUp){(uint8_t)length, (uint8_t)(64 - length),
                                   (uint16_t)((1 << size) - 1)};
        }
    }
}

/* A symbol as a look-up sees it. */
typedef struct {
    int code;    /* bits of its code */
    int size;    /* bits of its value */
    int length;  /* of both */
    int advance; /* coefficients passed */
} Seen;

static Seen see_symbol(int code, uint8_t symbol) {
    int size = symbol & 15;
    bool ends = size == 0 && symbol != ZERO_RUN;
    return (Seen){code, size, code + size, ends ? END_BLOCK : (symbol >> 4) + 1};
}

/* Look-ups of one symbol alone, from `at` on. */
static void fill_single(AcTable *table, uint32_t at, uint32_t count, Seen seen) {
    AcLookUp single = {.start = (uint8_t)(64 - seen.length),
                       .advance = (uint8_t)seen.advance,
                       .mask = (uint16_t)((1 << seen.size) - 1)};
    for (uint32_t i = at; i < at + count; i++) {
        table->length[i] = (uint8_t)seen.length;
        table->look_up[i] = single;
    }
}

/* To look-ups of one symbol, add the next one where its code is seen too. `singles` are look-ups of
 * the next symbol alone, by its first bits, and `codes` how long their codes are. */
static void fill_pairs(AcTable *table, uint32_t at, Seen first, const AcLookUp *singles,
                       const uint8_t *codes) {
    int left = AC_BITS - first.length;
    for (uint32_t bits = 0; bits < 1u << first.size; bits++) {
        int16_t value = table->values[(1 << first.size) - 1 + bits];
        for (uint32_t next = 0; next < 1u << left; next++, at++) {
            AcLookUp last = singles[next << first.length];
            int start = last.start - first.length;
            if (codes[next << first.length] > left || start < 64 - MAX_AC_LENGTH)
                continue;
            table->length[at] = (uint8_t)(64 - start);
            table->look_up[at] = (AcLookUp){.start = (uint8_t)start,
                                            .advance = (uint8_t)(last.advance + first.advance),
                                            .run = (uint8_t)(first.advance - 1),
                                            .mask = last.mask,
                                            .value = value};
        }
    }
}

static void make_ac(AcTable *table) {
    const Codes *codes = &table->codes;
    uint8_t code_length[1 << AC_BITS];
    AcLookUp singles[1 << AC_BITS];
    list_values(table->values, MAX_AC_SIZE);
    memset(code_length, 255, sizeof code_length); /* longer than any look-up */
    memset(table->length, 0, sizeof table->length);
    for (int i = 0; i < 1 << AC_BITS; i++)
        table->look_up[i] = (AcLookUp){.start = 64, .advance = END_SLOW};
    uint32_t at = 0;
    int place = 0;
    for (int bits = 1; bits <= AC_BITS; bits++) {
        uint32_t count = 1u << (AC_BITS - bits);
        for (int i = 0; i < codes->counts[bits - 1]; i++, place++, at += count) {
            Seen seen = see_symbol(bits, codes->symbols[place]);
            if (seen.length > MAX_AC_LENGTH)
                continue;
            memset(code_length + at, bits, count);
            fill_single(table, at, count, seen);
        }
    }
    memcpy(singles, table->look_up, sizeof singles);
    at = 0;
    place = 0;
    for (int bits = 1; bits <= AC_BITS; bits++) {
        for (int i = 0; i < codes->counts[bits - 1]; i++, place++, at += 1u << (AC_BITS - bits)) {
            Seen seen = see_symbol(bits, codes->symbols[place]);
            if (seen.length < AC_BITS && seen.size > 0)
                fill_pairs(table, at, seen, singles, code_length);
        }
    }
}

/* What follows a symbol in a look-up, added to it where it is not too much. */
static void add_skips(AcTable *table, size_t to, size_t from, size_t count, Seen first) {
    for (size_t i = 0; i < count; i++) {
        unsigned length = (unsigned)first.length + table->skip_length[from + i];
        unsigned advance = (unsigned)first.advance + table->skip_advance[from + i];
        bool fits = length <= MAX_AC_LENGTH && (advance & (END_BLOCK - 1)) <= END_SLOW;
        table->skip_length[to + i] = (uint8_t)(fits ? length : (unsigned)first.length);
        table->skip_advance[to + i] = (uint8_t)(fits ? advance : (unsigned)first.advance);
    }
}

/* What `width` bits tell that begin with a symbol's code. */
static void make_skips_of(AcTable *table, int width, size_t at, Seen seen) {
    size_t count = (size_t)1 << (width - seen.code);
    if (seen.length > MAX_AC_LENGTH)
        return;
    if (seen.advance >= END_BLOCK || seen.length >= width) {
        memset(table->skip_length + at, seen.length, count);
        memset(table->skip_advance + at, seen.advance, count);
        return;
    }
    size_t rest = (size_t)1 << (width - seen.length);
    for (size_t i = 0; i < count; i += rest)
        add_skips(table, at + i, rest, rest, seen);
}

static void make_skip(AcTable *table) {
    const Codes *codes = &table->codes;
    memset(table->skip_length, 0, sizeof table->skip_length);
    memset(table->skip_advance, 0, sizeof table->skip_advance);
    for (int width = 1; width <= SKIP_BITS; width++) {
        size_t at = (size_t)1 << width;
        int place = 0;
        for (int bits = 1; bits <= width; bits++) {
            for (int i = 0; i < codes->counts[bits - 1]; i++, place++) {
                make_skips_of(table, width, at, see_symbol(bits, codes->symbols[place]));
                at += (size_t)1 << (width - bits);
            }
        }
    }
    for (size_t i = (size_t)1 << SKIP_BITS; i < (size_t)2 << SKIP_BITS; i++)
        if (table->skip_length[i] == 0)
            table->skip_advance[i] = END_SLOW;
    table->has_skip = true;
}

void huffman_prepare(DecodeTables *tables, const JpegHeader *header) {
    for (int i = 0; i < header->num_components; i++) {
        const JpegComponent *component = &header->components[i];
        DcTable *dc = &tables->dc[component->dc];
        AcTable *ac = &tables->ac[component->ac];
        if (!has_codes(&dc->codes, &header->dc[component->dc])) {
            keep_codes(&dc->codes, &header->dc[component->dc]);
            make_dc(dc);
        }
        if (!has_codes(&ac->codes, &header->ac[component->ac])) {
            keep_codes(&ac->codes, &header->ac[component->ac]);
            make_ac(ac);
            ac->has_skip = false;
        }
    }
}

void huffman_prepare_skip(DecodeTables *tables, const JpegHeader *header) {
    for (int i = 0; i < header->num_components; i++) {
        AcTable *table = &tables->ac[header->components[i].ac];
        if (!table->has_skip)
            make_skip(table);
    }
}
