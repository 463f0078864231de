/* Files: read whole or by spans, and hinted at. */
#ifndef TRAINYARD_FILES_H
#define TRAINYARD_FILES_H

#include "bytes.h"

/* See read_spans in core.pyi. */
typedef struct {
    const char *root;
    const uint8_t *names;
    int64_t names_size;
    const int64_t *begins, *ends, *starts, *offsets, *lengths; /* [count] */
    int64_t count;
    uint8_t *out;
    int64_t out_size;
    int32_t *files, *errors; /* [count] */
} SpansToRead;

/* Whether every name and place lies inside its buffer. */
bool spans_fit(const SpansToRead *spans);

/* Read them all; returns the seconds in which storage was waited for. */
double read_spans(const SpansToRead *spans);

/* `size` bytes of an open file from `begin`; 0, or an errno, or -1 if it ends before. */
int read_span(int file, uint8_t *to, int64_t size, int64_t begin);

/* Ask the system to begin reading a span of an open file; true if its middle is in memory. */
bool will_need(int file, int64_t size, int64_t begin);

#endif
