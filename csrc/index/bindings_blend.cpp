// Python's face of the native blend.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_blend(py::module_& module) { static_cast<void>(module); }
