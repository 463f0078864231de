/* Files: read whole, hinted at, and what happens when a mapped one cannot be read. */
#ifndef TRAINYARD_FILES_H
#define TRAINYARD_FILES_H

#include <setjmp.h>

#include "bytes.h"

/* See read_files in core.pyi. */
typedef struct {
    const char *root;
    const uint8_t *names;
    int64_t names_size;
    const int64_t *begins, *ends, *offsets, *lengths; /* [count] */
    int64_t count;
    uint8_t *out;
    int64_t out_size;
    int32_t *errors; /* [count] */
} FilesToRead;

/* Whether every name and place lies inside its buffer. */
bool files_fit(const FilesToRead *files);
void read_files(const FilesToRead *files);

/* Ask the system to begin reading a stretch of a mapped file. */
void will_need(const uint8_t *bytes, size_t size);

/* Read a byte of a mapped file; whether no storage had to be waited for. */
bool was_in_memory(const uint8_t *byte);

/* Handle SIGBUS: where a guard is set it goes back there, else it ends the process as before.
 * False, with errno, if that is not possible. */
bool guard_bus_errors(void);

/* A place to go back to, by sigsetjmp(guard.back, 0), when a mapped file cannot be read; of one
 * thread, in guards that nest. */
typedef struct BusGuard {
    sigjmp_buf back;
    struct BusGuard *outer;
} BusGuard;

void bus_guard_set(BusGuard *guard);
void bus_guard_release(const BusGuard *guard);

#endif
