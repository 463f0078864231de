/* core.Decoder: a path, and the scratch memory of one thread. */
#ifndef TRAINYARD_DECODER_H
#define TRAINYARD_DECODER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec decoder_spec;

/* The names of the paths that this machine can run, the best first: a new tuple. */
PyObject *decoder_paths(void);

#endif
