// Python's face of the index helpers: checks arguments, drops the GIL, calls the headers beside it.
// One translation unit: the compiler parses pybind11 (7 s) once, not for each of bindings_*.h.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "bindings_blend.h"
#include "bindings_curation.h"
#include "bindings_megatron.h"
#include "bindings_reader.h"
#include "bindings_text.h"
#include "permutation.h"

namespace py = pybind11;

namespace {

// The writable memory of a one-dimensional, contiguous, aligned int64 array, or ValueError.
std::int64_t* int64_memory(py::array& array, const char* name) {
    const bool is_int64 = py::isinstance<py::array_t<std::int64_t>>(array);
    const int flags = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_ |
                      py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    if (!is_int64 || array.ndim() != 1 || (array.flags() & flags) != flags) {
        throw py::value_error(
            std::string(name) +
            " must be a one-dimensional, contiguous, aligned, writable int64 array");
    }
    return static_cast<std::int64_t*>(array.mutable_data());
}

void permute(std::int64_t n, std::uint64_t key, std::int64_t start, py::array out) {
    std::int64_t* const values = int64_memory(out, "out");
    const std::int64_t count = static_cast<std::int64_t>(out.size());
    if (n < 1 || n > static_cast<std::int64_t>(trainkit::kMaxSize)) {
        throw py::value_error("n is " + std::to_string(n) + ", but must be in 1..2**62");
    }
    if (start < 0 || start > n || count > n - start) {
        throw py::value_error("start is " + std::to_string(start) + " and out holds " +
                              std::to_string(count) + ", but n is only " + std::to_string(n));
    }
    py::gil_scoped_release release;
    const trainkit::Permutation permutation(static_cast<std::uint64_t>(n), key);
    permutation.fill(static_cast<std::uint64_t>(start), static_cast<std::uint64_t>(count), values);
}

}  // namespace

PYBIND11_MODULE(_index, m) {
    m.doc() = "Dataset-index helpers in C++ (csrc/index). Needs numpy, never torch.";
    m.attr("csrc_sha256") = TRAINKIT_CSRC_SHA256;
    m.def("permute", &permute, py::arg("n"), py::arg("key"), py::arg("start"), py::arg("out"),
          "out[i] = P_key(start + i), P_key a permutation of [0, n). ValueError: a size or the "
          "array does not fit; TypeError: not a 64-bit integer.");
    bind_blend(m);
    bind_curation(m);
    bind_megatron(m);
    bind_reader(m);
    bind_text(m);
}
