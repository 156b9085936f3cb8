/* What running_hash.py does, without steps of Python for each block: xxHash64 (its specification, version 0.1.1) as a running hash.
   tests/kv/test_running_hash.py holds both to the same numbers. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define P1 0x9E3779B185EBCA87u
#define P2 0xC2B2AE3D27D4EB4Fu
#define P3 0x165667B19E3779F9u
#define P4 0x85EBCA77C2B2AE63u
#define P5 0x27D4EB2F165667C5u

enum { STRIPE = 32 };

typedef struct {
    PyObject_HEAD
    uint64_t lanes[4], seed, length; /* of all that was fed, in bytes */
    uint8_t rest[STRIPE];            /* what is not a whole stripe yet */
} State;

static uint64_t little_endian(const uint8_t *at, int num_bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < num_bytes; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

static uint64_t rotated(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

static uint64_t mixed(uint64_t lane, uint64_t word)
{
    return rotated(lane + word * P2, 31) * P1;
}

static void take_stripe(State *s, const uint8_t *at)
{
    for (int i = 0; i < 4; i++)
        s->lanes[i] = mixed(s->lanes[i], little_endian(at + 8 * i, 8));
}

static void begin(State *s, uint64_t seed)
{
    s->lanes[0] = seed + P1 + P2;
    s->lanes[1] = seed + P2;
    s->lanes[2] = seed;
    s->lanes[3] = seed - P1;
    s->seed = seed;
    s->length = 0;
}

static void feed(State *s, const uint8_t *at, size_t num_bytes)
{
    size_t held = s->length % STRIPE;
    s->length += num_bytes;
    if (held + num_bytes >= STRIPE) {
        if (held) {
            memcpy(s->rest + held, at, STRIPE - held);
            take_stripe(s, s->rest);
            at += STRIPE - held;
            num_bytes -= STRIPE - held;
            held = 0;
        }
        for (; num_bytes >= STRIPE; at += STRIPE, num_bytes -= STRIPE)
            take_stripe(s, at);
    }
    memcpy(s->rest + held, at, num_bytes);
}

static uint64_t digest(const State *s)
{
    uint64_t hash = s->seed + P5;
    if (s->length >= STRIPE) {
        static const int turns[4] = {1, 7, 12, 18};
        hash = 0;
        for (int i = 0; i < 4; i++)
            hash += rotated(s->lanes[i], turns[i]);
        for (int i = 0; i < 4; i++)
            hash = (hash ^ mixed(0, s->lanes[i])) * P1 + P4;
    }
    hash += s->length;
    const uint8_t *at = s->rest, *end = at + s->length % STRIPE;
    for (; end - at >= 8; at += 8)
        hash = rotated(hash ^ mixed(0, little_endian(at, 8)), 27) * P1 + P4;
    for (; end - at >= 4; at += 4)
        hash = rotated(hash ^ little_endian(at, 4) * P1, 23) * P2 + P3;
    for (; at < end; at++)
        hash = rotated(hash ^ *at * P5, 11) * P1;
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
}

static PyObject *state_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"data", "seed", NULL};
    Py_buffer view;
    unsigned long long seed = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "y*|K", names, &view, &seed))
        return NULL;
    State *s = (State *)type->tp_alloc(type, 0);
    if (s) {
        begin(s, seed);
        feed(s, view.buf, (size_t)view.len);
    }
    PyBuffer_Release(&view);
    return (PyObject *)s;
}

static PyObject *state_update(PyObject *self, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    feed((State *)self, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *state_copy(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    State *copy = PyObject_New(State, Py_TYPE(self));
    if (copy)
        memcpy((char *)copy + sizeof(PyObject), (char *)self + sizeof(PyObject), sizeof(State) - sizeof(PyObject));
    return (PyObject *)copy;
}

static PyObject *state_intdigest(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    return PyLong_FromUnsignedLongLong(digest((State *)self));
}

static PyMethodDef state_methods[] = {
    {"update", state_update, METH_O, "Feed bytes."},
    {"copy", state_copy, METH_NOARGS, "Another one that has been fed the same."},
    {"intdigest", state_intdigest, METH_NOARGS, "The hash of all that was fed."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject state_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynctl.kv.running_hash.RunningHash",
    .tp_basicsize = sizeof(State),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A running xxHash64.",
    .tp_methods = state_methods,
    .tp_new = state_new,
};

static PyObject *feed_blocks(PyObject *module, PyObject *args)
{
    PyObject *state;
    Py_buffer view;
    Py_ssize_t stride;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!y*n", &state_type, &state, &view, &stride))
        return NULL;
    PyObject *hashes = NULL;
    if (stride < 1)
        PyErr_Format(PyExc_ValueError, "blocks of %zd bytes", stride);
    else
        hashes = PyList_New(view.len / stride);
    for (Py_ssize_t i = 0; hashes && i < view.len / stride; i++) {
        feed((State *)state, (const uint8_t *)view.buf + i * stride, (size_t)stride);
        PyObject *hash = PyLong_FromUnsignedLongLong(digest((State *)state));
        if (hash)
            PyList_SET_ITEM(hashes, i, hash);
        else
            Py_CLEAR(hashes);
    }
    PyBuffer_Release(&view);
    return hashes;
}

static PyMethodDef methods[] = {
    {"feed_blocks", feed_blocks, METH_VARARGS, "Feed whole blocks of so many bytes; the hash behind each."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "running_hash", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_running_hash(void)
{
    PyObject *module = PyType_Ready(&state_type) < 0 ? NULL : PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "RunningHash", (PyObject *)&state_type) < 0)
        Py_CLEAR(module);
    return module;
}
