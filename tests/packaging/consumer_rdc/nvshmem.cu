// A kernel that puts a word to another PE, and a host function of NVSHMEM that needs neither a GPU nor a driver.
#include <nvshmem.h>

__global__ void put_word(int* word, int value, int pe) { nvshmem_int_p(word, value, pe); }

int nvshmem_major_version() {
  int major = 0, minor = 0;
  nvshmem_info_get_version(&major, &minor);
  return major;
}

// Keeps the kernel: it runs where a caller has initialised NVSHMEM.
void launch_put_word(int* word, int value, int pe) { put_word<<<1, 1>>>(word, value, pe); }
