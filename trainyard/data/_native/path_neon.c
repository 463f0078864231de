/* NEON: every 64-bit ARM processor. */
#if defined(__aarch64__)

#include "simd_neon.h"

#include "expand_neon.h"

#include "path_body.h"

static bool is_supported(void) { return true; }

const Path path_neon = PATH("neon");

#endif
