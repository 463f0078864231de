/* Decompression of zlib streams (RFC 1950, RFC 1951). */
#ifndef TRAINYARD_INFLATE_H
#define TRAINYARD_INFLATE_H

#include "bytes.h"

/* A byte of a stream becomes at most this many. */
#define INFLATE_MOST 1032

/* Decompress a stream that makes exactly `out_size` bytes. DAMAGED for every other: the libraries
 * judge it. */
Status inflate(const uint8_t *bytes, size_t size, uint8_t *out, size_t out_size);

#endif
