// The GPU tests of the kernels that group rows by expert, on the CPU.
#include "../gpu_expert_major_test.cu"
