// Warp-wide and block-wide primitives: sums, maxima, prefix sums, a shared memory allocator.
#pragma once
#include "platform.cuh"

__device__ __forceinline__ int lane_index() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_index() { return threadIdx.x / WARP; }
__device__ __forceinline__ int warp_count() { return blockDim.x / WARP; }

// Bump allocator over the block's shared memory. Every thread makes the same calls and gets the same addresses.
struct SharedMemory {
  char* next = shared_memory();

  // `count` elements, 16-byte aligned.
  template <class T>
  __device__ __forceinline__ T* allocate(int count) {
    T* elements = reinterpret_cast<T*>(next);
    next += (count * sizeof(T) + 15) / 16 * 16;
    return elements;
  }
};

// Calls `use(i, x[i])` for i = first, first + STEP, ... below `count`, with LOADS loads in flight, or four of the last.
template <int LOADS, int STEP, class T, class Use>
__device__ __forceinline__ void load_ahead(const T* x, int count, int first, Use use) {
  int start = first;
#pragma unroll 1
  for (; LOADS > 4 && start + (LOADS - 1) * STEP < count; start += LOADS * STEP) {
    T loaded[LOADS];
#pragma unroll
    for (int index = 0; index < LOADS; index++) loaded[index] = x[start + index * STEP];
#pragma unroll
    for (int index = 0; index < LOADS; index++) use(start + index * STEP, loaded[index]);
  }
#pragma unroll 1
  for (; start < count; start += 4 * STEP) {
    T loaded[4];
#pragma unroll
    for (int index = 0; index < 4; index++)
      if (start + index * STEP < count) loaded[index] = x[start + index * STEP];
#pragma unroll
    for (int index = 0; index < 4; index++)
      if (start + index * STEP < count) use(start + index * STEP, loaded[index]);
  }
}

// Butterfly sum over the lanes of a warp, returned in every lane.
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

__device__ __forceinline__ unsigned warp_max(unsigned value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2)
    value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = WARP / 2; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}

// Sum over the threads of a block, returned in every thread. `scratch` holds one element per warp.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  if (lane_index() == 0) scratch[warp_index()] = value;
  __syncthreads();
  value = 0.0f;
  for (int warp = 0; warp < warp_count(); warp++) value += scratch[warp];
  __syncthreads();
  return value;
}

// Exclusive prefix sum over the lanes of a warp, and the total.
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

// Exclusive prefix sum over the threads of a block, and the total. `scratch` holds one element per warp.
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

// Whether this thread block is the last of `blocks` to arrive; it then sees what the others wrote before.
// `counter` is 0 before the first and after the last arrival. `scratch` holds one element.
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
