// The extension module: compiled once per instruction set, see CMakeLists.txt.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_arithmetic(nb::module_& module);
void bind_plan(nb::module_& module);

NB_MODULE(SPARKD_MODULE, module) {
    module.attr("__doc__") = "Native kernels, compiled for one instruction set.";
    bind_arithmetic(module);
    bind_plan(module);
}
