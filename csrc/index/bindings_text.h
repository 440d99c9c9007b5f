// Python's face of codepoints.h: checks arguments, drops the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "codepoints.h"

namespace py = pybind11;

namespace {

using Ranges = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

trainkit::CodePoints make_code_points(const Ranges& ranges) {
    for (const auto& [first, last] : ranges) {
        if (first < 0x80 || first > last || last >= trainkit::CodePoints::kEnd) {
            throw py::value_error("a range must be 0x80 <= first <= last < 0x110000, not " +
                                  std::to_string(first) + ".." + std::to_string(last));
        }
    }
    return trainkit::CodePoints(ranges);
}

// The numbers of the texts that hold one of the code points.
std::vector<std::size_t> within(const trainkit::CodePoints& points, const py::list& texts) {
    std::vector<std::pair<const std::uint8_t*, std::size_t>> views;
    views.reserve(texts.size());
    for (const py::handle& text : texts) {
        if (!PyBytes_Check(text.ptr()))
            throw py::type_error("texts must be a list of bytes");
        views.emplace_back(reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(text.ptr())),
                           static_cast<std::size_t>(PyBytes_GET_SIZE(text.ptr())));
    }
    std::vector<std::size_t> found;
    py::gil_scoped_release release;
    for (std::size_t i = 0; i < views.size(); ++i) {
        if (points.in(views[i].first, views[i].second))
            found.push_back(i);
    }
    return found;
}

}  // namespace

inline void bind_text(py::module_& module) {
    py::class_<trainkit::CodePoints>(
        module, "CodePoints",
        "A set of code points above ASCII, as inclusive ranges. ValueError: a range is none.")
        .def(py::init(&make_code_points), py::arg("ranges"))
        .def("within", &within, py::arg("texts"),
             "Numbers of the texts (a list of bytes, UTF-8; nobody may change the list meanwhile) "
             "that hold one of them.");
}
