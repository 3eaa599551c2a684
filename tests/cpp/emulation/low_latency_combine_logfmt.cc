// Low-latency combine of rows that travel as logarithms, compiled for the CPU.
#include "kernels/low_latency/combine_logfmt.cu"
