// The GPU tests of low-latency calls between nodes, on the CPU.
#define DEEP_MOE_EMULATED
#include "../gpu_direct_test.cu"
