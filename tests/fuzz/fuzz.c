/* A fuzzing target over the decoder, seek tables and packed records, for libFuzzer.
 *
 * The first 16 bytes of an input choose what is done, the rest is an image: a JPEG or a packed
 * record. Every path that the machine has must give the same status and the same pixels, and what
 * is written of an image (its seek table, its packed record) must decode as the image does. A
 * difference aborts; the sanitizers see the rest. */
#include <stdio.h>

#include "packed/packed.h"
#include "simd/path.h"

#define OPTIONS 16
#define MAX_PIXELS (1 << 12) /* of a crop: larger ones take long and show no more */

static const Path *const PATHS[] = {
    &path_plain,
#if defined(__x86_64__)
    &path_avx2,
#elif defined(__aarch64__)
    &path_neon,
#endif
};
#define NUM_PATHS (sizeof PATHS / sizeof *PATHS)

static Scratch *scratches[NUM_PATHS];

static void demand(int holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        abort();
    }
}

/* A copy that ends where its memory ends, so that a read beyond it is seen. */
static uint8_t *copy_of(const uint8_t *bytes, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, bytes, size);
    return copy;
}

static int size_of(const uint8_t *bytes, size_t size, int *width, int *height) {
    if (packed_is_record(bytes, size))
        return packed_size(bytes, size, width, height) == OK;
    JpegHeader header;
    if (jpeg_read_header(&header, bytes, size) != OK)
        return 0;
    *width = header.width;
    *height = header.height;
    return 1;
}

static Crop crop_of(const uint8_t *options, int width, int height) {
    double left = options[0] / 256.0 * width, top = options[1] / 256.0 * height;
    double right = left + (options[2] + 1) / 256.0 * (width - left);
    double bottom = top + (options[3] + 1) / 256.0 * (height - top);
    static const BoxRule given = {GIVEN};
    Crop crop = {{left, top, right, bottom},
                 options[4] & 1,
                 options[4] & 2,
                 options[4] & 4 ? BICUBIC : BILINEAR,
                 &given,
                 0};
    for (int side = 0; side < 4 && options[4] & 8; side++) /* whole pixels, as training has them */
        crop.box[side] = (int)crop.box[side];
    return crop;
}

/* The decoder makes the box of the image's size, as in training or as in an evaluation. */
static BoxRule rule_of(const uint8_t *options, int side) {
    static double drawn[1][DRAWN];
    for (int i = 0; i < DRAWN; i++)
        drawn[0][i] = options[8 + i % 8] / (i < DRAWN - TRIES ? 256.0 : 128.0) + (i > 1) / 256.0;
    BoxRule rule = {.kind = options[5] & 8 ? RANDOM : CENTRAL, .drawn = drawn, .ratio = {0.5, 2}};
    for (int axis = 0; axis < 2; axis++) {
        rule.size[axis] = side;
        rule.covered[axis] = side + options[8 + axis] % 16;
    }
    return rule;
}

static size_t bytes_of(const Target *target) {
    return (size_t)target->width * (size_t)target->height * (size_t)target->channels;
}

/* Decode by every path; the pixels of the first are left in `pixels`. */
static Status decode_all(const Stored *stored, const Crop *crop, Target target) {
    size_t size = bytes_of(&target);
    uint8_t *first = target.pixels, *other = malloc(size);
    Crop first_crop = *crop;
    Status status = PATHS[0]->decode(scratches[0], stored, &first_crop, &target);
    for (size_t i = 1; i < NUM_PATHS; i++) {
        target.pixels = other;
        Crop own = *crop;
        demand(PATHS[i]->decode(scratches[i], stored, &own, &target) == status,
               "paths differ in status");
        demand(!memcmp(own.box, first_crop.box, sizeof own.box), "paths differ in boxes");
        demand(status != OK || !memcmp(first, other, size), "paths differ in pixels");
    }
    free(other);
    return status;
}

/* Its own seek table and packed record must give the same pixels as the image. */
static void check_derived(const Stored *stored, const Crop *crop, Target target) {
    size_t size = bytes_of(&target);
    uint8_t *expected = target.pixels;
    JpegHeader header;
    if (jpeg_read_header(&header, stored->bytes, stored->size) != OK)
        return;
    target.pixels = malloc(size);
    int count = seek_num_entries(&header);
    SeekEntry *entries = malloc((size_t)count * sizeof *entries);
    if (path_plain.seek(scratches[0], &header, stored->bytes, stored->size, entries) == OK) {
        Stored indexed = *stored;
        indexed.seek = (SeekTable){(const uint8_t *)entries, count};
        demand(decode_all(&indexed, crop, target) == OK, "its seek table does not fit it");
        demand(!memcmp(expected, target.pixels, size), "its seek table changes pixels");
    }
    Buffer record = {0};
    size_t record_size;
    if (path_plain.pack(scratches[0], stored->bytes, stored->size, &record, &record_size) == OK) {
        uint8_t *exact = copy_of(record.data, record_size);
        Stored packed = {.bytes = exact, .size = record_size};
        demand(decode_all(&packed, crop, target) == OK, "its packed record is damaged");
        demand(!memcmp(expected, target.pixels, size), "its packed record changes pixels");
        Buffer jpeg = {0};
        size_t jpeg_size;
        demand(packed_unpack(exact, record_size, &jpeg, &jpeg_size) == OK &&
                   jpeg_size == stored->size && !memcmp(jpeg.data, stored->bytes, jpeg_size),
               "its packed record does not give it back");
        buffer_free(&jpeg);
        free(exact);
    }
    buffer_free(&record);
    free(entries);
    free(target.pixels);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < OPTIONS)
        return 0;
    for (size_t i = 0; i < NUM_PATHS; i++)
        if (!scratches[i])
            scratches[i] = scratch_new();
    const uint8_t *options = data;
    size_t seek_size = (options[5] & 1) ? options[6] * sizeof(SeekEntry) : 0;
    if (seek_size > size - OPTIONS)
        seek_size = 0;
    uint8_t *seek = copy_of(data + OPTIONS, seek_size);
    size_t image_size = size - OPTIONS - seek_size;
    uint8_t *image = copy_of(data + OPTIONS + seek_size, image_size);
    Stored stored = {
        image, image_size, {seek_size ? seek : NULL, (int)(seek_size / sizeof(SeekEntry))}};
    int width = 0, height = 0;
    if (packed_is_record(image, image_size)) {
        Buffer jpeg = {0};
        size_t jpeg_size;
        packed_unpack(image, image_size, &jpeg, &jpeg_size);
        buffer_free(&jpeg);
    }
    if (size_of(image, image_size, &width, &height)) {
        Crop crop = crop_of(options + 8, width, height);
        double *box = crop.box;
        bool is_small = width <= MAX_PIXELS / height; /* else its boxes are made here */
        if (is_small || (box[2] - box[0]) * (box[3] - box[1]) <= MAX_PIXELS) {
            int side = 1 + options[7] % (options[6] & 64 ? 70 : 12);
            BoxRule rule = rule_of(options, side);
            if (is_small && options[5] & 24)
                crop.rule = &rule;
            int channels = options[6] & 32 ? 1 : 3;
            Target target = {NULL, side, side + 3, channels};
            target.pixels = malloc(bytes_of(&target));
            Status status = decode_all(&stored, &crop, target);
            if (status == OK && options[5] & 4 && !seek_size)
                check_derived(&stored, &crop, target);
            free(target.pixels);
        }
    }
    free(image);
    free(seek);
    if (options[6] & 128) /* most inputs find what earlier ones left */
        for (size_t i = 0; i < NUM_PATHS; i++) {
            scratch_free(scratches[i]);
            scratches[i] = NULL;
        }
    return 0;
}
