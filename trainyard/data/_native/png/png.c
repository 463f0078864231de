/* Chunks, filters and planes of PNG files. Nothing here trusts the file. */
#include "png/png.h"

#include "png/inflate.h"

#define MAX_SIDE 65500
#define MAX_PIXELS 178956970LL /* of Pillow's decompression bomb check, twice over */
#define LONGEST_KEYWORD 22

enum { GREY_ONLY = 0, COLOUR = 2, PALETTE = 3, GREY_ALPHA = 4, COLOUR_ALPHA = 6 };

static uint32_t load_be32_once(const uint8_t *at) {
    return (uint32_t)load_once(at) << 24 | (uint32_t)load_once(at + 1) << 16 |
           (uint32_t)load_once(at + 2) << 8 | load_once(at + 3);
}

/* The check sum of a chunk's type and content: of the small ones, bit by bit. */
static uint32_t crc32(const uint8_t *bytes, size_t size) {
    uint32_t crc = 0xFFFFFFFF;
    for (size_t i = 0; i < size; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
    }
    return ~crc;
}

/* A chunk of a file. */
typedef struct {
    const uint8_t *type, *content;
    size_t size;
} Chunk;

static bool is_type(const Chunk *chunk, const char *type) {
    return memcmp(chunk->type, type, 4) == 0;
}

/* Whether the file has a whole chunk at `*at`, after which `*at` is the next one's place. */
static bool next_chunk(Chunk *chunk, const uint8_t *bytes, size_t size, size_t *at) {
    if (size - *at < 12)
        return false;
    size_t length = load_be32_once(bytes + *at);
    if (length > size - *at - 12)
        return false;
    *chunk = (Chunk){bytes + *at + 4, bytes + *at + 8, length};
    *at += length + 12;
    return true;
}

static bool is_sound(const Chunk *chunk) {
    return crc32(chunk->type, chunk->size + 4) == load_be32_once(chunk->content + chunk->size);
}

static Status read_first(PngHeader *header, int *kind, const Chunk *chunk) {
    if (!is_type(chunk, "IHDR") || chunk->size != 13 || !is_sound(chunk))
        return DAMAGED;
    uint32_t width = load_be32_once(chunk->content), height = load_be32_once(chunk->content + 4);
    static const int SAMPLES[] = {1, 0, 3, 1, 2, 0, 4};
    *kind = load_once(chunk->content + 9);
    if (width < 1 || height < 1 || *kind > 6)
        return DAMAGED;
    bool is_usual = chunk->content[8] == 8 && SAMPLES[*kind] && chunk->content[10] == 0 &&
                    chunk->content[11] == 0 && chunk->content[12] == 0;
    if (!is_usual || width > MAX_SIDE || height > MAX_SIDE ||
        (int64_t)width * height > MAX_PIXELS)
        return NOT_OURS;
    header->width = (int)width;
    header->height = (int)height;
    header->samples = SAMPLES[*kind];
    return OK;
}

/* Whether a chunk can change the pixels, or hold an orientation. */
static bool is_unusual(const Chunk *chunk) {
    static const char *const TYPES[] = {"eXIf", "iTXt", "zTXt", "tRNS", "acTL"};
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (is_type(chunk, TYPES[i]))
            return true;
    if (!is_type(chunk, "tEXt"))
        return !(chunk->type[0] & 32) && !is_type(chunk, "IHDR") && !is_type(chunk, "PLTE") &&
               !is_type(chunk, "IDAT"); /* critical, and not known */
    size_t size = chunk->size < LONGEST_KEYWORD ? chunk->size : LONGEST_KEYWORD;
    return (size >= 4 && memcmp(chunk->content, "XML:", 4) == 0) ||
           (size >= 11 && memcmp(chunk->content, "Raw profile", 11) == 0);
}

static Status read_chunk(PngHeader *header, const Chunk *chunk, size_t at) {
    if (is_unusual(chunk))
        return NOT_OURS;
    if (is_type(chunk, "PLTE") && header->samples == 1) {
        if (header->num_colours || chunk->size % 3 || chunk->size < 3 || chunk->size > 768 ||
            !is_sound(chunk))
            return DAMAGED;
        header->palette = chunk->content;
        header->num_colours = (int)(chunk->size / 3);
    }
    if (is_type(chunk, "IDAT")) {
        header->is_split = header->data > 0;
        header->data = header->data ? header->data : at;
        header->num_data += chunk->size;
    }
    return OK;
}

Status png_read_header(PngHeader *header, const uint8_t *bytes, size_t size) {
    *header = (PngHeader){0};
    size_t at = 8, before = 8;
    Chunk chunk;
    int kind;
    if (!png_is_one(bytes, size))
        return NOT_OURS;
    if (!next_chunk(&chunk, bytes, size, &at))
        return DAMAGED;
    Status status = read_first(header, &kind, &chunk);
    for (; status == OK; before = at) {
        before = at;
        if (!next_chunk(&chunk, bytes, size, &at))
            return DAMAGED;
        if (is_type(&chunk, "IEND"))
            break;
        status = read_chunk(header, &chunk, before);
    }
    if (status != OK)
        return status;
    if (kind == GREY_ONLY)
        header->num_colours = 0; /* a palette of grey means nothing */
    bool has_palette = header->num_colours > 0;
    return header->num_data && has_palette == (kind == PALETTE) ? OK : DAMAGED;
}

/* --- pixels --- */

/* The IDAT chunks end to end; that of a file with a single one is where it is. */
static Status join_data(const uint8_t **data, const PngHeader *header, Scratch *scratch,
                        const uint8_t *bytes, size_t size) {
    *data = bytes + header->data + 8;
    if (!header->is_split)
        return OK;
    if (!buffer_reserve(&scratch->entropy, header->num_data))
        return NO_MEMORY;
    uint8_t *to = scratch->entropy.data;
    *data = to;
    size_t left = header->num_data;
    Chunk chunk;
    for (size_t at = header->data; left > 0;) {
        if (!next_chunk(&chunk, bytes, size, &at) || is_type(&chunk, "IEND"))
            return DAMAGED; /* a mapped file that has changed meanwhile */
        if (!is_type(&chunk, "IDAT"))
            continue;
        size_t part = chunk.size < left ? chunk.size : left;
        memcpy(to, chunk.content, part);
        to += part;
        left -= part;
    }
    return OK;
}

static inline uint8_t paeth(int left, int above, int corner) {
    int a = abs(above - corner), b = abs(left - corner), c = abs(left + above - 2 * corner);
    return (uint8_t)(a <= b && a <= c ? left : b <= c ? above : corner);
}

/* Undo the filter of a row in place; `above` is the row before it, or zeros. */
static bool unfilter(uint8_t *row, const uint8_t *above, int filter, size_t size, size_t samples) {
    if (filter > 4)
        return false;
    for (size_t i = 0; i < samples && filter > 1; i++) /* the first pixel has none to its left */
        row[i] = (uint8_t)(row[i] + (filter == 3 ? above[i] >> 1 : above[i]));
    if (filter == 1)
        for (size_t i = samples; i < size; i++)
            row[i] = (uint8_t)(row[i] + row[i - samples]);
    else if (filter == 2)
        for (size_t i = samples; i < size; i++)
            row[i] = (uint8_t)(row[i] + above[i]);
    else if (filter == 3)
        for (size_t i = samples; i < size; i++)
            row[i] = (uint8_t)(row[i] + ((row[i - samples] + above[i]) >> 1));
    else if (filter == 4)
        for (size_t i = samples; i < size; i++)
            row[i] = (uint8_t)(row[i] + paeth(row[i - samples], above[i], above[i - samples]));
    return true;
}

/* A row of pixels to `count` planes. False for a colour that the palette does not have. */
static bool split_row(uint8_t *const to[3], const uint8_t *row, const PngHeader *header,
                      int count) {
    size_t samples = (size_t)header->samples;
    for (int x = 0; x < header->width; x++, row += samples) {
        const uint8_t *pixel = row;
        if (header->num_colours) {
            if (*row >= header->num_colours)
                return false;
            pixel = header->palette + 3 * (size_t)*row;
        }
        for (int c = 0; c < count; c++)
            to[c][x] = pixel[c];
    }
    return true;
}

static Status inflate_rows(Scratch *scratch, const PngHeader *header, const uint8_t *bytes,
                           size_t file_size) {
    size_t line = (size_t)header->width * (size_t)header->samples;
    size_t size = (line + 1) * (size_t)header->height;
    if (size / INFLATE_MOST > header->num_data)
        return DAMAGED;
    /* A row of zeros stands before the first. */
    if (!buffer_reserve(&scratch->rows_of_png, line + size + PLANE_MARGIN))
        return NO_MEMORY;
    const uint8_t *data;
    Status status = join_data(&data, header, scratch, bytes, file_size);
    if (status != OK)
        return status;
    uint8_t *rows = (uint8_t *)scratch->rows_of_png.data + line, *above = rows - line;
    memset(above, 0, line);
    status = inflate(data, header->num_data, rows, size);
    for (int y = 0; y < header->height && status == OK; y++) {
        uint8_t *row = rows + (size_t)y * (line + 1) + 1;
        if (!unfilter(row, above, row[-1], line, (size_t)header->samples))
            status = DAMAGED;
        above = row;
    }
    return status;
}

Status png_planes(Plane planes[3], Scratch *scratch, const PngHeader *header, const uint8_t *bytes,
                  size_t size) {
    Status status = inflate_rows(scratch, header, bytes, size);
    size_t line = (size_t)header->width * (size_t)header->samples;
    size_t stride = round_up((size_t)header->width + PLANE_MARGIN, 64);
    int count = png_colours(header) == GREY ? 1 : 3;
    uint8_t *to[3] = {0};
    for (int c = 0; c < count && status == OK; c++) {
        if (!buffer_reserve(&scratch->planes[c], stride * (size_t)header->height))
            return NO_MEMORY;
        to[c] = scratch->planes[c].data;
        planes[c] = (Plane){to[c], stride, 0, 0};
    }
    for (int y = 0; y < header->height && status == OK; y++) {
        const uint8_t *row =
            (const uint8_t *)scratch->rows_of_png.data + line + (size_t)y * (line + 1) + 1;
        if (!split_row(to, row, header, count))
            return DAMAGED;
        for (int c = 0; c < count; c++)
            to[c] += stride;
    }
    return status;
}
