/* [per path] Rows of resized samples to the pixels of a target, which may be YCbCr before (JFIF:
 * BT.601, all of 0 to 255). */
#ifndef TRAINYARD_COLOURS_H
#define TRAINYARD_COLOURS_H

#include "resize/plane.h"
#include "resize/taps.h"

typedef struct {
    Lanes red, green, blue;
} Rgb;

/* 16 pixels; samples and results have `bits` behind the point, and half is added to the results. */
static inline Rgb to_rgb(const int16_t *const rows[3], int x, Colours colours, int bits) {
    Lanes half = splat(1 << (bits - 1)), first = add_saturated(load(rows[0] + x), half);
    if (colours == GREY)
        return (Rgb){first, first, first};
    Lanes second = load(rows[1] + x), third = load(rows[2] + x);
    if (colours == RGB)
        return (Rgb){first, add_saturated(second, half), add_saturated(third, half)};
    Lanes middle = splat(128 << bits);
    Lanes cb = subtract(second, middle), cr = subtract(third, middle);
    Lanes for_red = add(cr, multiply_rounded(cr, splat(13173)));  /* 1.402 */
    Lanes for_blue = add(cb, multiply_rounded(cb, splat(25297))); /* 1.772 */
    Lanes for_green = add(multiply_rounded(cb, splat(11277)),     /* 0.344136 */
                          multiply_rounded(cr, splat(23401)));    /* 0.714136 */
    return (Rgb){add_saturated(first, for_red), subtract_saturated(first, for_green),
                 add_saturated(first, for_blue)};
}

static inline Octets finish(Lanes a, Lanes b, int bits) {
    return pack(shift_right(a, bits), shift_right(b, bits));
}

/* 32 samples of luma; only `count` of them are of the target. */
static inline void store_luma(const Rgb pixels[2], const Target *target, int x, int y, int count,
                              int bits) {
    Octets luma = finish(pixels[0].red, pixels[1].red, bits);
    uint8_t *to = target->pixels + (size_t)y * target->width + x, part[32];
    store_octets(count < 32 ? part : to, luma);
    if (count < 32)
        memcpy(to, part, (size_t)count);
}

/* 32 pixels; only `count` of them are of the target. */
static inline void store_pixels(const Rgb pixels[2], const Target *target, int x, int y, int count,
                                int bits) {
    Octets red = finish(pixels[0].red, pixels[1].red, bits);
    Octets green = finish(pixels[0].green, pixels[1].green, bits);
    Octets blue = finish(pixels[0].blue, pixels[1].blue, bits);
    uint8_t *to = target->pixels + 3 * ((size_t)y * target->width + x), part[96];
    store_rgb(count < 32 ? part : to, red, green, blue);
    if (count < 32)
        memcpy(to, part, 3 * (size_t)count);
}

static inline __attribute__((always_inline)) void
put_row_as(const int16_t *const rows[3], Colours colours, const Target *target, int y, int bits) {
    for (int x = 0; x < target->width; x += 32) {
        Rgb pixels[2] = {to_rgb(rows, x, colours, bits), to_rgb(rows, x + 16, colours, bits)};
        int count = min_int(target->width - x, 32);
        if (colours == GREY && target->channels == 1)
            store_luma(pixels, target, x, y, count, bits);
        else
            store_pixels(pixels, target, x, y, count, bits);
    }
}

/* Row `y` of the target. */
static void put_pixels(const int16_t *const rows[3], Colours colours, Filter filter,
                       const Target *target, int y) {
    if (colours == YCBCR && filter == BILINEAR)
        put_row_as(rows, YCBCR, target, y, sample_bits(BILINEAR));
    else if (colours == YCBCR)
        put_row_as(rows, YCBCR, target, y, sample_bits(BICUBIC));
    else
        put_row_as(rows, colours, target, y, sample_bits(filter));
}

#endif
