/* Fixed-point taps of an antialiased resize; see taps.h. After Pillow's Resample.c
 * (precompute_coeffs) and libjpeg's jdsample.c (fancy upsampling).
 *
 * All in doubles and in the same order on every machine, so that the bits are the same; 8 outputs
 * side by side, so that compilers use the vectors there are. */
#include "resize/taps.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

enum { SIDE_BY_SIDE = 8, PADDING = 3 /* zeros before and after the weights of pixels */ };

typedef double Eight[SIDE_BY_SIDE];

typedef struct {
    double from; /* relative to axis->low, as in a cropped image */
    double scale, support, narrowing;
    int count;        /* of pixels that an output looks at */
    int num_taps;     /* of samples */
    int num_samples;  /* that there are; 0: they are the pixels */
    double near, far; /* what a pixel has of its own sample, and of the one beside it */
} Geometry;

/* What 8 outputs are made of. */
typedef struct {
    int start[SIDE_BY_SIDE], skip[SIDE_BY_SIDE]; /* the first sample; zeros that lead */
    Eight *pixels, *taps;                        /* by tap; the same if the samples are pixels */
} Weights;

static Geometry geometry_of(const Axis *axis, Filter filter, int num_samples, bool smooth) {
    double scale = (axis->to - axis->from) / axis->length, widening = scale < 1 ? 1 : scale;
    double support = (filter == BICUBIC ? 2 : 1) * widening;
    int count = (int)(2 * support);
    count += (count < 2 * support - 1e-9) + (num_samples > 0);
    return (Geometry){.from = axis->from - axis->low,
                      .scale = scale,
                      .support = support,
                      .narrowing = 1 / widening,
                      .count = count,
                      .num_taps = num_samples ? count / 2 + 2 : count,
                      .num_samples = num_samples,
                      .near = smooth ? 0.75 : 1,
                      .far = smooth ? 0.25 : 0};
}

static inline double triangle(double distance) { return distance < 1 ? 1 - distance : 0; }

static inline double cubic(double distance) {
    const double a = -0.5;
    double inner = ((a + 2) * distance - (a + 3)) * distance * distance + 1;
    double outer = (((distance - 5) * distance + 8) * distance - 4) * a;
    return distance < 1 ? inner : distance < 2 ? outer : 0;
}

/* The weights of pixels for outputs [i, i + 8). Upsampling wants pairs: there, the first is even.
 */
static inline __attribute__((always_inline)) void
weigh_pixels(Weights *weights, const Geometry *geometry, const Axis *axis, Filter filter, int i) {
    const int positive = 1 << 20; /* so that rounding is down, always */
    int size = axis->high - axis->low, lowest = 0, highest = 0;
    Eight offset;
    for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
        int output = min_int(i + lane, axis->length - 1);
        double centre = geometry->from + (output + 0.5) * geometry->scale;
        int first = (int)(centre - geometry->support + (positive + 0.5)) - positive;
        weights->skip[lane] = geometry->num_samples ? (first + axis->low) & 1 : 0;
        first -= weights->skip[lane];
        weights->start[lane] = first;
        offset[lane] = first - centre + 0.5;
        lowest = min_int(lowest, first);
        highest = max_int(highest, first);
    }
    for (int k = 0; k < geometry->count; k++)
        for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
            double distance = (offset[lane] + k) * geometry->narrowing;
            distance = distance < 0 ? -distance : distance;
            weights->pixels[k][lane] = filter == BICUBIC ? cubic(distance) : triangle(distance);
        }
    if (lowest < 0 || highest + geometry->count > size)
        for (int k = 0; k < geometry->count; k++)
            for (int lane = 0; lane < SIDE_BY_SIDE; lane++)
                if (weights->start[lane] + k < 0 || weights->start[lane] + k >= size)
                    weights->pixels[k][lane] = 0;
}

/* Taps over pixels 2 p, 2 p + 1, ... to taps over samples p - 1, p, ...: what upsampling would
 * have made of those samples. */
static inline void compose(Weights *weights, const Geometry *geometry, const Axis *axis) {
    int count = geometry->num_taps;
    double near = geometry->near, far = geometry->far;
    for (int j = 0; j < count; j++) {
        const Eight *pixels = (const Eight *)weights->pixels + 2 * j;
        for (int lane = 0; lane < SIDE_BY_SIDE; lane++)
            weights->taps[j][lane] = far * (pixels[-3][lane] + pixels[0][lane]) +
                                     near * (pixels[-2][lane] + pixels[-1][lane]);
    }
    for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
        int start = (weights->start[lane] + axis->low) / 2 - 1;
        weights->start[lane] = start;
        /* Beyond the border the outermost sample is repeated. */
        int zeroth = clamp_int(-start, 0, count - 1);
        int final = clamp_int(geometry->num_samples - 1 - start, 0, count - 1);
        for (int j = 0; j < zeroth; j++) {
            weights->taps[zeroth][lane] += weights->taps[j][lane];
            weights->taps[j][lane] = 0;
        }
        for (int j = final + 1; j < count; j++) {
            weights->taps[final][lane] += weights->taps[j][lane];
            weights->taps[j][lane] = 0;
        }
    }
}

/* To fixed point. What is rounded is the sum up to each tap: so the total is exact, and the errors
 * of neighbours, which look alike, cancel. Outputs [i, i + 8) go into rows of taps->stride. */
static inline void fix(Taps *taps, const Axis *axis, const Weights *weights, int count, int one,
                       int i) {
    const int positive = 1 << 20;
    Eight factor = {0}, sum = {0};
    int before[SIDE_BY_SIDE], used[SIDE_BY_SIDE] = {0}, row[SIDE_BY_SIDE];
    for (int k = 0; k < count; k++)
        for (int lane = 0; lane < SIDE_BY_SIDE; lane++)
            factor[lane] += weights->taps[k][lane];
    for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
        factor[lane] = one / factor[lane];
        before[lane] = positive;
        row[lane] = min_int(i + lane, axis->length - 1);
        row[lane] = axis->flip ? axis->length - 1 - row[lane] : row[lane];
    }
    for (int k = 0; k < count; k++) {
        int fixed[SIDE_BY_SIDE];
        for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
            sum[lane] += weights->taps[k][lane];
            int rounded = (int)(sum[lane] * factor[lane] + (positive + 0.5));
            fixed[lane] = rounded - before[lane];
            before[lane] = rounded;
            used[lane] = fixed[lane] != 0 ? k + 1 : used[lane];
        }
        for (int lane = 0; lane < SIDE_BY_SIDE; lane++)
            if (k >= weights->skip[lane])
                taps->weights[(size_t)row[lane] * taps->stride + k - weights->skip[lane]] =
                    (int16_t)fixed[lane];
    }
    for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
        int start = weights->start[lane] + weights->skip[lane];
        int left = used[lane] - weights->skip[lane];
        taps->start[row[lane]] = start;
        taps->count = max_int(taps->count, left);
        taps->first = min_int(taps->first, start);
        taps->last = max_int(taps->last, start + left);
    }
}

/* No output looks at samples beyond the last: those that would get zeros before their weights. */
static void stay_inside(Taps *taps) {
    for (int i = 0; i < taps->length; i++) {
        int beyond = taps->start[i] + taps->count - taps->last;
        if (beyond <= 0)
            continue;
        int16_t *weights = taps->weights + (size_t)i * taps->stride;
        memmove(weights + beyond, weights, (size_t)(taps->count - beyond) * sizeof *weights);
        memset(weights, 0, (size_t)beyond * sizeof *weights);
        taps->start[i] -= beyond;
    }
}

/* Room for the taps; all weights zero. False if there is no memory. */
static bool reserve(Taps *taps, Weights *weights, const Geometry *geometry, int length) {
    size_t starts = round_up((size_t)length * sizeof(int), 64);
    size_t fixed = (size_t)length * (size_t)geometry->num_taps * sizeof(int16_t);
    size_t pixels = (size_t)geometry->count + 2 * PADDING;
    size_t exact = (pixels + (size_t)geometry->num_taps) * sizeof(Eight);
    if (!buffer_reserve(&taps->memory, starts + fixed) || !buffer_reserve(&taps->exact, exact))
        return false;
    taps->start = taps->memory.data;
    taps->weights = (int16_t *)((char *)taps->memory.data + starts);
    memset(taps->weights, 0, fixed);
    taps->length = length;
    taps->stride = geometry->num_taps;
    taps->count = taps->last = 0;
    taps->first = INT32_MAX;
    Eight *memory = taps->exact.data;
    memset(memory, 0, PADDING * sizeof(Eight));
    memset(memory + PADDING + geometry->count, 0, PADDING * sizeof(Eight));
    weights->pixels = memory + PADDING;
    weights->taps = geometry->num_samples ? memory + pixels : weights->pixels;
    return true;
}

static inline __attribute__((always_inline)) Status make(Taps *taps, const Axis *axis,
                                                         Filter filter, int num_samples,
                                                         bool smooth) {
    Geometry geometry = geometry_of(axis, filter, num_samples, smooth);
    Weights weights;
    if (!reserve(taps, &weights, &geometry, axis->length))
        return NO_MEMORY;
    const int one = min_int(1 << weight_bits(filter), INT16_MAX);
    for (int i = 0; i < axis->length; i += SIDE_BY_SIDE) {
        weigh_pixels(&weights, &geometry, axis, filter, i);
        if (num_samples)
            compose(&weights, &geometry, axis);
        for (int lane = 0; lane < SIDE_BY_SIDE; lane++) {
            weights.start[lane] += num_samples ? 0 : axis->low;
            int lowest = num_samples ? 0 : axis->low;
            weights.skip[lane] = max_int(weights.skip[lane], lowest - weights.start[lane]);
        }
        fix(taps, axis, &weights, geometry.num_taps, one, i);
    }
    stay_inside(taps);
    return OK;
}

Status taps_make(Taps *taps, const Axis *axis, Filter filter) {
    return filter == BICUBIC ? make(taps, axis, BICUBIC, 0, false)
                             : make(taps, axis, BILINEAR, 0, false);
}

Status taps_make_upsampled(Taps *taps, const Axis *axis, Filter filter, int samples, bool smooth) {
    return filter == BICUBIC ? make(taps, axis, BICUBIC, samples, smooth)
                             : make(taps, axis, BILINEAR, samples, smooth);
}
