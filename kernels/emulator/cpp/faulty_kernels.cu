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

// Reads in front of global memory, which only the checks notice, and far behind it: past a page, within the inaccessible memory.
KERNEL(64, in_front, Arguments) { a.out[threadIdx.x] = a.x[int(threadIdx.x) - 1]; }
KERNEL(64, far_behind, Arguments) { a.out[threadIdx.x] = a.x[size_t(threadIdx.x) << 12]; }

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

// Lanes of a warp exchange values through shared memory. A shuffle does not order it.
template <bool SYNCS>
inline void exchange_in_warp(const Arguments& a) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x] = a.x[threadIdx.x];
  const float sum = warp_sum(1.0f);
  if (SYNCS) __syncwarp();
  a.out[threadIdx.x] = shared[threadIdx.x ^ 31] * sum;
}
KERNEL(64, missing_warp_barrier, Arguments) { exchange_in_warp<false>(a); }
KERNEL(64, with_warp_barrier, Arguments) { exchange_in_warp<true>(a); }

// Overwrites shared memory that other threads read, without a barrier between.
template <bool SYNCS>
inline void read_and_overwrite(const Arguments& a) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x] = a.x[threadIdx.x];
  __syncthreads();
  const float other = shared[63 - threadIdx.x];
  if (SYNCS) __syncthreads();
  shared[threadIdx.x] = 2.0f * other;
  a.out[threadIdx.x] = shared[threadIdx.x];
}
KERNEL(64, missing_second_barrier, Arguments) { read_and_overwrite<false>(a); }
KERNEL(64, with_second_barrier, Arguments) { read_and_overwrite<true>(a); }

// Bytes of one word, written by different threads, are no race; the same byte is.
template <int THREADS_PER_BYTE>
inline void write_bytes(const Arguments& a) {
  char* shared = shared_memory();
  shared[threadIdx.x / THREADS_PER_BYTE] = char(threadIdx.x / THREADS_PER_BYTE);
  __syncthreads();
  a.out[threadIdx.x] = shared[0];
}
KERNEL(64, same_byte, Arguments) { write_bytes<2>(a); }
KERNEL(64, own_byte, Arguments) { write_bytes<1>(a); }

// Threads of a block exchange values through global memory.
template <bool SYNCS>
inline void exchange_in_global(const Arguments& a) {
  a.out[threadIdx.x] = a.x[threadIdx.x];
  if (SYNCS) __syncthreads();
  const float other = a.out[63 - threadIdx.x];
  if (SYNCS) __syncthreads();
  a.out[threadIdx.x] = other;
}
KERNEL(64, missing_global_barrier, Arguments) { exchange_in_global<false>(a); }
KERNEL(64, with_global_barrier, Arguments) { exchange_in_global<true>(a); }

// Reads the target of asynchronous copies.
template <bool WAITS>
inline void copy_and_read(const Arguments& a) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  if (threadIdx.x < 16) copy_to_shared(shared + 4 * threadIdx.x, a.x + 4 * threadIdx.x);
  if (WAITS) wait_for_copies();
  __syncthreads();
  a.out[threadIdx.x] = shared[63 - threadIdx.x];
}
KERNEL(64, missing_copy_wait, Arguments) { copy_and_read<false>(a); }
KERNEL(64, with_copy_wait, Arguments) { copy_and_read<true>(a); }

// Two groups of copies, of which the first has landed.
template <int GROUP>
inline void copy_in_groups(const Arguments& a) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  for (int group = 0; group < 2; group++) {
    if (threadIdx.x < 8) copy_to_shared(shared + 32 * group + 4 * threadIdx.x, a.x + 32 * group + 4 * threadIdx.x);
    commit_copies();
  }
  wait_for_copies_but<1>();
  __syncthreads();
  a.out[threadIdx.x] = shared[32 * GROUP + threadIdx.x % 32];
}
KERNEL(64, wrong_copy_group, Arguments) { copy_in_groups<1>(a); }
KERNEL(64, right_copy_group, Arguments) { copy_in_groups<0>(a); }

// Every block adds one.
KERNEL(64, lost_update, Arguments) {
  const float before = *a.out;
  __syncthreads();
  if (threadIdx.x == 0) *a.out = before + 1.0f;
}
KERNEL(64, atomic_update, Arguments) {
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned*>(a.out), 1u);
}

// Every block adds one by two atomics, between which another block may add.
KERNEL(64, two_atomics, Arguments) {
  if (threadIdx.x > 0) return;
  unsigned* sum = reinterpret_cast<unsigned*>(a.out);
  const unsigned before = atomicAdd(sum, 0u);
  for (int i = 0; i < 64; i++) a.out[1 + blockIdx.x] = a.x[i];
  atomicExch(sum, before + 1);
}

enum Fences { NONE, OF_WRITERS, ALL };

// The last block adds up what all blocks have stored.
template <Fences FENCES, bool AT_GPU_SCOPE>
inline void sum_of_blocks(const Arguments& a) {
  unsigned* counter = reinterpret_cast<unsigned*>(a.out + a.count - 1);
  unsigned* scratch = reinterpret_cast<unsigned*>(shared_memory());
  if (threadIdx.x == 0) a.out[1 + blockIdx.x] = a.x[blockIdx.x];
  bool last;
  if (FENCES == ALL) {
    last = is_last_block(counter, gridDim.x, scratch);
  } else {
    if (FENCES == OF_WRITERS) __threadfence();
    if (threadIdx.x == 0) *scratch = atomicAdd(counter, 1u);
    __syncthreads();
    last = *scratch == gridDim.x - 1;
  }
  if (!last || threadIdx.x != 0) return;
  float sum = 0.0f;
  for (unsigned i = 1; i <= gridDim.x; i++) sum += AT_GPU_SCOPE ? load_gpu_scope(a.out + i) : a.out[i];
  a.out[0] = sum;
}
KERNEL(64, missing_fence, Arguments) { sum_of_blocks<NONE, true>(a); }
KERNEL(64, missing_fence_plain_load, Arguments) { sum_of_blocks<NONE, false>(a); }
KERNEL(64, missing_second_fence, Arguments) { sum_of_blocks<OF_WRITERS, true>(a); }
KERNEL(64, with_fence, Arguments) { sum_of_blocks<ALL, true>(a); }
KERNEL(64, with_fence_plain_load, Arguments) { sum_of_blocks<ALL, false>(a); }

// Writes for the host and sets its flag, the last word.
template <bool SYNCS, bool WRITES_LATER>
inline void write_for_host(const Arguments& a) {
  a.out[threadIdx.x] = a.x[threadIdx.x];
  if (SYNCS) __syncthreads();
  if (threadIdx.x == 0) release_to_host(reinterpret_cast<unsigned*>(a.out + a.count - 1), 1);
  if (WRITES_LATER && threadIdx.x == 0) a.out[0] = 0.0f;
}
KERNEL(64, early_flag, Arguments) { write_for_host<false, false>(a); }
KERNEL(64, store_after_flag, Arguments) { write_for_host<true, true>(a); }
KERNEL(64, flag_in_time, Arguments) { write_for_host<true, false>(a); }

// Sums 16 `count` products of 1/3 in f16 on the tensor cores, and adds to f32 every STEPS instructions.
template <int STEPS>
inline void long_sum(const Arguments& a) {
  const unsigned third = 0x35553555;
  const unsigned weights[4] = {third, third, third, third}, values[2] = {third, third};
  float total = 0.0f, sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int step = 1; step <= a.count; step++) {
    mma_m16n8k16(sums, weights, values);
    if (step % STEPS != 0 && step < a.count) continue;
    total += sums[0];
    sums[0] = 0.0f;
  }
  a.out[threadIdx.x] = total;
}
KERNEL(32, sum_in_tensor_cores, Arguments) { long_sum<1 << 30>(a); }
KERNEL(32, sum_in_f32, Arguments) { long_sum<4>(a); }
