// Kernels with faults that the emulator has to report; for its tests.
#include "block.cuh"

struct Arguments {
  const float* x;
  float* out;
  int count;
};

// A race: reads what other threads write, without a barrier.
KERNEL(64, missing_barrier, Arguments) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x] = a.x[threadIdx.x];
  a.out[threadIdx.x] = shared[63 - threadIdx.x];
}

// Threads wait at different barriers.
KERNEL(64, two_barriers, Arguments) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    a.out[threadIdx.x] = 1.0f;
  }
  if (threadIdx.x >= 16) __syncthreads();
}

// The mask names lanes that do not take part.
KERNEL(64, wrong_mask, Arguments) {
  float sum = a.x[threadIdx.x];
  if (threadIdx.x < 20) sum += __shfl_xor_sync(ALL_LANES, sum, 1);
  a.out[threadIdx.x] = sum;
}

// Reads past the end of global memory.
KERNEL(64, out_of_bounds, Arguments) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = a.x[i];  // the last block exceeds `count`
  a.out[i < a.count ? i : 0] = x;
}

// Writes past the end of shared memory.
KERNEL(64, out_of_shared, Arguments) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x + 1] = a.x[threadIdx.x];
  __syncthreads();
  a.out[threadIdx.x] = shared[threadIdx.x + 1];
}

// No fault.
KERNEL(64, correct, Arguments) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  shared[threadIdx.x] = i < a.count ? a.x[i] : 0.0f;
  __syncthreads();
  if (i < a.count) a.out[i] = shared[63 - threadIdx.x];
}
