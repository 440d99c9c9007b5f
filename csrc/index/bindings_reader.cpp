// Python's face of reading tokens.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_reader(py::module_& module) { static_cast<void>(module); }
