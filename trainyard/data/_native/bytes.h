/* Bytes, bits and memory: what every other file here stands on. */
#ifndef TRAINYARD_BYTES_H
#define TRAINYARD_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* What came of an image. All but OK leave it to the libraries, which judge. */
typedef enum {
    OK = 0,
    NOT_OURS = 1, /* no baseline JPEG of the usual sampling, no packed record */
    DAMAGED = 2,  /* not what its header promises, or cut short */
    NO_MEMORY = 3,
    BAD_BOX = 4,   /* the box does not lie in the image */
    UNREADABLE = 5 /* its file has been cut short, or the disk fails */
} Status;

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

_Static_assert(sizeof(size_t) == 8, "sizes of images are added up without a check for 32 bits");

static inline uint16_t load_be16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }

static inline uint64_t load_le64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static inline uint64_t load_be64(const uint8_t *at) { return __builtin_bswap64(load_le64(at)); }

static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }
static inline int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int clamp_int(int value, int low, int high) {
    return min_int(max_int(value, low), high);
}
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline size_t round_up(size_t value, size_t step) {
    return (value + step - 1) / step * step;
}

/* Memory that is used again from image to image; it begins at a multiple of 64 bytes. */
typedef struct {
    void *data;
    size_t capacity; /* bytes */
} Buffer;

/* Room for `size` bytes, whose content is undefined; false if there is no memory. */
static inline bool buffer_reserve(Buffer *buffer, size_t size) {
    if (size <= buffer->capacity)
        return true;
    if (size > SIZE_MAX / 2 - 64)
        return false;
    size_t capacity = round_up(size + size / 2, 64);
    free(buffer->data);
    buffer->data = aligned_alloc(64, capacity);
    buffer->capacity = buffer->data ? capacity : 0;
    return buffer->data != NULL;
}

static inline void buffer_free(Buffer *buffer) {
    free(buffer->data);
    *buffer = (Buffer){0};
}

#endif
