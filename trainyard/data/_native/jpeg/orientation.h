/* How a camera was held: the orientation in a JPEG's EXIF or XMP. */
#ifndef TRAINYARD_ORIENTATION_H
#define TRAINYARD_ORIENTATION_H

#include "bytes.h"

/* 1 to 8 (EXIF 2.3, tag 0x0112), as Pillow finds it; 1 where nothing, or nonsense, is written. */
int jpeg_orientation(const uint8_t *bytes, size_t size);

#endif
