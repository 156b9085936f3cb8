/* What token_ids.py does, without a Python integer per token. Compiled into wheels beside it; tests/kv/test_token_ids.py
   holds both to the same answers. What comes in is from the network: every read is checked against the end. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

static PyObject *array_type; /* array.array */

/* The big-endian number in the next bytes. */
static uint64_t take(const uint8_t **at, int num_bytes)
{
    uint64_t value = 0;
    while (num_bytes--)
        value = value << 8 | *(*at)++;
    return value;
}

/* The next id; -1 where there is none of 32 bits. */
static int64_t take_id(const uint8_t **at, const uint8_t *end)
{
    if (*at == end)
        return -1;
    uint8_t head = *(*at)++;
    if (head < 0x80)
        return head;
    /* 0xcc to 0xcf: 1, 2, 4, 8 bytes without a sign; 0xd0 to 0xd3: the same with one. */
    if (head < 0xcc || head > 0xd3)
        return -1;
    int num_bytes = 1 << (head & 3);
    if (end - *at < num_bytes)
        return -1;
    uint64_t value = take(at, num_bytes);
    int is_negative = head >= 0xd0 && value >> (8 * num_bytes - 1);
    return is_negative || value > UINT32_MAX ? -1 : (int64_t)value;
}

/* How many elements an array begins with; -1 where none begins. */
static int64_t take_length(const uint8_t **at, const uint8_t *end)
{
    if (*at == end)
        return -1;
    uint8_t head = *(*at)++;
    if (head >> 4 == 0x9)
        return head & 0xf;
    int num_bytes = head == 0xdc ? 2 : head == 0xdd ? 4 : 0;
    if (!num_bytes || end - *at < num_bytes)
        return -1;
    return (int64_t)take(at, num_bytes);
}

/* The ids as native words in bytes; NULL without an exception where it is no such array. */
static PyObject *words_of(const uint8_t *at, const uint8_t *end)
{
    int64_t length = take_length(&at, end);
    if (length < 0 || length > end - at) /* each takes a byte at least */
        return NULL;
    PyObject *words = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length * 4);
    if (!words)
        return NULL;
    uint32_t *to = (uint32_t *)PyBytes_AS_STRING(words);
    for (int64_t i = 0; i < length; i++) {
        int64_t id = take_id(&at, end);
        if (id < 0) {
            Py_DECREF(words);
            return NULL;
        }
        to[i] = (uint32_t)id;
    }
    if (at != end)
        Py_CLEAR(words);
    return words;
}

static PyObject *read_ids(PyObject *module, PyObject *packed)
{
    Py_buffer view;
    (void)module;
    if (PyObject_GetBuffer(packed, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *words = words_of(view.buf, (const uint8_t *)view.buf + view.len);
    PyBuffer_Release(&view);
    if (!words) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no array of integers of 32 bits");
        return NULL;
    }
    PyObject *ids = PyObject_CallFunction(array_type, "CO", 'I', words);
    Py_DECREF(words);
    return ids;
}

static PyMethodDef methods[] = {
    {"read", read_ids, METH_O, "Read a msgpack array of integers of 32 bits; ValueError when it is none."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "token_ids", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_token_ids(void)
{
    PyObject *array = PyImport_ImportModule("array");
    if (!array)
        return NULL;
    array_type = PyObject_GetAttrString(array, "array");
    Py_DECREF(array);
    return array_type ? PyModule_Create(&definition) : NULL;
}
