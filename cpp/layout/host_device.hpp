// One spelling for functions that host, CPU and CUDA code share.
#pragma once

#if defined(__CUDACC__)
#define DM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DM_HOST_DEVICE inline
#endif
