// Python's face of reading tokens: checks arrays, drops the GIL, calls reader.h.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "reader.h"

namespace py = pybind11;

namespace {

using trainkit::reading::DocumentArrays;
using trainkit::reading::Ids;
using trainkit::reading::Reader;
using trainkit::reading::Windows;

template <typename T>
bool is_plain(const py::array& array, py::ssize_t dimensions) {
    return py::isinstance<py::array_t<T>>(array) && array.ndim() == dimensions &&
           (array.flags() & py::array::c_style) != 0;
}

// The memory of a contiguous array that need not be aligned, or ValueError.
template <typename T>
const unsigned char* memory_of(const py::array& array, const char* name,
                               py::ssize_t dimensions = 1) {
    if (!is_plain<T>(array, dimensions)) {
        throw py::value_error(std::string(name) + " must be a contiguous " +
                              std::to_string(dimensions) + "-dimensional array of " +
                              std::to_string(8 * sizeof(T)) + "-bit integers");
    }
    return static_cast<const unsigned char*>(array.data());
}

const std::int64_t* int64_values(const py::array& array, const char* name) {
    if (!is_plain<std::int64_t>(array, 1) ||
        (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0) {
        throw py::value_error(std::string(name) +
                              " must be a one-dimensional, contiguous, aligned int64 array");
    }
    return static_cast<const std::int64_t*>(array.data());
}

// Where the rows go: [B, S + 1].
struct Batch {
    Batch(py::array& out, const py::array& rows, py::ssize_t samples) : width(0) {
        const int flags =
            py::detail::npy_api::NPY_ARRAY_ALIGNED_ | py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
        if (!is_plain<std::int64_t>(out, 2) || (out.flags() & flags) != flags || out.shape(1) < 2) {
            throw py::value_error(
                "out must be a two-dimensional, contiguous, aligned, writable int64 array with at "
                "least two columns");
        }
        row = int64_values(rows, "rows");
        if (rows.size() != samples)
            throw py::value_error("there are " + std::to_string(samples) + " samples, but " +
                                  std::to_string(rows.size()) + " rows");
        for (py::ssize_t i = 0; i < samples; ++i) {
            if (row[i] < 0 || row[i] >= out.shape(0)) {
                throw py::value_error("row " + std::to_string(row[i]) + " of out, which has " +
                                      std::to_string(out.shape(0)));
            }
        }
        values = static_cast<std::int64_t*>(out.mutable_data());
        width = static_cast<std::int64_t>(out.shape(1));
    }
    std::int64_t* values;
    const std::int64_t* row;
    std::int64_t width;
};

DocumentArrays arrays_of(const py::array& documents, const py::array& samples,
                         const py::array& lengths, const py::array& offsets, int extra) {
    if (extra != 0 && extra != 1)
        throw py::value_error("extra is " + std::to_string(extra) + ", but must be 0 or 1");
    DocumentArrays a{};
    a.document_index = memory_of<std::int32_t>(documents, "document_index");
    a.positions = static_cast<std::int64_t>(documents.size());
    a.wide = py::isinstance<py::array_t<std::int64_t>>(samples);
    a.sample_index = a.wide ? memory_of<std::int64_t>(samples, "sample_index", 2)
                            : memory_of<std::int32_t>(samples, "sample_index", 2);
    if (samples.shape(1) != 2)
        throw py::value_error("sample_index has " + std::to_string(samples.shape(1)) +
                              " columns, not 2");
    a.rows = static_cast<std::int64_t>(samples.shape(0));
    a.lengths = memory_of<std::int32_t>(lengths, "lengths");
    a.offsets = memory_of<std::int64_t>(offsets, "offsets");
    if (lengths.size() != offsets.size()) {
        throw py::value_error("there are " + std::to_string(lengths.size()) + " lengths, but " +
                              std::to_string(offsets.size()) + " offsets");
    }
    a.sequences = static_cast<std::int64_t>(lengths.size());
    a.extra = extra;
    return a;
}

void check_tokens(std::int64_t tokens) {
    if (tokens < 2)
        throw py::value_error("tokens is " + std::to_string(tokens) +
                              ", but a sample has at least 2");
}

py::tuple tuple_of(const Ids& ids) {
    return py::make_tuple(ids.lowest, ids.highest, ids.missing);
}

py::tuple windows(Reader& reader, std::int64_t first, std::int64_t count, const py::array& numbers,
                  const py::array& rows, py::array out) {
    const std::int64_t* const number = int64_values(numbers, "numbers");
    const Batch batch(out, rows, numbers.size());
    Ids ids;
    {
        py::gil_scoped_release release;
        ids = reader.windows(Windows{first, count}, number, batch.row,
                             static_cast<std::int64_t>(numbers.size()), batch.values, batch.width);
    }
    return tuple_of(ids);
}

void ahead(const Reader& reader, std::int64_t first, std::int64_t count, const py::array& numbers,
           std::int64_t tokens) {
    const std::int64_t* const number = int64_values(numbers, "numbers");
    check_tokens(tokens);
    py::gil_scoped_release release;
    reader.ahead(Windows{first, count}, number, static_cast<std::int64_t>(numbers.size()), tokens);
}

py::tuple documents(Reader& reader, const py::array& document_index, const py::array& sample_index,
                    const py::array& lengths, const py::array& offsets, const py::array& numbers,
                    const py::array& rows, py::array out, int extra) {
    const DocumentArrays arrays = arrays_of(document_index, sample_index, lengths, offsets, extra);
    const std::int64_t* const number = int64_values(numbers, "numbers");
    const Batch batch(out, rows, numbers.size());
    Ids ids;
    {
        py::gil_scoped_release release;
        ids = reader.documents(arrays, number, batch.row, static_cast<std::int64_t>(numbers.size()),
                               batch.values, batch.width);
    }
    return tuple_of(ids);
}

void ahead_of_documents(const Reader& reader, const py::array& document_index,
                        const py::array& sample_index, const py::array& lengths,
                        const py::array& offsets, const py::array& numbers, std::int64_t tokens,
                        int extra) {
    const DocumentArrays arrays = arrays_of(document_index, sample_index, lengths, offsets, extra);
    const std::int64_t* const number = int64_values(numbers, "numbers");
    check_tokens(tokens);
    py::gil_scoped_release release;
    reader.ahead_of_documents(arrays, number, static_cast<std::int64_t>(numbers.size()), tokens);
}

}  // namespace

inline void bind_reader(py::module_& module) {
    py::register_local_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown)
                std::rethrow_exception(thrown);
        } catch (const trainkit::reading::FileError& error) {
            const py::object made =
                py::reinterpret_borrow<py::object>(PyExc_OSError)(error.number, error.what());
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
        }
    });
    py::class_<Reader>(module, "Reader",
                       "The tokens of one .bin. Methods may be called by several threads. OSError: "
                       "the file cannot be read, or became shorter.")
        .def(py::init<const std::string&, int, bool>(), py::arg("path"), py::arg("dtype_code"),
             py::arg("mmap") = true,
             "dtype_code: as in .idx. mmap: map the file; else read it by pread. OSError: it "
             "cannot be opened; ValueError: no code of an integer.")
        .def_property_readonly("num_tokens", &Reader::num_tokens)
        .def("windows", &windows, py::arg("first"), py::arg("count"), py::arg("numbers"),
             py::arg("rows"), py::arg("out"),
             "out[rows[i]] = the S + 1 tokens from token (first + numbers[i]) * S on; int64 [n], "
             "[n], [B, S + 1]. Returns (lowest id, highest id, 0), (0, -1, 0) "
             "where n is 0. IndexError: a number outside [0, count); ValueError: the windows reach "
             "beyond the file, or an array does not fit.")
        .def("ahead", &ahead, py::arg("first"), py::arg("count"), py::arg("numbers"),
             py::arg("tokens"),
             "Ask the system to have these windows of `tokens` = S + 1 tokens in memory soon.")
        .def("documents", &documents, py::arg("document_index"), py::arg("sample_index"),
             py::arg("lengths"), py::arg("offsets"), py::arg("numbers"), py::arg("rows"),
             py::arg("out"), py::arg("extra"),
             "out[rows[i]] = the tokens of Megatron's sample numbers[i], -1 where there are none: "
             "int32 [P], int32 or int64 [n + 1, 2], int32 [S], int64 [S] "
             "(bytes), then as windows. extra 1: a sample has seq_length + 1 tokens, 0: "
             "seq_length. Returns (lowest id, highest id, places without a token). "
             "IndexError: no such sample; ValueError: the index does not fit the file, or an array "
             "does not fit.")
        .def("ahead_of_documents", &ahead_of_documents, py::arg("document_index"),
             py::arg("sample_index"), py::arg("lengths"), py::arg("offsets"), py::arg("numbers"),
             py::arg("tokens"), py::arg("extra"),
             "As ahead, for samples of `tokens` = seq_length + 1 tokens.");
}
