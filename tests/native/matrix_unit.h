// Asks for the registers of the matrix unit, as sparkd/kernels/__init__.py does: Linux keeps them only for processes that
// asked.
#pragma once

#ifdef __AMX_INT8__
#include <sys/syscall.h>
#include <unistd.h>

inline void ask_for_matrix_unit() { syscall(SYS_arch_prctl, 0x1023, 18); }
#else
inline void ask_for_matrix_unit() {}
#endif
