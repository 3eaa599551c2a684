__device__ int plus_one(int value) { return value + 1; }
