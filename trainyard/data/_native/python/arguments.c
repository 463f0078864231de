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

/* A source of images: a buffer that is held, or an open file. */
typedef struct {
    Py_ssize_t view; /* -1: a file */
    int file;
} SourceOfImages;

/* Holds the buffers among `sources`; the caller frees what this returns. NULL with an exception. */
static SourceOfImages *add_sources(Views *views, PyObject *sources, Py_ssize_t count) {
    SourceOfImages *added = PyMem_Calloc((size_t)count + 1, sizeof *added);
    if (!added)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; added && i < count; i++) {
        PyObject *source = PySequence_GetItem(sources, i);
        bool is_buffer = source && PyObject_CheckBuffer(source), is_held = false;
        added[i] = (SourceOfImages){is_buffer ? views->count : -1, -1};
        if (is_buffer)
            is_held = views_add(views, source, "sources", ANY_SIZE, false);
        else if (source)
            is_held = (added[i].file = PyObject_AsFileDescriptor(source)) >= 0;
        Py_XDECREF(source);
        if (!is_held) {
            PyMem_Free(added);
            added = NULL;
        }
    }
    return added;
}

/* Image `i` of a source. False if it lies outside. */
static bool add_image(Views *views, const SourceOfImages *source, Py_ssize_t i, int64_t offset,
                      int64_t length) {
    if (offset < 0 || length < 0)
        return false;
    views->images[i] = (Image){NULL, source->file, offset, length};
    if (source->view < 0)
        return true;
    const Py_buffer *buffer = &views->views[source->view];
    if (offset > buffer->len || length > buffer->len - offset)
        return false;
    static const uint8_t nothing[1]; /* an empty buffer may have no address */
    views->images[i].bytes = length ? (const uint8_t *)buffer->buf + offset : nothing;
    return true;
}

static bool add_images(Views *views, Images *images, const SourceOfImages *sources,
                       Py_ssize_t num_sources, const int64_t *const spans[3]) {
    for (int64_t i = 0; i < images->count; i++) {
        int64_t which = spans[0][i];
        if (which < 0 || which >= num_sources ||
            !add_image(views, &sources[which], i, spans[1][i], spans[2][i])) {
            PyErr_Format(PyExc_ValueError, "image %zd lies outside its source", (Py_ssize_t)i);
            return false;
        }
    }
    images->all = views->images;
    return true;
}

bool views_add_images(Views *views, Images *images, PyObject *const arguments[4]) {
    const int64_t *which = views_add(views, arguments[1], "which", ANY_SIZE, false);
    if (!which)
        return false;
    int64_t count = images->count = views->views[views->count - 1].len / 8;
    if (views->views[views->count - 1].len % 8) {
        PyErr_SetString(PyExc_ValueError, "which: no whole number of int64");
        return false;
    }
    const int64_t *offsets = views_add(views, arguments[2], "offsets", count * 8, false);
    const int64_t *lengths =
        offsets ? views_add(views, arguments[3], "lengths", count * 8, false) : NULL;
    Py_ssize_t num_sources = lengths ? PySequence_Size(arguments[0]) : -1;
    if (num_sources < 0)
        return false;
    views->images = PyMem_Calloc((size_t)count + 1, sizeof(Image));
    if (!views->images) {
        PyErr_NoMemory();
        return false;
    }
    SourceOfImages *sources = add_sources(views, arguments[0], num_sources);
    const int64_t *const spans[] = {which, offsets, lengths};
    bool is_added = sources && add_images(views, images, sources, num_sources, spans);
    PyMem_Free(sources);
    return is_added;
}

void views_release(Views *views) {
    for (Py_ssize_t i = 0; i < views->count; i++)
        PyBuffer_Release(&views->views[i]);
    PyMem_Free(views->views);
    PyMem_Free(views->images);
    *views = (Views){0};
}
