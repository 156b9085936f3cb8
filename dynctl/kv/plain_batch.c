/* What plain_batch.py promises, where it is compiled: whole batches of KV events read at once, in the forms engines write.
   What comes in is from the network: every read is checked against the end. Whatever is odd is left to the caller. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { HASHES, PARENT, IDS, SIZE, LORA_ID, MEDIUM, LORA_NAME, EXTRA_KEYS, GROUP, KIND, NUM_FIELDS };

#define NAMED(text) {text, sizeof text - 1}
static const struct {
    const char *text;
    size_t length;
} names[NUM_FIELDS] = {
    NAMED("block_hashes"), NAMED("parent_block_hash"), NAMED("token_ids"),  NAMED("block_size"), NAMED("lora_id"),
    NAMED("medium"),       NAMED("lora_name"),         NAMED("extra_keys"), NAMED("group_idx"),  NAMED("kv_cache_spec_kind"),
};
static const int of_removed[] = {HASHES, MEDIUM, GROUP}; /* in their order as an array; of stored blocks it is as above */
static PyObject *array_type, *stored_type, *removed_type, *cleared_type, *gpu, *device_group, *no_group;

typedef struct {
    const uint8_t *at, *end;
} Reader;

/* The big-endian number in the next bytes. */
static int take(Reader *r, int num_bytes, uint64_t *value)
{
    if (r->end - r->at < num_bytes)
        return 0;
    for (*value = 0; num_bytes--; r->at++)
        *value = *value << 8 | *r->at;
    return 1;
}

static int take_nil(Reader *r)
{
    return r->at != r->end && *r->at == 0xc0 && r->at++;
}

/* The next integer: 1, or -1 for one below 0, in two's complement; 0 where there is none. */
static int take_int(Reader *r, uint64_t *value)
{
    if (r->at == r->end)
        return 0;
    uint8_t head = *r->at++;
    *value = (uint64_t)(int8_t)head;
    if (head < 0x80 || head >= 0xe0)
        return head < 0x80 ? 1 : -1;
    /* 0xcc to 0xcf: 1, 2, 4, 8 bytes without a sign; 0xd0 to 0xd3: the same with one. */
    int num_bytes = 1 << (head & 3);
    if (head < 0xcc || head > 0xd3 || !take(r, num_bytes, value))
        return 0;
    uint64_t sign = (uint64_t)1 << (8 * num_bytes - 1);
    if (head < 0xd0 || *value < sign)
        return 1;
    *value = (*value ^ sign) - sign;
    return -1;
}

/* How many parts follow: up to `mask` in one byte with `head`, more behind `head_8` (0: there is none), then 16 and 32 bits. */
static int take_length(Reader *r, uint8_t head, uint8_t mask, uint8_t head_8, uint8_t head_16, uint64_t *length)
{
    if (r->at == r->end)
        return 0;
    uint8_t first = *r->at++;
    int num_bytes = head_8 && first == head_8 ? 1 : first == head_16 ? 2 : first == head_16 + 1 ? 4 : 0;
    if (mask && (first & ~mask) == head)
        *length = first & mask;
    else if (!num_bytes || !take(r, num_bytes, length))
        return 0;
    return *length <= (uint64_t)(r->end - r->at); /* each part takes a byte at least */
}

static int take_array(Reader *r, uint64_t *length)
{
    return take_length(r, 0x90, 0xf, 0, 0xdc, length);
}

/* ASCII text, as it lies there. */
static int take_text(Reader *r, const char **text, uint64_t *length)
{
    if (!take_length(r, 0xa0, 0x1f, 0xd9, 0xda, length))
        return 0;
    *text = (const char *)r->at;
    int is_ascii = 1;
    for (uint64_t i = 0; i < *length; i++)
        is_ascii &= *r->at++ < 0x80;
    return is_ascii;
}

/* None, an integer, text or lists of such; NULL for anything else, without an exception unless memory is short. */
static PyObject *value(Reader *r, int depth)
{
    const char *text;
    uint64_t number;
    if (r->at == r->end || depth > 4)
        return NULL;
    uint8_t head = *r->at;
    if (take_nil(r))
        return Py_NewRef(Py_None);
    if (head >> 5 == 0xa0 >> 5 || (head >= 0xd9 && head <= 0xdb)) {
        if (!take_text(r, &text, &number))
            return NULL;
        int is_usual = number == 3 && !memcmp(text, "GPU", 3);
        return is_usual ? Py_NewRef(gpu) : PyUnicode_FromStringAndSize(text, (Py_ssize_t)number);
    }
    if (head >> 4 == 0x9 || head == 0xdc || head == 0xdd) {
        PyObject *list = take_array(r, &number) ? PyList_New((Py_ssize_t)number) : NULL;
        for (uint64_t i = 0; list && i < number; i++) {
            PyObject *one = value(r, depth + 1);
            if (one)
                PyList_SET_ITEM(list, (Py_ssize_t)i, one);
            else
                Py_CLEAR(list);
        }
        return list;
    }
    int sign = take_int(r, &number);
    return !sign ? NULL : sign < 0 ? PyLong_FromLongLong((int64_t)number) : PyLong_FromUnsignedLongLong(number);
}

/* An engine's hash: an integer, or the last 64 bits of bytes. */
static PyObject *handle(Reader *r)
{
    uint64_t number = 0, length;
    if (r->at != r->end && *r->at >= 0xc4 && *r->at <= 0xc6) {
        if (!take_length(r, 0, 0, 0xc4, 0xc5, &length))
            return NULL;
        int num_bytes = length < 8 ? (int)length : 8;
        r->at += length - (uint64_t)num_bytes;
        take(r, num_bytes, &number);
    } else if (!take_int(r, &number))
        return NULL;
    return PyLong_FromUnsignedLongLong(number);
}

static PyObject *handles(Reader *r)
{
    uint64_t length;
    int has_room = take_array(r, &length) && length <= (uint64_t)(r->end - r->at) / 2; /* in none that engines make is one byte */
    PyObject *all = has_room ? PyTuple_New((Py_ssize_t)length) : NULL;
    for (uint64_t i = 0; all && i < length; i++) {
        PyObject *one = handle(r);
        if (one)
            PyTuple_SET_ITEM(all, (Py_ssize_t)i, one);
        else
            Py_CLEAR(all);
    }
    return all;
}

/* Token ids as an array of words: no Python integer for each. */
static PyObject *ids(Reader *r)
{
    uint64_t length, id;
    PyObject *words = take_array(r, &length) ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length * 4) : NULL;
    for (uint64_t i = 0; words && i < length; i++) {
        const uint8_t *at = r->at;
        if (r->end - at >= 5 && (*at == 0xcd || *at == 0xce)) { /* nearly all, in no order a processor could guess */
            int is_short = *at == 0xcd;
            id = ((uint32_t)at[1] << 24 | at[2] << 16 | at[3] << 8 | at[4]) >> (is_short ? 16 : 0);
            r->at += is_short ? 3 : 5;
        } else if (take_int(r, &id) != 1 || id > UINT32_MAX) {
            Py_CLEAR(words);
            break;
        }
        ((uint32_t *)PyBytes_AS_STRING(words))[i] = (uint32_t)id;
    }
    PyObject *array = words ? PyObject_CallFunction(array_type, "CO", 'I', words) : NULL;
    Py_XDECREF(words);
    return array;
}

static int is_none_or(PyObject *field, int is_other)
{
    return !field || field == Py_None || is_other;
}

/* Keys of each block: None or a list. */
static int are_keys(PyObject *keys)
{
    int is_plain = PyList_Check(keys);
    for (Py_ssize_t i = 0; is_plain && i < PyList_GET_SIZE(keys); i++) {
        PyObject *one = PyList_GET_ITEM(keys, i);
        is_plain = one == Py_None || PyList_Check(one);
    }
    return is_plain;
}

/* A field into its place; false where it is not what it has to be, or is there twice. */
static int take_field(Reader *r, int name, PyObject **fields)
{
    if (fields[name])
        return 0;
    int is_null = r->at != r->end && *r->at == 0xc0;
    PyObject *field = name == HASHES ? handles(r) : name == IDS ? ids(r) : name == PARENT && !is_null ? handle(r) : value(r, 0);
    fields[name] = field;
    if (!field)
        return 0;
    switch (name) {
    case SIZE:
        return PyLong_Check(field);
    case LORA_ID:
    case GROUP:
        return is_none_or(field, PyLong_Check(field));
    case MEDIUM:
    case LORA_NAME:
    case KIND:
        return is_none_or(field, PyUnicode_Check(field));
    case EXTRA_KEYS:
        return is_none_or(field, are_keys(field));
    default:
        return 1;
    }
}

/* The name of a field, -1 where it is none of an event of this kind. */
static int take_name(Reader *r, int is_stored)
{
    const char *text;
    uint64_t length;
    if (!take_text(r, &text, &length))
        return -1;
    for (int name = 0; name < NUM_FIELDS; name++)
        if (names[name].length == length && !memcmp(names[name].text, text, length))
            return is_stored || name == HASHES || name == MEDIUM || name == GROUP ? name : -1;
    return -1;
}

/* What the fields say; NULL where it does not fit together. */
static PyObject *made(int is_stored, PyObject **f)
{
    int is_on_device = is_none_or(f[MEDIUM], f[MEDIUM] == gpu);
    PyObject *medium = f[MEDIUM] ? f[MEDIUM] : Py_None;
    PyObject *group = !is_none_or(f[GROUP], 0) ? f[GROUP] : is_on_device ? device_group : no_group;
    if (!is_stored)
        return f[HASHES] ? PyObject_CallFunctionObjArgs(removed_type, f[HASHES], medium, group, NULL) : NULL;
    if (!f[HASHES] || !f[PARENT] || !f[IDS] || !f[SIZE])
        return NULL;
    Py_ssize_t number = PyTuple_GET_SIZE(f[HASHES]), size = PyLong_AsSsize_t(f[SIZE]);
    if (size <= 0 || size > 1 << 20 || PyObject_Size(f[IDS]) != number * size)
        return NULL;
    int is_keyed = !is_none_or(f[EXTRA_KEYS], 0);
    if (is_keyed && PyList_GET_SIZE(f[EXTRA_KEYS]) != number)
        return NULL;
    PyObject *keys = is_keyed ? PyList_AsTuple(f[EXTRA_KEYS]) : Py_NewRef(Py_None);
    if (!keys)
        return NULL;
    PyObject *lora_name = f[LORA_NAME] ? f[LORA_NAME] : Py_None, *kind = f[KIND] ? f[KIND] : Py_None;
    PyObject *all[] = {f[HASHES], f[PARENT], f[IDS], f[SIZE], lora_name, keys, medium, group, kind};
    PyObject *event = PyObject_Vectorcall(stored_type, all, 9, NULL);
    Py_DECREF(keys);
    return event;
}

/* An event, as a map that begins with its kind or as an array that does. */
static PyObject *event(Reader *r)
{
    PyObject *fields[NUM_FIELDS] = {NULL}, *one = NULL;
    const char *text;
    uint64_t length, num_text;
    int is_array = r->at != r->end && (*r->at >> 4 == 0x9 || *r->at == 0xdc || *r->at == 0xdd);
    if (!(is_array ? take_array(r, &length) : take_length(r, 0x80, 0xf, 0, 0xde, &length)) || !length)
        return NULL;
    if (!is_array && !(take_text(r, &text, &num_text) && num_text == 4 && !memcmp(text, "type", 4)))
        return NULL;
    if (!take_text(r, &text, &num_text))
        return NULL;
    int is_stored = num_text == 11 && !memcmp(text, "BlockStored", 11);
    int is_removed = num_text == 12 && !memcmp(text, "BlockRemoved", 12);
    int is_cleared = num_text == 16 && !memcmp(text, "AllBlocksCleared", 16);
    uint64_t most = is_stored ? NUM_FIELDS : is_removed ? 3 : 0;
    int is_plain = (is_stored || is_removed || is_cleared) && length - 1 <= most;
    for (uint64_t i = 0; is_plain && i < length - 1; i++) {
        int name = !is_array ? take_name(r, is_stored) : is_stored ? (int)i : of_removed[i];
        is_plain = name >= 0 && take_field(r, name, fields);
    }
    if (is_plain)
        one = is_cleared ? PyObject_CallNoArgs(cleared_type) : made(is_stored, fields);
    for (int i = 0; i < NUM_FIELDS; i++)
        Py_XDECREF(fields[i]);
    return one;
}

/* (time, events, rank); NULL where the batch is not plain. */
static PyObject *batch(Reader *r)
{
    uint64_t num_parts, bits, length;
    double ts;
    if (!take_array(r, &num_parts) || num_parts < 2 || num_parts > 3 || r->at == r->end || *r->at++ != 0xcb)
        return NULL;
    if (!take(r, 8, &bits) || !take_array(r, &length) || length > (uint64_t)(r->end - r->at) / 15)
        return NULL; /* none is shorter than ["BlockRemoved", []] */
    memcpy(&ts, &bits, sizeof ts);
    PyObject *events = PyTuple_New((Py_ssize_t)length), *all = NULL;
    for (uint64_t i = 0; events && i < length; i++) {
        PyObject *one = event(r);
        if (one)
            PyTuple_SET_ITEM(events, (Py_ssize_t)i, one);
        else
            Py_CLEAR(events);
    }
    uint64_t rank = 0;
    int is_ranked = events && (num_parts == 2 || take_nil(r) || (take_int(r, &rank) == 1 && rank <= INT32_MAX));
    if (is_ranked && r->at == r->end)
        all = Py_BuildValue("dOi", ts, events, (int)rank);
    Py_XDECREF(events);
    return all;
}

static PyObject *read_batch(PyObject *module, PyObject *payload)
{
    Py_buffer view;
    (void)module;
    if (PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    Reader r = {view.buf, (const uint8_t *)view.buf + view.len};
    PyObject *all = batch(&r);
    PyBuffer_Release(&view);
    if (all || (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_MemoryError)))
        return all;
    PyErr_Clear(); /* a number beyond a machine's words, perhaps */
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"read", read_batch, METH_O, "Time, events and rank of a batch in the usual form; None where it is another."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "plain_batch", NULL, -1, methods, NULL, NULL, NULL, NULL};

static int fetch(const char *module, const char *name, PyObject **to)
{
    PyObject *found = PyImport_ImportModule(module);
    *to = found ? PyObject_GetAttrString(found, name) : NULL;
    Py_XDECREF(found);
    return *to != NULL;
}

PyMODINIT_FUNC PyInit_plain_batch(void)
{
    gpu = PyUnicode_InternFromString("GPU");
    device_group = PyLong_FromLong(0);
    if (!gpu || !device_group || !fetch("array", "array", &array_type) || !fetch("dynctl.core.kv", "NO_GROUP", &no_group) ||
        !fetch("dynctl.core.kv", "BlockStored", &stored_type) || !fetch("dynctl.core.kv", "BlockRemoved", &removed_type) ||
        !fetch("dynctl.core.kv", "AllBlocksCleared", &cleared_type))
        return NULL;
    return PyModule_Create(&definition);
}
