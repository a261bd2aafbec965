// Threads of a warp and of a block together: sums, largest numbers, prefixes, pieces of shared memory.
#pragma once
#include "platform.cuh"

__device__ __forceinline__ int lane_index() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_index() { return threadIdx.x / WARP; }
__device__ __forceinline__ int warp_count() { return blockDim.x / WARP; }

// Gives out the block's shared memory piece by piece; every thread gets the same pieces.
struct SharedMemory {
  char* next = shared_memory();

  // `count` of them, at a multiple of 16 bytes.
  template <class T>
  __device__ __forceinline__ T* take(int count) {
    T* piece = reinterpret_cast<T*>(next);
    next += (count * sizeof(T) + 15) / 16 * 16;
    return piece;
  }
};

// The sum over the lanes of a warp, in every lane: halves are added to halves.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

__device__ __forceinline__ int warp_sum(int value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

__device__ __forceinline__ unsigned warp_largest(unsigned value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}

__device__ __forceinline__ float warp_largest(float value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}

// The sum over the threads of a block, in every thread; `scratch` has a place a warp.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  if (lane_index() == 0) scratch[warp_index()] = value;
  __syncthreads();
  value = 0.0f;
  for (int warp = 0; warp < warp_count(); warp++) value += scratch[warp];
  __syncthreads();
  return value;
}

// The sum of the values of the lanes before this one, and of all.
__device__ __forceinline__ int warp_prefix(int value, int& total) {
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const int before = __shfl_up_sync(ALL_LANES, sum, distance);
    if (lane_index() >= distance) sum += before;
  }
  total = __shfl_sync(ALL_LANES, sum, WARP - 1);
  return sum - value;
}

// The sum of the values of the threads before this one, and of all; `scratch` has a place a warp.
__device__ __forceinline__ int block_prefix(int value, int& total, int* scratch) {
  int of_warp;
  int sum = warp_prefix(value, of_warp);
  if (lane_index() == 0) scratch[warp_index()] = of_warp;
  __syncthreads();
  total = 0;
  for (int warp = 0; warp < warp_count(); warp++) {
    if (warp == warp_index()) sum += total;
    total += scratch[warp];
  }
  __syncthreads();
  return sum;
}

// Whether this block is the last of `blocks` to come here; what the others wrote before can be read then.
// Leaves the counter as it was found, at 0. `scratch` has a place.
__device__ __forceinline__ bool is_last_block(unsigned* counter, unsigned blocks, unsigned* scratch) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned arrived = atomicAdd(counter, 1u);
    if (arrived == blocks - 1) *counter = 0;
    *scratch = arrived;
  }
  __syncthreads();
  const bool last = *scratch == blocks - 1;
  __syncthreads();
  __threadfence();
  return last;
}
