// The GPU tests of the kernels between nodes, on the CPU.
#include "../gpu_internode_test.cu"
