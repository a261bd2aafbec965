// The only file with inline PTX: every instruction that C++ cannot express, next to its definition for the
// emulator.
#pragma once

#ifndef CUDA_EMULATOR
// Defines a kernel with one argument, a structure in constant parameter space.
#define KERNEL(threads, name, Arguments) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Arguments a)
// The same with registers for this many blocks per multiprocessor.
#define KERNEL_OF_BLOCKS(threads, blocks, name, Arguments) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Arguments a)
typedef unsigned char uint8_t;
typedef signed char int8_t;
typedef unsigned short uint16_t;
typedef unsigned long long uint64_t;
#else
#define KERNEL_OF_BLOCKS(threads, blocks, name, Arguments) KERNEL(threads, name, Arguments)
#endif

// Quantised weights per block; a block shares one scale.
constexpr int BLOCK = 32;
// Blocks per q4_k super-block, which shares the f16 scales d and dmin.
constexpr int SUPER_BLOCK = 8;
// Threads per warp.
constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// The thread block's dynamic shared memory, sized by the launch.
__device__ __forceinline__ char* shared_memory() {
#ifdef CUDA_EMULATOR
  return emulator::shared_memory();
#else
  extern __shared__ __align__(16) char memory[];
  return memory;
#endif
}

// Converts f16 bits to float.
__device__ __forceinline__ float f16_to_float(uint16_t bits) {
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

// Rounds to the nearest f16, ties to even.
__device__ __forceinline__ uint16_t float_to_f16(float value) {
#ifdef CUDA_EMULATOR
  const _Float16 rounded = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return bits;
#else
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#endif
}

// Rounds two floats to f16 and packs them, with `low` in the low 16 bits.
__device__ __forceinline__ unsigned floats_to_f16(float low, float high) {
#ifdef CUDA_EMULATOR
  return float_to_f16(low) | unsigned(float_to_f16(high)) << 16;
#else
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#endif
}

// Converts bf16 bits, the upper 16 bits of a float.
__device__ __forceinline__ float bf16_to_float(unsigned bits) { return __uint_as_float(bits << 16); }

// Rounds to the nearest bf16, ties to even. The value must not be NaN.
__device__ __forceinline__ float round_to_bf16(float value) {
  const unsigned bits = __float_as_uint(value);
  return __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

// Loads of read-only numbers that are used once, without allocating in L1. Volatile, so that the compiler does not move
// them after a branch to their use.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
#ifdef CUDA_EMULATOR
  return *address;
#else
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
#endif
}

__device__ __forceinline__ unsigned load_once(const unsigned* address) {
#ifdef CUDA_EMULATOR
  return *address;
#else
  unsigned value;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
#endif
}

__device__ __forceinline__ uint16_t load_once(const uint16_t* address) {
#ifdef CUDA_EMULATOR
  return *address;
#else
  uint16_t value;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(address));
  return value;
#endif
}

// Requests the 128 bytes around an address into L2.
__device__ __forceinline__ void prefetch(const void* address) {
#ifndef CUDA_EMULATOR
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Four bytes of the eight of a and b, which are numbered from the low byte of a: one per hexadecimal digit of `numbers`.
__device__ __forceinline__ unsigned byte_permute(unsigned a, unsigned b, unsigned numbers) {
#ifdef CUDA_EMULATOR
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned picked = 0;
  for (int byte = 0; byte < 4; byte++) picked |= unsigned(bytes >> 8 * (numbers >> 4 * byte & 7) & 0xff) << 8 * byte;
  return picked;
#else
  return __byte_perm(a, b, numbers);
#endif
}

// (a & b) | c in one instruction, which the compiler does not find for constants.
__device__ __forceinline__ unsigned and_or(unsigned a, unsigned b, unsigned c) {
#ifdef CUDA_EMULATOR
  return (a & b) | c;
#else
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#endif
}

// Dot product of four signed bytes, plus c.
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

// Tensor core multiply-accumulate of one warp: sums[16, 8] += a[16, 16] * b[16, 8], a and b in f16. Fragments of
// lane 4 i + j, two f16 per register:
//   a[0], a[1]: columns 2 j, 2 j + 1 of rows i and i + 8; a[2], a[3]: the same rows, 8 columns further;
//   b[0], b[1]: rows 2 j, 2 j + 1 of column i, and 8 rows further;
//   sums: columns 2 j, 2 j + 1 of rows i and i + 8.
__device__ __forceinline__ void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef CUDA_EMULATOR
  emulator::mma_m16n8k16(sums, a, b, __LINE__);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Loads four matrices of 8 rows of 8 f16 from shared memory by one warp. Lane 8 i + j passes the address of row j of matrix i;
// register i of lane 4 j + k is elements 2 k and 2 k + 1 of row j.
__device__ __forceinline__ void load_matrices(const uint16_t* row, unsigned (&registers)[4]) {
#ifdef CUDA_EMULATOR
  const int lane = threadIdx.x % WARP, offset = int(reinterpret_cast<const char*>(row) - shared_memory());
  for (int index = 0; index < 4; index++) {
    const int of_row = __shfl_sync(ALL_LANES, offset, 8 * index + lane / 4);
    registers[index] = *reinterpret_cast<const unsigned*>(shared_memory() + of_row + lane % 4 * 4);
  }
#else
  const unsigned address = unsigned(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
#endif
}

// Like `load_matrices`, but transposes each matrix: register i of lane 4 j + k holds column j of rows 2 k and 2 k + 1.
__device__ __forceinline__ void load_matrices_transposed(const uint16_t* row, unsigned (&registers)[4]) {
#ifdef CUDA_EMULATOR
  const int lane = threadIdx.x % WARP, offset = int(reinterpret_cast<const char*>(row) - shared_memory());
  for (int index = 0; index < 4; index++) {
    registers[index] = 0;
    for (int half = 0; half < 2; half++) {
      const int of_row = __shfl_sync(ALL_LANES, offset, 8 * index + lane % 4 * 2 + half);
      registers[index] |= unsigned(*reinterpret_cast<const uint16_t*>(shared_memory() + of_row + lane / 4 * 2)) << 16 * half;
    }
  }
#else
  const unsigned address = unsigned(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
#endif
}

// Starts an asynchronous copy of 16 bytes to shared memory, which must not be read before a wait.
__device__ __forceinline__ void copy_to_shared(void* to, const void* from) {
#ifdef CUDA_EMULATOR
  emulator::copy_to_shared(to, from);
#else
  const unsigned address = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
#endif
}

// Makes a group of this thread's asynchronous copies since the last one; the group may be empty.
__device__ __forceinline__ void commit_copies() {
#ifdef CUDA_EMULATOR
  emulator::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread's asynchronous copies but the last GROUPS.
template <int GROUPS>
__device__ __forceinline__ void wait_for_copies_but() {
#ifdef CUDA_EMULATOR
  emulator::wait_for_copies_but(GROUPS);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

// Waits for this thread's asynchronous copies, committed or not.
__device__ __forceinline__ void wait_for_copies() {
#ifdef CUDA_EMULATOR
  emulator::wait_for_copies();
#else
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Store-release in mapped host memory: the host's acquire of `flag` sees every write before this one.
__device__ __forceinline__ void release_to_host(unsigned* flag, unsigned value) {
#ifdef CUDA_EMULATOR
  emulator::release_to_host(flag, value);
#else
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#endif
}

// Load-acquire of a flag that the host stores with release.
__device__ __forceinline__ unsigned acquire_from_host(const unsigned* flag) {
#ifdef CUDA_EMULATOR
  return emulator::acquire_from_host(flag);
#else
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
#endif
}

// Loads a float from mapped host memory at system scope, not from a cache of this device.
__device__ __forceinline__ float load_sys_scope(const float* address) {
#ifdef CUDA_EMULATOR
  return emulator::load_sys_scope(address);
#else
  float value;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
#endif
}

// Loads a float that another thread block wrote, at GPU scope, not from this multiprocessor's L1.
__device__ __forceinline__ float load_gpu_scope(const float* address) {
#ifdef CUDA_EMULATOR
  return emulator::load_gpu_scope(address);
#else
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
#endif
}

// Four floats that another thread block wrote, as above.
__device__ __forceinline__ float4 load_gpu_scope(const float4* address) {
#ifdef CUDA_EMULATOR
  const float* floats = reinterpret_cast<const float*>(address);
  return {emulator::load_gpu_scope(floats), emulator::load_gpu_scope(floats + 1), emulator::load_gpu_scope(floats + 2),
          emulator::load_gpu_scope(floats + 3)};
#else
  float4 value;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(address)
               : "memory");
  return value;
#endif
}

// Global timer in nanoseconds, the same for all thread blocks.
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
