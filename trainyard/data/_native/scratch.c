#include "scratch.h"

/* Of each buffer: a plane of 8 megapixels. What takes more is rare, and given back. */
#define KEPT_BYTES ((size_t)8 << 20)

Scratch *scratch_new(void) { return calloc(1, sizeof(Scratch)); }

static void each_buffer(Scratch *scratch, void (*visit)(Buffer *)) {
    visit(&scratch->file);
    visit(&scratch->seek);
    visit(&scratch->entropy);
    visit(&scratch->restarts);
    visit(&scratch->rows);
    for (int i = 0; i < 2; i++) {
        visit(&scratch->columns[i]);
        visit(&scratch->x[i].memory);
        visit(&scratch->x[i].exact);
        visit(&scratch->y[i].memory);
        visit(&scratch->y[i].exact);
    }
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
    free(scratch);
}
