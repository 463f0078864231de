/* The yardstick = 1.00: a part of a JPEG by libjpeg-turbo's own crop decode, then a resize.
 *
 * jpeg_crop_scanline() and jpeg_skip_scanlines() spare it what lies outside the crop; transform and
 * upsampling are the accurate ones, which is libjpeg's default, without scaling. One call decodes
 * a slice of a batch. */
#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

#include "resize.h"

typedef struct {
    struct jpeg_decompress_struct jpeg; /* first: see on_error */
    struct jpeg_error_mgr errors;
    jmp_buf failed;
    Resizer resizer;
    uint8_t *pixels;
    size_t pixel_bytes;
} Yardstick;

static void on_error(j_common_ptr jpeg) { longjmp(((Yardstick *)jpeg)->failed, 1); }

static void ignore(j_common_ptr jpeg, int level) { (void)jpeg, (void)level; }

Yardstick *yardstick_new(void) {
    Yardstick *yardstick = calloc(1, sizeof *yardstick);
    yardstick->jpeg.err = jpeg_std_error(&yardstick->errors);
    yardstick->errors.error_exit = on_error;
    yardstick->errors.emit_message = ignore;
    jpeg_create_decompress(&yardstick->jpeg);
    return yardstick;
}

int yardstick_version(void) { return LIBJPEG_TURBO_VERSION_NUMBER; }

/* The rows of the crop, which begins `*left` pixels after the first of them. */
static void decode(Yardstick *yardstick, const uint8_t *bytes, size_t size, const int32_t box[4],
                   int side, JDIMENSION *left, size_t *stride) {
    struct jpeg_decompress_struct *jpeg = &yardstick->jpeg;
    jpeg_mem_src(jpeg, bytes, size);
    jpeg_read_header(jpeg, TRUE);
    jpeg->out_color_space = JCS_RGB;
    jpeg_start_decompress(jpeg);
    JDIMENSION first = (JDIMENSION)box[0], width = (JDIMENSION)(box[2] - box[0]);
    jpeg_crop_scanline(jpeg, &first, &width);
    *left = (JDIMENSION)box[0] - first;
    *stride = ((size_t)width * 3 + 16 + 63) / 64 * 64;
    int rows = box[3] - box[1], spare = 2 * (rows / side + 1) + 1; /* of padded taps */
    yardstick->pixels =
        grown(yardstick->pixels, &yardstick->pixel_bytes, *stride * (size_t)(rows + spare));
    if (box[1])
        jpeg_skip_scanlines(jpeg, (JDIMENSION)box[1]);
    for (int done = 0; done < rows;) {
        JSAMPROW lines[16];
        int some = rows - done < 16 ? rows - done : 16;
        for (int i = 0; i < some; i++)
            lines[i] = yardstick->pixels + *stride * (size_t)(done + i);
        done += (int)jpeg_read_scanlines(jpeg, lines, (JDIMENSION)some);
    }
    jpeg_abort_decompress(jpeg);
}

/* Decode, crop, resize and flip `count` images. Boxes are left, top, right, bottom in whole pixels;
 * out has side x side x 3 bytes of each. Returns how many could not be decoded. */
int yardstick_decode(Yardstick *yardstick, const uint8_t *const *bytes, const int64_t *sizes,
                     const int32_t *boxes, const uint8_t *flips, int count, int side,
                     uint8_t *out) {
    volatile int bad = 0;
    for (volatile int i = 0; i < count; i++) {
        JDIMENSION left;
        size_t stride;
        const int32_t *box = boxes + 4 * i;
        if (setjmp(yardstick->failed)) {
            jpeg_abort_decompress(&yardstick->jpeg);
            bad++;
            continue;
        }
        decode(yardstick, bytes[i], (size_t)sizes[i], box, side, &left, &stride);
        resize(&yardstick->resizer, yardstick->pixels + left * 3, stride, box[2] - box[0],
               box[3] - box[1], side, flips[i], out + (size_t)i * (size_t)(side * side * 3));
    }
    return bad;
}
