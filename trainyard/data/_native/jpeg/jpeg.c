/* Reading the header of a JPEG (ITU-T T.81, annex B; JFIF 1.02; Adobe's APP14 marker).
 *
 * Nothing here trusts the file. What is unusual is left to the libraries, even where it is legal.
 */
#include "jpeg/jpeg.h"

#include "jpeg/huffman.h"

#define MAX_SIDE 65500       /* of libjpeg */
#define LONGEST_TRAILER 4096 /* bytes behind the end marker, such as cameras and padding leave */

enum {
    SOF0 = 0xC0,
    SOF1 = 0xC1,
    DHT = 0xC4,
    SOI = 0xD8,
    EOI = 0xD9,
    SOS = 0xDA,
    DQT = 0xDB,
    DRI = 0xDD,
    APP0 = 0xE0,
    APP14 = 0xEE,
    APP15 = 0xEF,
    COM = 0xFE
};

/* What the markers before the scan said. */
typedef struct {
    bool has_frame, has_jfif, has_adobe;
    int adobe_transform;
    bool has_quant[4];
    uint8_t ids[3]; /* of components */
} Markers;

/* The content of a marker segment, behind its length. */
typedef struct {
    const uint8_t *at;
    size_t size;
} Segment;

static Status read_quant(JpegHeader *header, Markers *markers, Segment segment) {
    while (segment.size > 0) {
        int wide = segment.at[0] >> 4, number = segment.at[0] & 15;
        size_t length = wide ? 129 : 65;
        if (wide > 1 || number > 3 || segment.size < length)
            return DAMAGED;
        for (int i = 0; i < 64; i++) {
            uint16_t value = wide ? load_be16(segment.at + 1 + 2 * i) : segment.at[1 + i];
            memcpy(&header->quant[number][natural_place[i]], &value, 2);
        }
        markers->has_quant[number] = true;
        segment.at += length;
        segment.size -= length;
    }
    return OK;
}

static Status read_codes(JpegHeader *header, Segment segment) {
    while (segment.size > 0) {
        if (segment.size < 17)
            return DAMAGED;
        int class = segment.at[0] >> 4, number = segment.at[0] & 15, count = 0;
        for (int i = 1; i <= 16; i++)
            count += segment.at[i];
        size_t length = 17 + (size_t)count;
        if (class > 1 || number > 3 || count > 256 || segment.size < length)
            return DAMAGED;
        JpegCodes codes = {segment.at + 1, segment.at + 17, count};
        *(class ? &header->ac[number] : &header->dc[number]) = codes;
        segment.at += length;
        segment.size -= length;
    }
    return OK;
}

static Status read_component(JpegHeader *header, Markers *markers, int index, const uint8_t *at) {
    uint8_t id = at[0], factors = at[1], quant = at[2];
    int h = factors >> 4, v = factors & 15;
    for (int other = 0; other < index; other++)
        if (markers->ids[other] == id)
            return NOT_OURS;
    if (h < 1 || h > 4 || v < 1 || v > 4 || quant > 3)
        return DAMAGED;
    if (header->num_components == 1)
        h = v = 1; /* the factors of a single component mean nothing: its MCU is one block */
    int most = index == 0 ? 2 : 1;
    if (h > most || v > most)
        return NOT_OURS;
    markers->ids[index] = id;
    header->components[index] = (JpegComponent){.h = h, .v = v, .quant = quant};
    return OK;
}

static void lay_out(JpegHeader *header) {
    header->max_h = header->components[0].h;
    header->max_v = header->components[0].v;
    header->mcus_across = ceil_div(header->width, 8 * header->max_h);
    header->mcus_down = ceil_div(header->height, 8 * header->max_v);
    for (int i = 0; i < header->num_components; i++) {
        JpegComponent *component = &header->components[i];
        component->width = ceil_div(header->width * component->h, header->max_h);
        component->height = ceil_div(header->height * component->v, header->max_v);
        component->blocks_across = header->mcus_across * component->h;
        component->blocks_down = header->mcus_down * component->v;
    }
}

static Status read_frame(JpegHeader *header, Markers *markers, Segment segment) {
    if (markers->has_frame || segment.size < 6)
        return DAMAGED;
    markers->has_frame = true;
    if (segment.at[0] != 8)
        return NOT_OURS;
    header->height = load_be16(segment.at + 1);
    header->width = load_be16(segment.at + 3);
    header->num_components = segment.at[5];
    if (header->width == 0 || segment.size != 6 + 3 * (size_t)header->num_components)
        return DAMAGED;
    if (header->num_components != 1 && header->num_components != 3)
        return NOT_OURS;
    if (header->height == 0 || header->width > MAX_SIDE || header->height > MAX_SIDE)
        return NOT_OURS;
    for (int i = 0; i < header->num_components; i++) {
        Status status = read_component(header, markers, i, segment.at + 6 + 3 * i);
        if (status != OK)
            return status;
    }
    lay_out(header);
    return OK;
}

static void read_application(Markers *markers, int marker, Segment segment) {
    if (marker == APP0 && segment.size >= 14 && memcmp(segment.at, "JFIF", 5) == 0)
        markers->has_jfif = true;
    if (marker == APP14 && segment.size >= 12 && memcmp(segment.at, "Adobe", 5) == 0) {
        markers->has_adobe = true;
        markers->adobe_transform = segment.at[11];
    }
}

/* As libjpeg guesses it; where markers contradict each other it is not ours. */
static bool is_ycbcr(const Markers *markers) {
    if (markers->has_adobe)
        return markers->adobe_transform == 1;
    return markers->has_jfif || memcmp(markers->ids, "RGB", 3) != 0;
}

static Status check_component(const JpegHeader *header, const Markers *markers, int index) {
    const JpegComponent *component = &header->components[index];
    if (!markers->has_quant[component->quant])
        return DAMAGED;
    Status status = huffman_check(&header->dc[component->dc], true);
    return status == OK ? huffman_check(&header->ac[component->ac], false) : status;
}

static Status read_scan(JpegHeader *header, const Markers *markers, Segment segment) {
    if (!markers->has_frame || segment.size < 1)
        return DAMAGED;
    int count = header->num_components;
    if (segment.at[0] != count)
        return NOT_OURS;
    if (segment.size != 4 + 2 * (size_t)count)
        return DAMAGED;
    const uint8_t *spectral = segment.at + 1 + 2 * count; /* all 64 coefficients, all their bits */
    if (spectral[0] != 0 || spectral[1] != 63 || spectral[2] != 0)
        return NOT_OURS;
    if (count == 3 && !is_ycbcr(markers))
        return NOT_OURS;
    for (int i = 0; i < count; i++) {
        const uint8_t *at = segment.at + 1 + 2 * i;
        if (at[0] != markers->ids[i])
            return NOT_OURS;
        uint8_t tables = at[1];
        if (tables >> 4 > 3 || (tables & 15) > 3)
            return DAMAGED;
        header->components[i].dc = tables >> 4;
        header->components[i].ac = tables & 15;
        Status status = check_component(header, markers, i);
        if (status != OK)
            return status;
    }
    return OK;
}

static Status read_segment(JpegHeader *header, Markers *markers, int marker, Segment segment) {
    switch (marker) {
    case DQT:
        return read_quant(header, markers, segment);
    case DHT:
        return read_codes(header, segment);
    case SOF0:
    case SOF1:
        return read_frame(header, markers, segment);
    case SOS:
        return read_scan(header, markers, segment);
    case DRI:
        if (segment.size != 2)
            return DAMAGED;
        header->restart_interval = load_be16(segment.at);
        return OK;
    case COM:
        return OK;
    default:
        if (marker < APP0 || marker > APP15)
            return NOT_OURS; /* progressive, arithmetic, lossless; or reserved */
        read_application(markers, marker, segment);
        return OK;
    }
}

Status jpeg_read_header(JpegHeader *header, const uint8_t *bytes, size_t size) {
    Markers markers = {0};
    *header = (JpegHeader){0};
    if (size < 4 || bytes[0] != 0xFF || bytes[1] != SOI)
        return NOT_OURS;
    size_t at = 2;
    for (;;) {
        if (size - at < 4)
            return DAMAGED;
        if (bytes[at] != 0xFF)
            return NOT_OURS;
        int marker = bytes[at + 1];
        if (marker == 0xFF) { /* a fill byte */
            at++;
            continue;
        }
        if (marker == SOI || marker == EOI)
            return DAMAGED;
        size_t length = load_be16(bytes + at + 2);
        if (length < 2 || length > size - at - 2)
            return DAMAGED;
        Segment segment = {bytes + at + 4, length - 2};
        Status status = read_segment(header, &markers, marker, segment);
        if (status != OK)
            return status;
        at += 2 + length;
        if (marker == SOS) {
            header->scan = at;
            return OK;
        }
    }
}

bool jpeg_is_whole(const uint8_t *bytes, size_t size) {
    size_t first = size > LONGEST_TRAILER ? size - LONGEST_TRAILER : 0;
    for (size_t at = size; at >= first + 2; at--)
        if (bytes[at - 2] == 0xFF && bytes[at - 1] == EOI)
            return true;
    return false;
}
