/* NEON: every 64-bit ARM processor. */
#if defined(__aarch64__)

#include "simd/simd_neon.h"

#include "packed/expand_neon.h"

#include "simd/path_body.h"

static bool is_supported(void) { return true; }

const Path path_neon = PATH("neon");

#endif
