// Low-latency combine, compiled for the CPU.
#include "kernels/low_latency/combine.cu"
