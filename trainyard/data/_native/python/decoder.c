#include "python/decoder.h"

#include "python/arguments.h"
#include "packed/packed.h"

typedef struct {
    PyObject_HEAD const Path *path;
    Scratch *scratch;
    bool is_busy; /* in a call that has released the interpreter lock */
} Decoder;

static const Path *const PATHS[] = {
#if defined(__x86_64__)
    &path_avx2,
#elif defined(__aarch64__)
    &path_neon,
#endif
    &path_plain,
};
#define NUM_PATHS (sizeof PATHS / sizeof *PATHS)

/* torch's variable for machines of another make: plain C alone, as torch without vectors. */
static bool is_allowed(const Path *path) {
    const char *capability = getenv("ATEN_CPU_CAPABILITY");
    bool is_plain_wanted = capability && !strcmp(capability, "default");
    return path->is_supported() && (path == &path_plain || !is_plain_wanted);
}

PyObject *decoder_paths(void) {
    PyObject *found[NUM_PATHS];
    Py_ssize_t count = 0;
    for (size_t i = 0; i < NUM_PATHS; i++)
        if (is_allowed(PATHS[i]))
            found[count++] = PyUnicode_FromString(PATHS[i]->name);
    PyObject *paths = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!paths || !found[i])
            return NULL; /* no memory, when the process begins */
        PyTuple_SetItem(paths, i, found[i]);
    }
    return paths;
}

static const Path *find_path(const char *name) {
    for (size_t i = 0; i < NUM_PATHS; i++)
        if ((!name || !strcmp(name, PATHS[i]->name)) && is_allowed(PATHS[i]))
            return PATHS[i];
    return NULL;
}

static PyObject *new_decoder(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", NULL};
    const char *name = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|z", names, &name))
        return NULL;
    const Path *path = find_path(name);
    if (!path)
        return PyErr_Format(PyExc_ValueError, "path %s: this machine cannot run it", name);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Decoder *self = (Decoder *)allocate(type, 0);
    if (!self)
        return NULL;
    self->path = path;
    self->scratch = scratch_new();
    if (self->scratch)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static void free_decoder(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    scratch_free(((Decoder *)object)->scratch);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *get_path(PyObject *object, void *closure) {
    (void)closure;
    return PyUnicode_FromString(((Decoder *)object)->path->name);
}

/* Two threads in one scratch would overwrite each other's image. */
static bool begin(Decoder *self) {
    if (self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "a Decoder belongs to one thread at a time");
        return false;
    }
    return self->is_busy = true;
}

static PyObject *sizes(PyObject *object, PyObject *args) {
    Decoder *self = (Decoder *)object;
    PyObject *stored[4], *out, *status;
    if (!PyArg_ParseTuple(args, "OOOOOO", &stored[0], &stored[1], &stored[2], &stored[3], &out,
                          &status) ||
        !begin(self))
        return NULL;
    Views views = {0};
    Images images;
    int64_t *to = NULL;
    uint8_t *states = NULL;
    bool is_ready = views_add_images(&views, &images, stored) &&
                    (to = views_add(&views, out, "out_sizes", images.count * 16, true)) &&
                    (states = views_add(&views, status, "out_status", images.count, true));
    if (is_ready) {
        Py_BEGIN_ALLOW_THREADS;
        batch_sizes(&images, self->scratch, to, states);
        Py_END_ALLOW_THREADS;
    }
    views_release(&views);
    self->is_busy = false;
    return is_ready ? Py_NewRef(Py_None) : NULL;
}

/* The arguments of `decode` as Python gives them. */
typedef struct {
    PyObject *stored[4], *boxes, *flips, *out, *status;
    int height, width, bicubic, beyond, channels;
    PyObject *seek;  /* NULL or None: no tables */
    PyObject *drawn; /* NULL: boxes are given, or central */
    BoxRule rule;
} DecodeArguments;

static bool parse_decode(DecodeArguments *a, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"sources", "which",  "offsets", "lengths", "boxes",   "flips",
                            "out",     "status", "height",  "width",   "bicubic", "beyond",
                            "seek",    "channels", "drawn", "ratio",   "central", NULL};
    *a = (DecodeArguments){.channels = 3};
    long long central[4] = {0}; /* see BoxRule: size, then covered */
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOO|$iippOiO(dd)(LLLL)", names, &a->stored[0], &a->stored[1],
            &a->stored[2], &a->stored[3], &a->boxes, &a->flips, &a->out, &a->status, &a->height,
            &a->width, &a->bicubic, &a->beyond, &a->seek, &a->channels, &a->drawn,
            &a->rule.ratio[0], &a->rule.ratio[1], &central[0], &central[1], &central[2],
            &central[3]))
        return false;
    a->rule.kind = a->drawn ? RANDOM : central[0] ? CENTRAL : GIVEN;
    for (int axis = 0; axis < 2; axis++) {
        a->rule.size[axis] = central[axis];
        a->rule.covered[axis] = central[axis + 2];
        if (a->rule.kind == CENTRAL && (central[axis] < 1 || central[axis + 2] < 1)) {
            PyErr_SetString(PyExc_ValueError, "central: at least 1 pixel");
            return false;
        }
    }
    if (a->height < 1 || a->width < 1 || a->height > 65535 || a->width > 65535) {
        PyErr_SetString(PyExc_ValueError, "height and width: 1 to 65535");
        return false;
    }
    if (a->channels != 1 && a->channels != 3) {
        PyErr_SetString(PyExc_ValueError, "channels: 1 or 3");
        return false;
    }
    if (a->seek == Py_None)
        a->seek = NULL;
    return true;
}

/* The seek tables of `count` images. */
static bool add_seek(Views *views, Images *seek, PyObject *spans, int64_t count) {
    PyObject *stored[4];
    *seek = (Images){0};
    if (!spans)
        return true;
    if (!PyArg_ParseTuple(spans, "OOOO", &stored[0], &stored[1], &stored[2], &stored[3]) ||
        !views_add_images(views, seek, stored))
        return false;
    if (seek->count == count)
        return true;
    PyErr_SetString(PyExc_ValueError, "seek: one table for each image");
    return false;
}

static PyObject *decode(PyObject *object, PyObject *args, PyObject *kwargs) {
    Decoder *self = (Decoder *)object;
    DecodeArguments a;
    if (!parse_decode(&a, args, kwargs) || !begin(self))
        return NULL;
    Views views = {0}, of_seek = {0};
    Images images, seek;
    Crops crops = {.beyond = a.beyond, .filter = a.bicubic ? BICUBIC : BILINEAR, .rule = a.rule};
    Target target = {.width = a.width, .height = a.height, .channels = a.channels};
    uint8_t *status = NULL;
    int64_t pixels = (int64_t)a.channels * a.width * a.height;
    bool is_ready =
        views_add_images(&views, &images, a.stored) && add_seek(&of_seek, &seek, a.seek, images.count) &&
        (crops.boxes = views_add(&views, a.boxes, "boxes", images.count * 32, true)) &&
        (!a.drawn || (crops.rule.drawn = views_add(&views, a.drawn, "drawn",
                                                   images.count * 8 * DRAWN, false))) &&
        (crops.flips = views_add(&views, a.flips, "flips", images.count, false)) &&
        (target.pixels = views_add(&views, a.out, "out", images.count * pixels, true)) &&
        (status = views_add(&views, a.status, "status", images.count, true));
    if (is_ready) {
        Py_BEGIN_ALLOW_THREADS;
        batch_decode(self->path, self->scratch, &images, &crops, &seek, &target, status);
        Py_END_ALLOW_THREADS;
    }
    views_release(&views);
    views_release(&of_seek);
    self->is_busy = false;
    return is_ready ? Py_NewRef(Py_None) : NULL;
}

/* Bytes made of bytes, in `made`. */
typedef Status (*Conversion)(Decoder *self, const uint8_t *bytes, size_t size, Buffer *made,
                             size_t *made_size);

/* None unless the status is OK. */
static PyObject *convert(PyObject *object, PyObject *content, Conversion conversion) {
    Decoder *self = (Decoder *)object;
    Views views = {0};
    const uint8_t *bytes = views_add(&views, content, "content", ANY_SIZE, false);
    if (!bytes || !begin(self)) {
        views_release(&views);
        return NULL;
    }
    Buffer made = {0};
    size_t size = 0;
    Status status;
    Py_BEGIN_ALLOW_THREADS;
    status = conversion(self, bytes, (size_t)views.views[0].len, &made, &size);
    Py_END_ALLOW_THREADS;
    PyObject *result = status == OK ? PyBytes_FromStringAndSize(made.data, (Py_ssize_t)size)
                       : status == NO_MEMORY ? PyErr_NoMemory()
                                             : Py_NewRef(Py_None);
    buffer_free(&made);
    views_release(&views);
    self->is_busy = false;
    return result;
}

static Status to_seek_table(Decoder *self, const uint8_t *bytes, size_t size, Buffer *made,
                            size_t *made_size) {
    JpegHeader header;
    Status status = jpeg_read_header(&header, bytes, size);
    if (status != OK)
        return status;
    *made_size = (size_t)seek_num_entries(&header) * sizeof(SeekEntry);
    if (!buffer_reserve(made, *made_size))
        return NO_MEMORY;
    return self->path->seek(self->scratch, &header, bytes, size, made->data);
}

static Status to_record(Decoder *self, const uint8_t *bytes, size_t size, Buffer *made,
                        size_t *made_size) {
    return self->path->pack(self->scratch, bytes, size, made, made_size);
}

static Status to_jpeg(Decoder *self, const uint8_t *bytes, size_t size, Buffer *made,
                      size_t *made_size) {
    (void)self;
    return packed_unpack(bytes, size, made, made_size);
}

static PyObject *seek_table(PyObject *object, PyObject *content) {
    return convert(object, content, to_seek_table);
}

static PyObject *pack(PyObject *object, PyObject *content) {
    return convert(object, content, to_record);
}

static PyObject *unpack(PyObject *object, PyObject *record) {
    return convert(object, record, to_jpeg);
}

/* core.pyi says what each takes and gives. */
static PyMethodDef methods[] = {
    {"sizes", sizes, METH_VARARGS, NULL},
    {"decode", (PyCFunction)(void (*)(void))decode, METH_VARARGS | METH_KEYWORDS, NULL},
    {"seek_table", seek_table, METH_O, NULL},
    {"pack", pack, METH_O, NULL},
    {"unpack", unpack, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef attributes[] = {{"path", get_path, NULL, NULL, NULL}, {0}};

static PyType_Slot slots[] = {
    {Py_tp_new, new_decoder},
    {Py_tp_dealloc, free_decoder},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL},
};

PyType_Spec decoder_spec = {
    .name = "trainyard.data._native.core.Decoder",
    .basicsize = sizeof(Decoder),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
