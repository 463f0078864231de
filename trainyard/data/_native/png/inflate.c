/* A Huffman code is looked up by its first bits, and by counting where it is longer. Nothing here
 * trusts the stream: what is written is checked against the room that is left. */
#include "png/inflate.h"

#define FAST 9 /* bits that are looked up at once */
#define LONGEST 15
#define MAX_CODES 288

typedef struct {
    uint16_t fast[1 << FAST];    /* symbol << 4 | length; 0: longer than FAST, or no code */
    uint16_t counts[LONGEST + 1]; /* of codes of each length */
    uint16_t symbols[MAX_CODES]; /* in the order of their codes */
} Codes;

typedef struct {
    const uint8_t *at, *end;
    uint64_t bits; /* the next bit is the lowest */
    int count;
    int padding; /* zero bytes taken after the end */
    uint8_t *out, *out_begin, *out_end;
    size_t window;
    Codes lengths, distances;
} Stream;

static const uint16_t LENGTH_BASE[29] = {3,  4,  5,  6,  7,  8,  9,  10,  11,  13,
                                         15, 17, 19, 23, 27, 31, 35, 43,  51,  59,
                                         67, 83, 99, 115, 131, 163, 195, 227, 258};
static const uint8_t LENGTH_BITS[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                        2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
static const uint16_t DISTANCE_BASE[30] = {1,    2,    3,    4,    5,    7,    9,    13,
                                           17,   25,   33,   49,   65,   97,   129,  193,
                                           257,  385,  513,  769,  1025, 1537, 2049, 3073,
                                           4097, 6145, 8193, 12289, 16385, 24577};
static const uint8_t DISTANCE_BITS[30] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                          6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
static const uint8_t ORDER[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};

/* At least 56 bits, which suffice for a length and a distance. */
static inline void refill(Stream *stream) {
    if (LIKELY(stream->end - stream->at >= 8)) {
        stream->bits |= load_le64(stream->at) << stream->count;
        int bytes = (63 - stream->count) >> 3;
        stream->at += bytes;
        stream->count += 8 * bytes;
        return;
    }
    for (; stream->count <= 56; stream->count += 8) {
        if (stream->at < stream->end)
            stream->bits |= (uint64_t)*stream->at++ << stream->count;
        else
            stream->padding++;
    }
}

static inline unsigned take(Stream *stream, int count) {
    unsigned found = (unsigned)(stream->bits & (((uint64_t)1 << count) - 1));
    stream->bits >>= count;
    stream->count -= count;
    return found;
}

/* Whether no more bits were taken than there are. */
static inline bool is_inside(const Stream *stream) { return stream->count >= 8 * stream->padding; }

static unsigned reversed(unsigned code, int length) {
    unsigned found = 0;
    for (int i = 0; i < length; i++)
        found |= (code >> i & 1) << (length - 1 - i);
    return found;
}

/* The codes of symbols by their lengths. False if these are no full set of codes; a single code of
 * one bit, or none, is allowed for distances. */
static bool codes_make(Codes *codes, const uint8_t *lengths, int count, bool may_be_sparse) {
    memset(codes->counts, 0, sizeof codes->counts);
    memset(codes->fast, 0, sizeof codes->fast);
    for (int i = 0; i < count; i++)
        codes->counts[lengths[i]]++;
    int used = count - codes->counts[0];
    codes->counts[0] = 0;
    int left = 1;
    uint16_t places[LONGEST + 2] = {0}, next[LONGEST + 2] = {0};
    for (int length = 1; length <= LONGEST; length++) {
        left = 2 * left - codes->counts[length];
        if (left < 0)
            return false;
        places[length + 1] = (uint16_t)(places[length] + codes->counts[length]);
        next[length + 1] = (uint16_t)((next[length] + codes->counts[length]) << 1);
    }
    if (left > 0 && !(may_be_sparse && used <= 1 && codes->counts[1] == used))
        return false;
    for (int symbol = 0; symbol < count; symbol++) {
        int length = lengths[symbol];
        if (length == 0)
            continue;
        codes->symbols[places[length]++] = (uint16_t)symbol;
        unsigned code = next[length]++;
        if (length <= FAST)
            for (unsigned i = reversed(code, length); i < 1 << FAST; i += 1u << length)
                codes->fast[i] = (uint16_t)(symbol << 4 | length);
    }
    return true;
}

/* A code of more than FAST bits; -1 if there is no such code. */
static int take_long(Stream *stream, const Codes *codes) {
    int code = 0, first = 0, place = 0;
    for (int length = 1; length <= LONGEST; length++) {
        code |= (int)take(stream, 1);
        int count = codes->counts[length];
        if (code - count < first)
            return codes->symbols[place + code - first];
        place += count;
        first = (first + count) << 1;
        code <<= 1;
    }
    return -1;
}

static inline int take_symbol(Stream *stream, const Codes *codes) {
    unsigned found = codes->fast[stream->bits & ((1 << FAST) - 1)];
    if (UNLIKELY(found == 0))
        return take_long(stream, codes);
    take(stream, (int)(found & 15));
    return (int)(found >> 4);
}

/* Bytes that were written before, again. */
static inline bool repeat(Stream *stream, size_t length, size_t distance) {
    size_t written = (size_t)(stream->out - stream->out_begin);
    if (distance > written || distance > stream->window ||
        length > (size_t)(stream->out_end - stream->out))
        return false;
    const uint8_t *from = stream->out - distance;
    if (distance >= length) {
        memcpy(stream->out, from, length);
        stream->out += length;
    } else {
        for (size_t i = 0; i < length; i++)
            *stream->out++ = from[i];
    }
    return true;
}

static Status read_codes(Stream *stream) {
    for (;;) {
        refill(stream);
        int symbol = take_symbol(stream, &stream->lengths);
        if (symbol < 0)
            return DAMAGED;
        if (symbol < 256) {
            if (stream->out == stream->out_end)
                return DAMAGED;
            *stream->out++ = (uint8_t)symbol;
            continue;
        }
        if (symbol == 256)
            return is_inside(stream) ? OK : DAMAGED;
        if (symbol > 285)
            return DAMAGED;
        size_t length = LENGTH_BASE[symbol - 257] + take(stream, LENGTH_BITS[symbol - 257]);
        int far = take_symbol(stream, &stream->distances);
        if (far < 0 || far > 29)
            return DAMAGED;
        size_t distance = DISTANCE_BASE[far] + take(stream, DISTANCE_BITS[far]);
        if (!repeat(stream, length, distance))
            return DAMAGED;
    }
}

/* A block of bytes as they are. */
static Status read_stored(Stream *stream) {
    take(stream, stream->count & 7);
    refill(stream);
    size_t length = take(stream, 16), inverse = take(stream, 16);
    if (length != (inverse ^ 0xFFFF) || !is_inside(stream))
        return DAMAGED;
    stream->at -= stream->count / 8 - stream->padding; /* bytes that were taken in advance */
    stream->bits = 0;
    stream->count = stream->padding = 0;
    if (length > (size_t)(stream->end - stream->at) ||
        length > (size_t)(stream->out_end - stream->out))
        return DAMAGED;
    memcpy(stream->out, stream->at, length);
    stream->at += length;
    stream->out += length;
    return OK;
}

static bool fixed_codes(Stream *stream) {
    uint8_t lengths[MAX_CODES];
    for (int i = 0; i < MAX_CODES; i++)
        lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
    bool is_made = codes_make(&stream->lengths, lengths, MAX_CODES, false);
    memset(lengths, 5, 32);
    return is_made && codes_make(&stream->distances, lengths, 32, false);
}

/* The codes of a block that describes its own. */
static bool own_codes(Stream *stream) {
    refill(stream);
    int num_lengths = (int)take(stream, 5) + 257, num_distances = (int)take(stream, 5) + 1;
    int num_first = (int)take(stream, 4) + 4, count = 0;
    uint8_t first[19] = {0}, lengths[MAX_CODES + 32] = {0};
    if (num_lengths > 286 || num_distances > 30)
        return false;
    for (int i = 0; i < num_first; i++) {
        refill(stream);
        first[ORDER[i]] = (uint8_t)take(stream, 3);
    }
    if (!codes_make(&stream->lengths, first, 19, false))
        return false;
    while (count < num_lengths + num_distances) {
        refill(stream);
        int symbol = take_symbol(stream, &stream->lengths);
        if (symbol < 0 || (symbol == 16 && count == 0))
            return false;
        int times = symbol < 16   ? 1
                    : symbol < 18 ? 3 + (int)take(stream, symbol - 14)
                                  : 11 + (int)take(stream, 7);
        uint8_t length = symbol < 16 ? (uint8_t)symbol : symbol == 16 ? lengths[count - 1] : 0;
        if (times > num_lengths + num_distances - count)
            return false;
        memset(lengths + count, length, (size_t)times);
        count += times;
    }
    return lengths[256] && codes_make(&stream->lengths, lengths, num_lengths, false) &&
           codes_make(&stream->distances, lengths + num_lengths, num_distances, true);
}

static Status read_block(Stream *stream, bool *is_last) {
    refill(stream);
    *is_last = take(stream, 1);
    switch (take(stream, 2)) {
    case 0:
        return read_stored(stream);
    case 1:
        return fixed_codes(stream) ? read_codes(stream) : DAMAGED;
    case 2:
        return own_codes(stream) ? read_codes(stream) : DAMAGED;
    default:
        return DAMAGED;
    }
}

static uint32_t adler32(const uint8_t *bytes, size_t size) {
    uint32_t a = 1, b = 0;
    while (size > 0) {
        size_t part = size < 5552 ? size : 5552; /* more could overflow */
        for (size_t i = 0; i < part; i++) {
            a += bytes[i];
            b += a;
        }
        a %= 65521;
        b %= 65521;
        bytes += part;
        size -= part;
    }
    return b << 16 | a;
}

Status inflate(const uint8_t *bytes, size_t size, uint8_t *out, size_t out_size) {
    if (size < 6)
        return DAMAGED;
    uint8_t method = load_once(bytes), flags = load_once(bytes + 1);
    if ((method & 15) != 8 || method >> 4 > 7 || (method << 8 | flags) % 31 || flags & 32)
        return DAMAGED;
    Stream stream = {.at = bytes + 2, .end = bytes + size, .out = out, .out_begin = out};
    stream.out_end = out + out_size;
    stream.window = (size_t)256 << (method >> 4);
    for (bool is_last = false; !is_last;) {
        Status status = read_block(&stream, &is_last);
        if (status != OK)
            return status;
    }
    take(&stream, stream.count & 7);
    refill(&stream);
    uint32_t sum = __builtin_bswap32(take(&stream, 32));
    bool is_whole = is_inside(&stream) && stream.out == stream.out_end;
    return is_whole && sum == adler32(out, out_size) ? OK : DAMAGED;
}
