/* Python arguments as C arrays: checked once, before the interpreter lock is released. */
#ifndef TRAINYARD_ARGUMENTS_H
#define TRAINYARD_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/batch.h"

/* The buffers that a call holds. Begin with zeros, end with views_release. */
typedef struct {
    Py_buffer *views;
    Py_ssize_t count, capacity;
    Image *images; /* of a call that has some */
} Views;

#define ANY_SIZE (-1)

/* The memory of a contiguous buffer of `size` bytes; NULL with an exception that names it. */
void *views_add(Views *views, PyObject *object, const char *name, int64_t size, bool writable);

/* The arguments (sources, which, offsets, lengths) of a call. False with an exception. */
bool views_add_images(Views *views, Images *images, PyObject *const arguments[4]);

void views_release(Views *views);

#endif
