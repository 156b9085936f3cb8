/* What block_table.py does, with the blocks' numbers themselves in the table instead of Python's objects: a look costs one place in
   memory instead of three, an entry 16 bytes and its share of free places. tests/kv/test_block_table.py holds both to the same.
   Open addressing; what is taken out is filled up from behind, so nothing is ever marked. The collector does not look in here:
   what a table holds must not refer to the table. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>

_Static_assert(ULONG_MAX == UINT64_MAX, "a block's number is a long");

typedef struct {
    uint64_t block;
    PyObject *value; /* NULL: free */
} Place;

typedef struct {
    PyObject_HEAD
    Place *places;
    int bits; /* 2 ** bits places; -1: none yet */
    Py_ssize_t used;
} Table;

enum { FIRST_BITS = 3 };

static PyTypeObject table_type;
static uint64_t odd[2]; /* drawn anew by each process */

static size_t num_places(const Table *t)
{
    return t->bits < 0 ? 0 : (size_t)1 << t->bits;
}

/* Where to begin to look. Blocks come from other hosts: who knew the factors could choose them to have one place all. */
static size_t home(const Table *t, uint64_t block)
{
    uint64_t mixed = block * odd[0];
    mixed ^= mixed >> 32;
    return (size_t)(mixed * odd[1] >> (64 - t->bits));
}

/* The place of a block, or the free one where it belongs; there is always one. */
static Place *find(const Table *t, uint64_t block)
{
    size_t last = num_places(t) - 1, at = home(t, block);
    while (t->places[at].value && t->places[at].block != block)
        at = (at + 1) & last;
    return t->places + at;
}

static PyObject *look(const Table *t, uint64_t block)
{
    return t->used ? find(t, block)->value : NULL;
}

/* Of so many places, at most three quarters are in use. */
static size_t most_of(size_t places)
{
    return places / 4 * 3;
}

/* Make room for one more. */
static int make_room(Table *t)
{
    size_t number = num_places(t);
    if ((size_t)t->used < most_of(number))
        return 1;
    Table larger = {.bits = number ? t->bits + 1 : FIRST_BITS};
    larger.places = PyMem_Calloc(num_places(&larger), sizeof(Place));
    if (!larger.places) {
        PyErr_NoMemory();
        return 0;
    }
    for (size_t at = 0; at < number; at++)
        if (t->places[at].value)
            *find(&larger, t->places[at].block) = t->places[at];
    PyMem_Free(t->places);
    t->places = larger.places;
    t->bits = larger.bits;
    return 1;
}

/* Put a value where none is; takes a reference of its own. */
static int put(Table *t, uint64_t block, PyObject *value)
{
    if (!make_room(t))
        return 0;
    *find(t, block) = (Place){block, Py_NewRef(value)};
    t->used++;
    return 1;
}

/* Free a place; the reference is the caller's. Those behind it that would not be found any more move up. */
static PyObject *vacate(Table *t, Place *place)
{
    PyObject *value = place->value;
    size_t last = num_places(t) - 1, hole = (size_t)(place - t->places);
    for (size_t at = (hole + 1) & last; t->places[at].value; at = (at + 1) & last)
        if (((at - home(t, t->places[at].block)) & last) >= ((at - hole) & last)) {
            t->places[hole] = t->places[at];
            hole = at;
        }
    t->places[hole].value = NULL;
    t->used--;
    return value;
}

static int as_block(PyObject *number, uint64_t *block)
{
    *block = PyLong_AsUnsignedLong(number);
    return *block != UINT64_MAX || !PyErr_Occurred();
}

static PyObject *table_clear(PyObject *self, PyObject *nothing)
{
    Table *t = (Table *)self;
    Place *places = t->places;
    size_t number = num_places(t);
    (void)nothing;
    t->places = NULL;
    t->bits = -1;
    t->used = 0;
    for (size_t at = 0; at < number; at++)
        Py_XDECREF(places[at].value);
    PyMem_Free(places);
    Py_RETURN_NONE;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *none[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "", none))
        return NULL;
    Table *t = (Table *)type->tp_alloc(type, 0);
    if (t)
        t->bits = -1;
    return (PyObject *)t;
}

static void table_dealloc(PyObject *self)
{
    Py_DECREF(table_clear(self, NULL));
    Py_TYPE(self)->tp_free(self);
}

static Py_ssize_t table_length(PyObject *self)
{
    return ((Table *)self)->used;
}

static PyObject *table_subscript(PyObject *self, PyObject *number)
{
    uint64_t block;
    if (!as_block(number, &block))
        return NULL;
    PyObject *value = look((Table *)self, block);
    if (!value)
        PyErr_SetObject(PyExc_KeyError, number);
    return Py_XNewRef(value);
}

static int table_assign(PyObject *self, PyObject *number, PyObject *value)
{
    Table *t = (Table *)self;
    uint64_t block;
    if (!as_block(number, &block))
        return -1;
    Place *place = t->used ? find(t, block) : NULL;
    if (place && place->value) {
        PyObject *before = value ? place->value : vacate(t, place);
        if (value)
            place->value = Py_NewRef(value);
        Py_DECREF(before);
        return 0;
    }
    if (value)
        return put(t, block, value) ? 0 : -1;
    PyErr_SetObject(PyExc_KeyError, number);
    return -1;
}

static int table_contains(PyObject *self, PyObject *number)
{
    uint64_t block;
    return as_block(number, &block) ? look((Table *)self, block) != NULL : -1;
}

static PyObject *table_get(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    uint64_t block;
    if (num_args < 1 || num_args > 2)
        return PyErr_Format(PyExc_TypeError, "get takes a block and a default");
    if (!as_block(args[0], &block))
        return NULL;
    PyObject *value = look((Table *)self, block);
    return Py_NewRef(value ? value : num_args == 2 ? args[1] : Py_None);
}

static PyObject *table_pop(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Table *t = (Table *)self;
    uint64_t block;
    if (num_args < 1 || num_args > 2)
        return PyErr_Format(PyExc_TypeError, "pop takes a block and a default");
    if (!as_block(args[0], &block))
        return NULL;
    Place *place = t->used ? find(t, block) : NULL;
    if (place && place->value)
        return vacate(t, place);
    if (num_args == 1)
        PyErr_SetObject(PyExc_KeyError, args[0]);
    return num_args == 2 ? Py_NewRef(args[1]) : NULL;
}

/* A list of all values, or of (block, value). Not in the order of places: put into another table as it grows, the first ones
   would all have to lie at its beginning. */
static PyObject *listed(PyObject *self, int has_blocks)
{
    Table *t = (Table *)self;
    int collects = PyGC_Disable(); /* a finalizer might change the table on the way */
    PyObject *list = PyList_New(t->used);
    Py_ssize_t to = 0;
    for (size_t i = 0, number = num_places(t); list && i < number; i++) {
        Place *place = t->places + (i * 0x9E3779B1u & (number - 1)); /* an odd step meets each once */
        PyObject *value = place->value;
        if (!value)
            continue;
        PyObject *one = has_blocks ? Py_BuildValue("KO", (unsigned long long)place->block, value) : Py_NewRef(value);
        if (one)
            PyList_SET_ITEM(list, to++, one);
        else
            Py_CLEAR(list);
    }
    if (collects)
        PyGC_Enable();
    return list;
}

static PyObject *table_values(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    return listed(self, 0);
}

static PyObject *table_items(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    return listed(self, 1);
}

static PyMethodDef table_methods[] = {
    {"get", (PyCFunction)(void (*)(void))table_get, METH_FASTCALL, "The value of a block, or a default."},
    {"pop", (PyCFunction)(void (*)(void))table_pop, METH_FASTCALL, "Take a block out; its value, or a default."},
    {"values", table_values, METH_NOARGS, "All values, in a list."},
    {"items", table_items, METH_NOARGS, "All blocks and their values, in a list."},
    {"clear", table_clear, METH_NOARGS, "Take everything out."},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, "For annotations."},
    {NULL, NULL, 0, NULL},
};

static PyMappingMethods table_as_mapping = {table_length, table_subscript, table_assign};
static PySequenceMethods table_as_sequence = {.sq_contains = table_contains};

static PyTypeObject table_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dynctl.kv.block_table.BlockTable",
    .tp_basicsize = sizeof(Table),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Values by block.",
    .tp_new = table_new,
    .tp_dealloc = table_dealloc,
    .tp_methods = table_methods,
    .tp_as_mapping = &table_as_mapping,
    .tp_as_sequence = &table_as_sequence,
};

/* Go through blocks of several tables, each in that which its last bits name; a list of those that `step` has not done. */
static PyObject *each(PyObject *shards, PyObject *numbers, PyObject *value, Py_ssize_t most,
                      int (*step)(Table *, uint64_t, PyObject *, Py_ssize_t))
{
    Py_ssize_t num_shards = PyList_Check(shards) ? PyList_GET_SIZE(shards) : 0;
    if (!num_shards || num_shards & (num_shards - 1))
        return PyErr_Format(PyExc_TypeError, "tables are a list of 2 ** n");
    PyObject *fast = PySequence_Fast(numbers, "blocks are a sequence"), *left = fast ? PyList_New(0) : NULL;
    for (Py_ssize_t i = 0; left && i < PySequence_Fast_GET_SIZE(fast); i++) {
        PyObject *number = PySequence_Fast_GET_ITEM(fast, i), *shard = NULL;
        uint64_t block;
        if (as_block(number, &block))
            shard = PyList_GET_ITEM(shards, (Py_ssize_t)(block & (uint64_t)(num_shards - 1)));
        if (shard && Py_TYPE(shard) != &table_type) {
            PyErr_Format(PyExc_TypeError, "%R is no table", shard);
            shard = NULL;
        }
        int is_done = shard ? step((Table *)shard, block, value, most) : -1;
        if (is_done < 0 || (!is_done && PyList_Append(left, number) < 0))
            Py_CLEAR(left);
    }
    Py_XDECREF(fast);
    return left;
}

static int add_one(Table *t, uint64_t block, PyObject *value, Py_ssize_t most)
{
    if (t->used >= most || look(t, block))
        return 0;
    return put(t, block, value) ? 1 : -1;
}

static int remove_one(Table *t, uint64_t block, PyObject *value, Py_ssize_t most)
{
    (void)most;
    Place *place = t->used ? find(t, block) : NULL;
    if (!place || place->value != value)
        return 0;
    Py_DECREF(vacate(t, place)); /* the caller holds another */
    return 1;
}

static PyObject *add(PyObject *module, PyObject *args)
{
    PyObject *shards, *blocks, *value;
    Py_ssize_t most;
    (void)module;
    return PyArg_ParseTuple(args, "OOOn", &shards, &blocks, &value, &most) ? each(shards, blocks, value, most, add_one) : NULL;
}

static PyObject *take_out(PyObject *module, PyObject *args)
{
    PyObject *shards, *blocks, *value;
    (void)module;
    return PyArg_ParseTuple(args, "OOO", &shards, &blocks, &value) ? each(shards, blocks, value, 0, remove_one) : NULL;
}

static PyObject *most_blocks(PyObject *module, PyObject *number)
{
    size_t num_bytes = PyLong_AsSize_t(number), places = (size_t)1 << FIRST_BITS;
    (void)module;
    if (num_bytes == (size_t)-1 && PyErr_Occurred())
        return NULL;
    if (num_bytes / sizeof(Place) < places)
        return PyLong_FromLong(0);
    while (places <= num_bytes / sizeof(Place) / 2)
        places *= 2;
    return PyLong_FromSize_t(most_of(places));
}

static PyMethodDef methods[] = {
    {"most_blocks", most_blocks, METH_O, "How many blocks a table may hold within so many bytes."},
    {"add", add, METH_VARARGS, "Give new blocks a value; those left out."},
    {"remove", take_out, METH_VARARGS, "Take out blocks of a value; those left out."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "block_table", NULL, -1, methods, NULL, NULL, NULL, NULL};

static int draw_factors(void)
{
    PyObject *os = PyImport_ImportModule("os"), *drawn = os ? PyObject_CallMethod(os, "urandom", "n", (Py_ssize_t)sizeof odd) : NULL;
    Py_XDECREF(os);
    if (!drawn)
        return 0;
    memcpy(odd, PyBytes_AS_STRING(drawn), sizeof odd);
    Py_DECREF(drawn);
    odd[0] |= 1;
    odd[1] |= 1;
    return 1;
}

PyMODINIT_FUNC PyInit_block_table(void)
{
    PyObject *module = !draw_factors() || PyType_Ready(&table_type) < 0 ? NULL : PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "BlockTable", (PyObject *)&table_type) < 0)
        Py_CLEAR(module);
    return module;
}
