#include "snappy.h"

enum { LONG = 60 }; /* a literal's lengths from here on are in the bytes after the tag */

typedef struct {
    const uint8_t *at, *end;
    uint8_t *begin, *to, *stop; /* of what is unpacked */
} Unpacking;

/* A number in the next bytes; false past the end. */
static bool take_number(Unpacking *u, size_t width, size_t *number) {
    if ((size_t)(u->end - u->at) < width)
        return false;
    *number = 0;
    for (size_t i = 0; i < width; i++)
        *number |= (size_t)*u->at++ << 8 * i;
    return true;
}

static bool take_literal(Unpacking *u, size_t length) {
    size_t wanted = (size_t)(u->stop - u->to);
    length = length < wanted ? length : wanted;
    if ((size_t)(u->end - u->at) < length)
        return false;
    memcpy(u->to, u->at, length);
    u->at += length;
    u->to += length;
    return true;
}

static bool copy_back(Unpacking *u, size_t back, size_t length) {
    size_t wanted = (size_t)(u->stop - u->to);
    length = length < wanted ? length : wanted;
    if (back == 0 || back > (size_t)(u->to - u->begin))
        return false;
    for (size_t i = 0; i < length; i++, u->to++) /* the two may overlap */
        *u->to = u->to[-(ptrdiff_t)back];
    return true;
}

static bool take_element(Unpacking *u) {
    size_t tag, number, back;
    if (!take_number(u, 1, &tag))
        return false;
    number = tag >> 2;
    switch (tag & 3) {
    case 0:
        if (number >= LONG && !take_number(u, number - LONG + 1, &number))
            return false;
        return take_literal(u, number + 1);
    case 1:
        return take_number(u, 1, &back) && copy_back(u, back | tag >> 5 << 8, 4 + (number & 7));
    case 2:
        return take_number(u, 2, &back) && copy_back(u, back, number + 1);
    default:
        return take_number(u, 4, &back) && copy_back(u, back, number + 1);
    }
}

static Status unpack(const uint8_t *bytes, size_t length, int64_t start, uint8_t *to,
                     size_t size) {
    Unpacking u = {bytes, bytes + length, to, to, to + size};
    if (start > 0 && !take_literal(&u, (size_t)start))
        return DAMAGED;
    while (u.to < u.stop)
        if (!take_element(&u))
            return DAMAGED;
    return OK;
}

void snappy_unpack(const Images *spans, const int64_t *starts, const int64_t *ends, uint8_t *out,
                   uint8_t *status) {
    Buffer read = {0};
    int64_t begin = 0;
    for (int64_t i = 0; i < spans->count; begin = ends[i++]) {
        const uint8_t *bytes;
        Status found = image_bytes(&spans->all[i], &read, &bytes);
        if (found == OK)
            found = unpack(bytes, (size_t)spans->all[i].length, starts[i], out + begin,
                           (size_t)(ends[i] - begin));
        status[i] = (uint8_t)found;
    }
    buffer_free(&read);
}
