#include "scratch.h"

/* A crop of 12 megapixels in full colour; what is larger is rare, and given back. */
#define KEPT_BYTES ((size_t)40 << 20)

Scratch *scratch_new(void) { return calloc(1, sizeof(Scratch)); }

static void each_buffer(Scratch *scratch, void (*visit)(Buffer *)) {
    visit(&scratch->entropy);
    visit(&scratch->restarts);
    visit(&scratch->rows);
    visit(&scratch->columns[0]);
    visit(&scratch->columns[1]);
    for (int c = 0; c < 3; c++) {
        visit(&scratch->blocks[c]);
        visit(&scratch->planes[c]);
    }
}

static void trim(Buffer *buffer) {
    if (buffer->capacity > KEPT_BYTES)
        buffer_free(buffer);
}

void scratch_trim(Scratch *scratch) { each_buffer(scratch, trim); }

void scratch_free(Scratch *scratch) {
    if (!scratch)
        return;
    each_buffer(scratch, buffer_free);
    for (int i = 0; i < 2; i++) {
        taps_free(&scratch->x[i]);
        taps_free(&scratch->y[i]);
    }
    free(scratch);
}
