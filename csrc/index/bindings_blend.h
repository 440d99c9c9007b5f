// Python's face of the native order: the blend, documents gathered in another order, and ids behind
// each.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

#include "blend.h"
#include "gather.h"

namespace py = pybind11;

namespace {

// The memory of a one-dimensional, contiguous, aligned array of T, or ValueError. `writable` where
// it is written to.
template <typename T>
T* memory(py::array& array, const char* name, const char* type, bool writable) {
    int flags = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_;
    if (writable)
        flags |= py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    if (!py::isinstance<py::array_t<T>>(array) || array.ndim() != 1 ||
        (array.flags() & flags) != flags) {
        throw py::value_error(std::string(name) +
                              " must be a one-dimensional, contiguous, aligned" +
                              (writable ? ", writable " : " ") + type + " array");
    }
    return static_cast<T*>(const_cast<void*>(array.data()));
}

void check_positions(std::int64_t start, std::int64_t n) {
    if (start < 0 || start > trainkit::kMaxWeight || n > trainkit::kMaxWeight - start) {
        throw py::value_error("positions " + std::to_string(start) + " and " + std::to_string(n) +
                              " on are not within 0..2**62");
    }
}

std::unique_ptr<trainkit::Blend> make_blend(py::array weights) {
    const std::int64_t* const values = memory<std::int64_t>(weights, "weights", "int64", false);
    return std::make_unique<trainkit::Blend>(values, static_cast<std::size_t>(weights.size()));
}

void blend_at(const trainkit::Blend& blend, std::int64_t start, py::array dataset,
              py::array count) {
    std::int16_t* const datasets = memory<std::int16_t>(dataset, "dataset", "int16", true);
    std::int64_t* const counts = memory<std::int64_t>(count, "count", "int64", true);
    if (dataset.size() != count.size()) {
        throw py::value_error("dataset has " + std::to_string(dataset.size()) +
                              " elements and count " + std::to_string(count.size()));
    }
    const auto n = static_cast<std::int64_t>(dataset.size());
    check_positions(start, n);
    py::gil_scoped_release release;
    blend.at(static_cast<std::uint64_t>(start), static_cast<std::size_t>(n), datasets, counts);
}

py::array_t<std::int64_t> blend_counts(const trainkit::Blend& blend, std::int64_t position) {
    check_positions(position, 0);
    py::array_t<std::int64_t> out(static_cast<py::ssize_t>(blend.datasets()));
    blend.counts(static_cast<std::uint64_t>(position), out.mutable_data());
    return out;
}

void gather(py::array source, py::array starts, py::array lengths, py::array out) {
    const std::uint8_t* const from = memory<std::uint8_t>(source, "source", "uint8", false);
    const std::int64_t* const firsts = memory<std::int64_t>(starts, "starts", "int64", false);
    const std::int64_t* const sizes = memory<std::int64_t>(lengths, "lengths", "int64", false);
    std::uint8_t* const to = memory<std::uint8_t>(out, "out", "uint8", true);
    if (starts.size() != lengths.size()) {
        throw py::value_error("starts has " + std::to_string(starts.size()) +
                              " elements and lengths " + std::to_string(lengths.size()));
    }
    const auto n = static_cast<std::size_t>(starts.size());
    const auto source_bytes = static_cast<std::int64_t>(source.size()),
               out_bytes = static_cast<std::int64_t>(out.size());
    bool fits;
    {
        py::gil_scoped_release release;
        fits = trainkit::pieces_fit(source_bytes, firsts, sizes, n, out_bytes);
        if (fits)
            trainkit::gather(from, firsts, sizes, n, to);
    }
    if (!fits)
        throw py::value_error(
            "a piece lies outside source, or the lengths do not sum to the size of out");
}

template <typename To>
bool interleave_as(const std::uint32_t* ids, std::int64_t n, const std::int64_t* stops,
                   std::size_t stops_n, std::uint32_t value, To* out) {
    py::gil_scoped_release release;
    return trainkit::interleave(ids, n, stops, stops_n, static_cast<To>(value), out);
}

void interleave(py::array ids, py::array stops, std::uint32_t value, py::array out) {
    const std::uint32_t* const from = memory<std::uint32_t>(ids, "ids", "uint32", false);
    const std::int64_t* const ends = memory<std::int64_t>(stops, "stops", "int64", false);
    const auto n = static_cast<std::int64_t>(ids.size());
    const auto stops_n = static_cast<std::size_t>(stops.size());
    if (out.size() != ids.size() + stops.size()) {
        throw py::value_error("out has " + std::to_string(out.size()) + " elements, not " +
                              std::to_string(ids.size() + stops.size()));
    }
    const bool narrow = py::isinstance<py::array_t<std::uint16_t>>(out);
    const bool fits =
        narrow ? interleave_as(from, n, ends, stops_n, value,
                               memory<std::uint16_t>(out, "out", "uint16 or int32", true))
               : interleave_as(from, n, ends, stops_n, value,
                               memory<std::int32_t>(out, "out", "uint16 or int32", true));
    if (!fits)
        throw py::value_error("stops do not rise within ids");
}

}  // namespace

inline void bind_blend(py::module_& module) {
    py::class_<trainkit::Blend>(module, "Blend",
                                "Which of several datasets stands at which position, in proportion "
                                "to integer weights (csrc/index/blend.h).")
        .def(py::init(&make_blend), py::arg("weights"),
             "weights: int64 [D], 0: never drawn. ValueError: negative, all 0, a sum above 2**62, "
             "D above 32,766.")
        .def("at", &blend_at, py::arg("start"), py::arg("dataset"), py::arg("count"),
             "dataset int16 [n], count int64 [n]: the dataset at position start + i and how many "
             "samples it gave before. ValueError: an array does not fit.")
        .def("counts", &blend_counts, py::arg("position"),
             "int64 [D]: how many of the first `position` samples each dataset gives.");
    module.def("gather", &gather, py::arg("source"), py::arg("starts"), py::arg("lengths"),
               py::arg("out"),
               "out uint8 = the pieces source[starts[i] : starts[i] + lengths[i]] one behind "
               "another. ValueError: they do not fit source and out.");
    module.def("interleave", &interleave, py::arg("ids"), py::arg("stops"), py::arg("value"),
               py::arg("out"),
               "out uint16 or int32 [n + k] = ids uint32 [n] with `value` before each place of "
               "stops int64 [k]; ids fit out's dtype. ValueError: the arrays do not fit.");
}
