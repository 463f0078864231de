/* All that depends on the path; included once by each, after its simd_*.h. */
#ifndef TRAINYARD_PATH_BODY_H
#define TRAINYARD_PATH_BODY_H

#include "path.h"

#include "crop.h"
#include "packed_make.h"
#include "seek_make.h"

#define PATH(text)                                                                                 \
    {.name = text,                                                                                 \
     .is_supported = is_supported,                                                                 \
     .decode = decode,                                                                             \
     .seek = make_seek_entries,                                                                    \
     .pack = make_packed}

#endif
