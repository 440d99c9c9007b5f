// Python's face of Megatron's sample order.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_megatron(py::module_& module) { static_cast<void>(module); }
