// The combine of rows that travel as logarithms, on the CPU.
#include "../gpu_low_latency_logfmt_test.cu"
