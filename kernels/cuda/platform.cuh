// What kernels need of the machine, and nothing else here is written in its own language: instructions
// that C++ has no words for, each beside what it means.
#pragma once

#ifndef CUDA_EMULATOR
// Takes one argument, a structure, which the processor passes by a pointer.
#define KERNEL(threads, name, Arguments) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Arguments a)
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned long long uint64_t;
#endif

// Numbers of a block, which share a scale.
constexpr int BLOCK = 32;
// Blocks that share two more in q4_k.
constexpr int SUPER_BLOCK = 8;
// Threads of a warp.
constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// The memory that threads of a block share, as much as the launch asks for.
__device__ __forceinline__ char* shared_memory() {
#ifdef CUDA_EMULATOR
  return emulator::block->shared;
#else
  extern __shared__ __align__(16) char memory[];
  return memory;
#endif
}

// A half-precision number.
__device__ __forceinline__ float half_to_float(uint16_t bits) {
#ifdef CUDA_EMULATOR
  _Float16 value;
  std::memcpy(&value, &bits, sizeof value);
  return float(value);
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}

// The nearest half-precision number, ties to even.
__device__ __forceinline__ uint16_t float_to_half(float value) {
#ifdef CUDA_EMULATOR
  const _Float16 half = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
#else
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#endif
}

// A bfloat16 number: the upper half of a float.
__device__ __forceinline__ float brain_to_float(unsigned bits) { return __uint_as_float(bits << 16); }

// The nearest bfloat16 number, ties to even; for numbers, not for NaN.
__device__ __forceinline__ float round_to_brain(float value) {
  const unsigned bits = __float_as_uint(value);
  return __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

// Reads 16 bytes that nobody writes and that are read once: past the first-level cache.
__device__ __forceinline__ uint4 load_once(const uint4* place) {
#ifdef CUDA_EMULATOR
  return *place;
#else
  uint4 value;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(place));
  return value;
#endif
}

// c plus the products of four signed bytes each.
__device__ __forceinline__ int dot4(unsigned a, unsigned b, int c) {
#ifdef CUDA_EMULATOR
  for (int byte = 0; byte < 4; byte++) c += int(int8_t(a >> 8 * byte)) * int(int8_t(b >> 8 * byte));
  return c;
#else
  int sum;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
#endif
}

// Adds the product of a tile of halves, 16 rows of 16 columns, with another, 16 rows of 8 columns, to one of
// floats, on the tensor cores; a warp together. Lane 4 i + j has of the first tile the columns 2 j and 2 j + 1 of row i,
// the same of row i + 8, and both once more 8 columns further on; of the second rows 2 j and 2 j + 1 of column i, and 8 rows
// further on; of the sums columns 2 j and 2 j + 1 of rows i and i + 8.
__device__ __forceinline__ void multiply_tiles(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef CUDA_EMULATOR
  emulator::multiply_tiles(sums, a, b, __LINE__);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Copies 16 bytes into shared memory while the thread goes on.
__device__ __forceinline__ void copy_to_shared(void* to, const void* from) {
#ifdef CUDA_EMULATOR
  std::memcpy(to, from, 16);
#else
  const unsigned place = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
#endif
}

// Waits for all copies that this thread has asked for.
__device__ __forceinline__ void wait_for_copies() {
#ifndef CUDA_EMULATOR
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Says to the processor beside, in memory that both see, that all before has been written.
__device__ __forceinline__ void release_to_host(unsigned* flag, unsigned value) {
#ifdef CUDA_EMULATOR
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
#else
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#endif
}

// Reads what the other side has released.
__device__ __forceinline__ unsigned acquire_from_host(const unsigned* flag) {
#ifdef CUDA_EMULATOR
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#else
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
#endif
}

// Reads a float that the processor beside has just written: not from a cache of ours.
__device__ __forceinline__ float load_from_host(const float* place) {
#ifdef CUDA_EMULATOR
  return *place;
#else
  float value;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(value) : "l"(place) : "memory");
  return value;
#endif
}

// Reads what other blocks have written, not from this processor's cache.
__device__ __forceinline__ float load_from_blocks(const float* place) {
#ifdef CUDA_EMULATOR
  return *place;
#else
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(place) : "memory");
  return value;
#endif
}

// Nanoseconds of a clock that all blocks share.
__device__ __forceinline__ uint64_t nanoseconds() {
#ifdef CUDA_EMULATOR
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1000000000u + uint64_t(time.tv_nsec);
#else
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
#endif
}
