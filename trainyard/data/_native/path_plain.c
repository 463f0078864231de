/* Plain C: for machines without the instructions of the other paths, and to check those against. */
#include "simd_plain.h"

#include "expand_plain.h"

#include "path_body.h"

static bool is_supported(void) { return true; }

const Path path_plain = PATH("plain");
