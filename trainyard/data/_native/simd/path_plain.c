/* Plain C: for machines without the instructions of the other paths, and to check those against. */
#include "simd/simd_plain.h"

#include "packed/expand_plain.h"

#include "simd/path_body.h"

static bool is_supported(void) { return true; }

const Path path_plain = PATH("plain");
