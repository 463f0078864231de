/* The extension module `core`; core.pyi says what each function takes and gives. */
#include "python/arguments.h"
#include "python/decoder.h"
#include "files.h"
#include "snappy.h"

static PyObject *read_spans_(PyObject *module, PyObject *args) {
    (void)module;
    const char *root;
    PyObject *names, *begins, *ends, *starts, *offsets, *lengths, *out, *files, *errors;
    if (!PyArg_ParseTuple(args, "yOOOOOOOOO", &root, &names, &begins, &ends, &starts, &offsets,
                          &lengths, &out, &files, &errors))
        return NULL;
    Views views = {0};
    SpansToRead spans = {.root = root};
    bool is_ready = (spans.begins = views_add(&views, begins, "begins", ANY_SIZE, false));
    int64_t count = spans.count = is_ready ? views.views[0].len / 8 : 0;
    is_ready = is_ready && (spans.names = views_add(&views, names, "names", ANY_SIZE, false));
    spans.names_size = is_ready ? views.views[1].len : 0;
    is_ready = is_ready && (spans.out = views_add(&views, out, "out", ANY_SIZE, true));
    spans.out_size = is_ready ? views.views[2].len : 0;
    is_ready = is_ready && (spans.ends = views_add(&views, ends, "ends", count * 8, false)) &&
               (spans.starts = views_add(&views, starts, "starts", count * 8, false)) &&
               (spans.offsets = views_add(&views, offsets, "offsets", count * 8, false)) &&
               (spans.lengths = views_add(&views, lengths, "lengths", count * 8, false)) &&
               (spans.files = views_add(&views, files, "files", count * 4, true)) &&
               (spans.errors = views_add(&views, errors, "out_errno", count * 4, true));
    if (is_ready && !spans_fit(&spans)) {
        PyErr_SetString(PyExc_ValueError, "a name or a place lies outside its buffer");
        is_ready = false;
    }
    double waited = 0;
    if (is_ready) {
        Py_BEGIN_ALLOW_THREADS;
        waited = read_spans(&spans);
        Py_END_ALLOW_THREADS;
    }
    views_release(&views);
    return is_ready ? PyFloat_FromDouble(waited) : NULL;
}

static PyObject *will_need_(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *stored[4], *answers;
    if (!PyArg_ParseTuple(args, "OOOOO", &stored[0], &stored[1], &stored[2], &stored[3], &answers))
        return NULL;
    Views views = {0};
    Images images;
    uint8_t *out = NULL;
    bool is_ready = views_add_images(&views, &images, stored) &&
                    (out = views_add(&views, answers, "out", images.count, true));
    if (is_ready) {
        Py_BEGIN_ALLOW_THREADS;
        for (int64_t i = 0; i < images.count; i++) {
            const Image *image = &images.all[i];
            out[i] = image->bytes || will_need(image->file, image->length, image->begin);
        }
        Py_END_ALLOW_THREADS;
    }
    views_release(&views);
    return is_ready ? Py_NewRef(Py_None) : NULL;
}

static bool do_not_fall(const int64_t *ends, int64_t count, int64_t size) {
    for (int64_t i = 0, begin = 0; i < count; begin = ends[i++])
        if (ends[i] < begin || ends[i] > size)
            return false;
    return true;
}

static PyObject *unpack_snappy_(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *stored[4], *from, *to, *target, *states;
    if (!PyArg_ParseTuple(args, "OOOOOOOO", &stored[0], &stored[1], &stored[2], &stored[3], &from,
                          &to, &target, &states))
        return NULL;
    Views views = {0};
    Images spans;
    int64_t *starts = NULL, *ends = NULL;
    uint8_t *out = NULL, *status = NULL;
    bool is_ready = views_add_images(&views, &spans, stored) &&
                    (starts = views_add(&views, from, "starts", spans.count * 8, false)) &&
                    (ends = views_add(&views, to, "ends", spans.count * 8, false)) &&
                    (status = views_add(&views, states, "out_status", spans.count, true)) &&
                    (out = views_add(&views, target, "out", ANY_SIZE, true));
    if (is_ready && !do_not_fall(ends, spans.count, views.views[views.count - 1].len)) {
        PyErr_SetString(PyExc_ValueError, "ends: must not fall, nor exceed `out`");
        is_ready = false;
    }
    if (is_ready) {
        Py_BEGIN_ALLOW_THREADS;
        snappy_unpack(&spans, starts, ends, out, status);
        Py_END_ALLOW_THREADS;
    }
    views_release(&views);
    return is_ready ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef functions[] = {
    {"read_spans", read_spans_, METH_VARARGS, NULL},
    {"will_need", will_need_, METH_VARARGS, NULL},
    {"unpack_snappy", unpack_snappy_, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static bool add_object(PyObject *module, const char *name, PyObject *object) {
    bool is_added = object && PyModule_AddObjectRef(module, name, object) == 0;
    Py_XDECREF(object);
    return is_added;
}

static int fill(PyObject *module) {
    static const struct {
        const char *name;
        long value;
    } NUMBERS[] = {
        {"OK", OK},
        {"NOT_OURS", NOT_OURS},
        {"DAMAGED", DAMAGED},
        {"BAD_BOX", BAD_BOX},
        {"UNREADABLE", UNREADABLE},
        {"NO_MEMORY", NO_MEMORY},
        {"SEEK_ENTRY", sizeof(SeekEntry)},
    };
    for (size_t i = 0; i < sizeof NUMBERS / sizeof *NUMBERS; i++)
        if (PyModule_AddIntConstant(module, NUMBERS[i].name, NUMBERS[i].value) < 0)
            return -1;
    bool is_filled = add_object(module, "paths", decoder_paths()) &&
                     add_object(module, "Decoder", PyType_FromSpec(&decoder_spec));
    return is_filled ? 0 : -1;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "core",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_core(void) { return PyModuleDef_Init(&definition); }
