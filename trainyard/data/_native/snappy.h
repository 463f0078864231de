/* Images inside Snappy streams: see storage/snappy.py, which is the reference. */
#ifndef TRAINYARD_SNAPPY_H
#define TRAINYARD_SNAPPY_H

#include "python/batch.h"

/* Unpack spans of streams, one after another without the interpreter lock. Span i gives the bytes
 * [ends[i - 1], ends[i]) of `out`; `starts` as in SnappySpan. */
void snappy_unpack(const Images *spans, const int64_t *starts, const int64_t *ends, uint8_t *out,
                   uint8_t *status);

#endif
