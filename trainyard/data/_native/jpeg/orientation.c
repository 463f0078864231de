/* Nothing here trusts the file: each number is read once and checked before it leads anywhere. */
#include "jpeg/orientation.h"

enum { SOI = 0xD8, EOI = 0xD9, SOS = 0xDA, APP1 = 0xE1, ORIENTATION = 0x0112, ENTRY = 12 };
enum { BYTE = 1, SHORT = 3, LONG = 4 }; /* types of TIFF */

static const char EXIF[] = "Exif\0";                        /* and the zero that ends it */
static const char XMP[] = "http://ns.adobe.com/xap/1.0/";   /* the same */
static const char XMP_TAG[] = "tiff:Orientation";

static uint32_t number_at(const uint8_t *at, int bytes, bool is_little) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint32_t)load_once(at + i) << 8 * (is_little ? i : bytes - 1 - i);
    return value;
}

/* The value of an entry; 0 if it is not one whole number. */
static uint32_t value_of(const uint8_t *entry, bool is_little) {
    uint32_t type = number_at(entry + 2, 2, is_little);
    int bytes = type == BYTE ? 1 : type == SHORT ? 2 : type == LONG ? 4 : 0;
    bool is_one = number_at(entry + 4, 4, is_little) == 1;
    return bytes && is_one ? number_at(entry + 8, bytes, is_little) : 0;
}

/* The orientation in the first directory of a TIFF; -1 if it has none. */
static int in_exif(const uint8_t *tiff, size_t size) {
    if (size < 10)
        return -1;
    bool is_little = tiff[0] == 'I';
    if (memcmp(tiff, "II*\0", 4) != 0 && memcmp(tiff, "MM\0*", 4) != 0)
        return -1;
    size_t first = number_at(tiff + 4, 4, is_little);
    if (first > size - 2)
        return -1;
    size_t count = number_at(tiff + first, 2, is_little), room = (size - first - 2) / ENTRY;
    int found = -1;
    for (size_t i = 0; i < count && i < room; i++) {
        const uint8_t *entry = tiff + first + 2 + i * ENTRY;
        if (number_at(entry, 2, is_little) == ORIENTATION) {
            uint32_t value = value_of(entry, is_little);
            found = value > 8 ? 0 : (int)value;
        }
    }
    return found;
}

/* The orientation in XMP, `tiff:Orientation="6"` or `<tiff:Orientation>6<`; -1 if it has none. */
static int in_xmp(const uint8_t *text, size_t size) {
    size_t length = sizeof XMP_TAG - 1;
    for (size_t at = 0; at + length + 3 <= size; at++) {
        if (memcmp(text + at, XMP_TAG, length) != 0)
            continue;
        const uint8_t *after = text + at + length;
        after += memcmp(after, "=\"", 2) == 0 ? 2 : after[0] == '>' ? 1 : 0;
        int digit = load_once(after) - '0';
        if (after > text + at + length && digit >= 0 && digit <= 9)
            return digit;
    }
    return -1;
}

int jpeg_orientation(const uint8_t *bytes, size_t size) {
    int exif = -1, xmp = -1;
    size_t at = 2;
    while (at + 4 <= size && bytes[at] == 0xFF) {
        int marker = load_once(bytes + at + 1);
        if (marker == 0xFF) { /* a fill byte */
            at++;
            continue;
        }
        if (marker == SOI || marker == EOI || marker == SOS)
            break;
        size_t length = number_at(bytes + at + 2, 2, false);
        if (length < 2 || length > size - at - 2)
            break;
        const uint8_t *content = bytes + at + 4;
        size_t left = length - 2;
        if (marker == APP1 && exif < 0 && left >= sizeof EXIF && !memcmp(content, EXIF, sizeof EXIF))
            exif = in_exif(content + sizeof EXIF, left - sizeof EXIF);
        if (marker == APP1 && left >= sizeof XMP && !memcmp(content, XMP, sizeof XMP))
            xmp = in_xmp(content + sizeof XMP, left - sizeof XMP);
        at += 2 + length;
    }
    int found = exif >= 0 ? exif : xmp;
    return found >= 1 && found <= 8 ? found : 1;
}
