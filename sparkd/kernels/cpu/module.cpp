#include <nanobind/nanobind.h>

namespace nb = nanobind;

#ifdef SPARKD_BIND_ARITHMETIC
void bind_arithmetic(nb::module_& module);
#endif

NB_MODULE(SPARKD_MODULE, module) {
#ifdef SPARKD_BIND_ARITHMETIC
    bind_arithmetic(module);
#endif
    module.attr("__doc__") = "The native executor, compiled for one instruction set.";
}
