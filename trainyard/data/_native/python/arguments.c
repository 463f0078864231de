#include "python/arguments.h"

static bool make_room(Views *views) {
    if (views->count < views->capacity)
        return true;
    Py_ssize_t capacity = 2 * views->capacity + 16;
    Py_buffer *larger = PyMem_Realloc(views->views, (size_t)capacity * sizeof(Py_buffer));
    if (!larger) {
        PyErr_NoMemory();
        return false;
    }
    views->views = larger;
    views->capacity = capacity;
    return true;
}

void *views_add(Views *views, PyObject *object, const char *name, int64_t size, bool writable) {
    static uint8_t nothing[1]; /* an empty buffer may have no address */
    if (!make_room(views))
        return NULL;
    Py_buffer *view = &views->views[views->count];
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    views->count++;
    if (size != ANY_SIZE && view->len != size)
        return PyErr_Format(PyExc_ValueError, "%s: %zd bytes instead of %zd", name, view->len,
                            (Py_ssize_t)size);
    return view->len ? view->buf : nothing;
}

/* Holds `buffers`, a sequence, one after another. */
static bool add_all(Views *views, PyObject *buffers, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *buffer = PySequence_GetItem(buffers, i);
        bool is_held = buffer && views_add(views, buffer, "buffers", ANY_SIZE, false);
        Py_XDECREF(buffer);
        if (!is_held)
            return false;
    }
    return true;
}

bool views_add_images(Views *views, Images *images, PyObject *const arguments[4]) {
    const int64_t *which = views_add(views, arguments[1], "which", ANY_SIZE, false);
    if (!which)
        return false;
    int64_t count = views->views[views->count - 1].len / 8;
    if (views->views[views->count - 1].len % 8) {
        PyErr_SetString(PyExc_ValueError, "which: no whole number of int64");
        return false;
    }
    const int64_t *offsets = views_add(views, arguments[2], "offsets", count * 8, false);
    const int64_t *lengths =
        offsets ? views_add(views, arguments[3], "lengths", count * 8, false) : NULL;
    Py_ssize_t first = views->count, num_buffers = lengths ? PySequence_Size(arguments[0]) : -1;
    if (num_buffers < 0 || !add_all(views, arguments[0], num_buffers))
        return false;
    views->bytes = PyMem_Calloc((size_t)count + 1, sizeof(uint8_t *));
    if (!views->bytes) {
        PyErr_NoMemory();
        return false;
    }
    for (int64_t i = 0; i < count; i++) {
        bool is_known = which[i] >= 0 && which[i] < num_buffers;
        const Py_buffer *buffer = is_known ? &views->views[first + which[i]] : NULL;
        if (!buffer || offsets[i] < 0 || lengths[i] < 0 || offsets[i] > buffer->len ||
            lengths[i] > buffer->len - offsets[i]) {
            PyErr_Format(PyExc_ValueError, "image %zd lies outside its buffer", (Py_ssize_t)i);
            return false;
        }
        views->bytes[i] = (const uint8_t *)buffer->buf + offsets[i];
    }
    *images = (Images){count, views->bytes, lengths};
    return true;
}

void views_release(Views *views) {
    for (Py_ssize_t i = 0; i < views->count; i++)
        PyBuffer_Release(&views->views[i]);
    PyMem_Free(views->views);
    PyMem_Free((void *)views->bytes);
    *views = (Views){0};
}
