// Mistakes that the emulator has to find; no one launches these but its tests.
#include "block.cuh"

struct Mistake {
  const float* x;
  float* out;
  int count;
};

// Reads what other threads write without waiting for them.
KERNEL(64, missing_barrier, Mistake) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x] = a.x[threadIdx.x];
  a.out[threadIdx.x] = shared[63 - threadIdx.x];
}

// Has threads wait at different places.
KERNEL(64, two_barriers, Mistake) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    a.out[threadIdx.x] = 1.0f;
  }
  if (threadIdx.x >= 16) __syncthreads();
}

// Expects lanes that do not come.
KERNEL(64, wrong_mask, Mistake) {
  float sum = a.x[threadIdx.x];
  if (threadIdx.x < 20) sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  a.out[threadIdx.x] = sum;
}

// Reads a number past the end.
KERNEL(64, out_of_bounds, Mistake) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = a.x[i];  // the last block reads on
  a.out[i < a.count ? i : 0] = x;
}

// Writes a shared number past the end.
KERNEL(64, out_of_shared, Mistake) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x + 1] = a.x[threadIdx.x];
  __syncthreads();
  a.out[threadIdx.x] = shared[threadIdx.x + 1];
}

// Makes none of them.
KERNEL(64, no_mistake, Mistake) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  shared[threadIdx.x] = i < a.count ? a.x[i] : 0.0f;
  __syncthreads();
  if (i < a.count) a.out[i] = shared[63 - threadIdx.x];
}
