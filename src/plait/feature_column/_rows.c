/* What feature columns do for every batch: fetch the rows of many columns' ids from tables that lie behind each other,
 * and add up the gradients of rows. Each is one loop, of which torch's operators make many.
 *
 * Arguments are addresses and counts, which `rows.py` takes from tensors that it has looked at. Whether an id is inside
 * of its table is seen here: a loop that meets one that is not says False.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(_MSC_VER)
#define restrict __restrict
#endif
#if defined(__GNUC__)
#define PREFETCH(base, bytes, write) __builtin_prefetch((const void *)((uintptr_t)(base) + (bytes)), (write))
#else
#define PREFETCH(base, bytes, write) ((void)0)
#endif
#define AHEAD 24 /* so many rows; whether they are there is not asked yet */

typedef struct {
    const int64_t *ids;
    Py_ssize_t stride;
} Column;

typedef struct {
    char *found;
    uint64_t *places;
    const char *table;
    const Column *columns;
    const int64_t *starts, *sizes;
    Py_ssize_t batch, count, across; /* from a column's places to the next one's */
} Fetch;

/* Column by column: what is read lies close together, and so do the places. `width` is a constant where this is called
 * with one, and then a copy of so many bytes is a few instructions. */
static inline int fetch_rows(const Fetch *it, size_t width)
{
    const Py_ssize_t batch = it->batch;
    const size_t line = (size_t)it->count * width; /* from an example to the next */
    for (Py_ssize_t number = 0; number < it->count; number++) {
        const Column column = it->columns[number];
        const uint64_t start = (uint64_t)it->starts[number], size = (uint64_t)it->sizes[number];
        const char *table = it->table + start * width;
        char *found = it->found + (size_t)number * width;
        uint64_t *place = it->places + number * it->across;
        for (Py_ssize_t example = 0; example < batch; example++, found += line) {
            if (example + AHEAD < batch) {
                PREFETCH(table, (uint64_t)column.ids[(example + AHEAD) * column.stride] * width, 0);
                PREFETCH(found, AHEAD * line, 1);
            }
            const uint64_t id = (uint64_t)column.ids[example * column.stride];
            if (id >= size) /* so are negative ones */
                return 0;
            memcpy(found, table + id * width, width);
            place[example] = start + id;
        }
    }
    return 1;
}

static int fetch(const Fetch *it, size_t width)
{
    switch (width) {
    case 16:
        return fetch_rows(it, 16);
    case 32:
        return fetch_rows(it, 32);
    case 64:
        return fetch_rows(it, 64);
    case 128:
        return fetch_rows(it, 128);
    default:
        return fetch_rows(it, width);
    }
}

typedef struct {
    const uint64_t *at;
    Py_ssize_t examples, columns, along, across; /* how many, and the strides */
} Places;

/* As nothing overlaps (`restrict`), the compiler adds by vectors; it does not where the width is a constant. */
#define ADD(name, type)                                                                                                \
    static int name(type *restrict sums, uint64_t rows, size_t width, const type *restrict row, Places places)         \
    {                                                                                                                  \
        const Py_ssize_t ahead = 1 + (places.columns > 0 ? AHEAD / places.columns : 0); /* so many examples */         \
        memset(sums, 0, rows * width * sizeof(type));                                                                  \
        for (Py_ssize_t example = 0; example < places.examples; example++, places.at += places.along) {                \
            const uint64_t *at = places.at;                                                                            \
            for (Py_ssize_t column = 0; column < places.columns; column++, at += places.across, row += width) {        \
                if (example + ahead < places.examples)                                                                 \
                    PREFETCH(sums, at[ahead * places.along] * width * sizeof(type), 1);                                \
                if (*at >= rows)                                                                                       \
                    return 0;                                                                                          \
                type *restrict sum = sums + *at * width;                                                               \
                for (size_t number = 0; number < width; number++)                                                      \
                    sum[number] += row[number];                                                                        \
            }                                                                                                          \
        }                                                                                                              \
        return 1;                                                                                                      \
    }

ADD(add_floats, float)
ADD(add_doubles, double)

static int counted(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "got %zd arguments, and wants %zd", given, wanted);
    return 0;
}

/* fetch(found, places, table, width, ids, strides, starts, sizes, batch, across)
 * Without strides, the ids of each column are contiguous. */
static PyObject *fetch_(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    (void)module;
    if (!counted(given, 10))
        return NULL;
    Fetch it = {
        .found = PyLong_AsVoidPtr(arguments[0]),
        .places = PyLong_AsVoidPtr(arguments[1]),
        .table = PyLong_AsVoidPtr(arguments[2]),
        .starts = PyLong_AsVoidPtr(arguments[6]),
        .sizes = PyLong_AsVoidPtr(arguments[7]),
        .batch = PyLong_AsSsize_t(arguments[8]),
        .across = PyLong_AsSsize_t(arguments[9]),
    };
    const size_t width = PyLong_AsSize_t(arguments[3]);
    it.count = PyErr_Occurred() ? -1 : PyList_Size(arguments[4]);
    const int strided = arguments[5] != Py_None;
    if (it.count < 0 || (strided && !counted(PyList_Size(arguments[5]), it.count)))
        return NULL;
    Column *columns = PyMem_Malloc((size_t)it.count * sizeof(Column));
    if (columns == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t number = 0; number < it.count && !PyErr_Occurred(); number++) {
        columns[number].stride = strided ? PyLong_AsSsize_t(PyList_GetItem(arguments[5], number)) : 1;
        columns[number].ids = PyLong_AsVoidPtr(PyList_GetItem(arguments[4], number));
    }
    it.columns = columns;
    int inside = 0;
    if (!PyErr_Occurred()) {
        Py_BEGIN_ALLOW_THREADS
        inside = fetch(&it, width);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(columns);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(inside);
}

/* add(sums, rows, width, added, places, examples, columns, along, across, doubles) */
static PyObject *add_(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    (void)module;
    if (!counted(given, 10))
        return NULL;
    void *sums = PyLong_AsVoidPtr(arguments[0]);
    const uint64_t rows = PyLong_AsUnsignedLongLong(arguments[1]);
    const size_t width = PyLong_AsSize_t(arguments[2]);
    const void *added = PyLong_AsVoidPtr(arguments[3]);
    const Places places = {
        .at = PyLong_AsVoidPtr(arguments[4]),
        .examples = PyLong_AsSsize_t(arguments[5]),
        .columns = PyLong_AsSsize_t(arguments[6]),
        .along = PyLong_AsSsize_t(arguments[7]),
        .across = PyLong_AsSsize_t(arguments[8]),
    };
    const int doubles = PyObject_IsTrue(arguments[9]);
    if (PyErr_Occurred())
        return NULL;
    int inside;
    Py_BEGIN_ALLOW_THREADS
    inside = doubles ? add_doubles(sums, rows, width, added, places) : add_floats(sums, rows, width, added, places);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(inside);
}

static PyMethodDef methods[] = {
    {"fetch", (PyCFunction)(void (*)(void))fetch_, METH_FASTCALL, "Rows of so many bytes each, and their places."},
    {"add", (PyCFunction)(void (*)(void))add_, METH_FASTCALL, "Zeros, and each row of so many numbers at its place."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_rows", "Loops of feature columns.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
