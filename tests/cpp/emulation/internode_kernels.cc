// The kernels between nodes, compiled for the CPU.
#include "kernels/internode/notify.cu"

#include "kernels/internode/dispatch.cu"

#include "kernels/internode/combine.cu"
