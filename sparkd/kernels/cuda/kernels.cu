// All kernels of the CUDA executor, one translation unit.
#include "attention.cu"
#include "experts.cu"
#include "products.cu"
#include "recurrent.cu"
#include "rows.cu"
