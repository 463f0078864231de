/* All that depends on the path; included once by each, after its simd_*.h. */
#ifndef TRAINYARD_PATH_BODY_H
#define TRAINYARD_PATH_BODY_H

#include "simd/path.h"

#include "resize/crop.h"
#include "packed/packed_make.h"
#include "jpeg/seek_make.h"

#define PATH(text)                                                                                 \
    {.name = text,                                                                                 \
     .is_supported = is_supported,                                                                 \
     .decode = decode,                                                                             \
     .seek = make_seek_entries,                                                                    \
     .pack = make_packed}

#endif
