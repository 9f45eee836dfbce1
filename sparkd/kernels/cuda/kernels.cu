// All kernels of the CUDA executor, one translation unit. Those of prompts use what stands in the files before them.
#include "attention.cu"
#include "experts.cu"
#include "products.cu"
#include "recurrent.cu"
#include "rows.cu"
#include "prefill.cu"
#include "prefill_state.cu"
