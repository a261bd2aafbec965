// CUDA C++ on a CPU: the built-ins of CUDA that the kernels use, for a C++ compiler.
//
// Every thread of a block is a fiber. Blocks run one after the other; fibers switch at barriers and warp primitives
// alone, in an order that is a parameter, so that races show as results which depend on it. Memory ends at an
// inaccessible page, so that out-of-bounds accesses fault.
//
// Not modelled: memory visibility between concurrent blocks, bank conflicts, speed.
#pragma once

#include <csetjmp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define CUDA_EMULATOR 1

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulator {

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;

// State of a warp primitive: the lanes that have arrived, and their operands.
struct Warp {
  uint64_t values[WARP];
  // Operands of mma: four words of a, two of b.
  uint32_t fragments[WARP][6];
  uint32_t mask = 0, arrived = 0, generation = 0;
  int line = 0;
};

struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  char* stack = nullptr;
  bool started, done;
  unsigned index, lane, warp;
  dim3 thread;
};

// The thread block that runs on the current CPU thread.
struct Block {
  dim3 grid, size, index;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Fiber* current = nullptr;
  unsigned running = 0;
  // Threads at the barrier, its source line, and the number of barriers passed.
  unsigned waiting = 0, generation = 0;
  int line = 0;
  // Incremented whenever a thread proceeds; a round without progress is a deadlock.
  uint64_t progress = 0;
  jmp_buf scheduler;
  char* shared = nullptr;
  const char* kernel = "";
  void (*body)(const void*) = nullptr;
  const void* arguments = nullptr;
  bool failed = false;
  char message[512];
};

extern thread_local Block* block;

// Switches to the next fiber of the block.
void yield_fiber();
// Aborts the launch with a message.
[[noreturn]] void fail(const char* what, int line);
// __syncthreads.
void wait_for_block(int line);
// __syncwarp for the lanes of `mask`.
void wait_for_warp(uint32_t mask, int line);

template <class T>
T shuffle(uint32_t mask, T value, unsigned source, int line) {
  static_assert(sizeof(T) <= 8, "at most two registers");
  Fiber* fiber = block->current;
  Warp& warp = block->warps[fiber->warp];
  uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof value);
  warp.values[fiber->lane] = raw;
  wait_for_warp(mask, line);
  if (source >= WARP) source = fiber->lane;
  if (!(mask >> source & 1)) fail("a shuffle reads a lane outside of its mask", line);
  std::memcpy(&value, &warp.values[source], sizeof value);
  wait_for_warp(mask, line);
  return value;
}

uint32_t ballot(uint32_t mask, bool predicate, int line);

// mma.m16n8k16 in f16 with f32 sums, rounded after every product.
void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line);

// A kernel, registered by name.
struct Kernel {
  const char* name;
  unsigned max_threads;
  size_t argument_bytes;
  void (*body)(const void*);
  const Kernel* next;

  Kernel(const char* name, unsigned max_threads, size_t argument_bytes, void (*body)(const void*));
};

}  // namespace emulator

#define __device__
#define __forceinline__ inline
#define __noinline__ static
#define __restrict__ __restrict
#define threadIdx (emulator::block->current->thread)
#define blockIdx (emulator::block->index)
#define blockDim (emulator::block->size)
#define gridDim (emulator::block->grid)
#define __syncthreads() emulator::wait_for_block(__LINE__)
#define __syncwarp() emulator::wait_for_warp(0xffffffffu, __LINE__)
#define __shfl_sync(mask, value, lane) emulator::shuffle(mask, value, unsigned(lane), __LINE__)
#define __shfl_xor_sync(mask, value, with) \
  emulator::shuffle(mask, value, emulator::block->current->lane ^ unsigned(with), __LINE__)
#define __shfl_up_sync(mask, value, by) \
  emulator::shuffle(mask, value, emulator::block->current->lane - unsigned(by), __LINE__)
#define __ballot_sync(mask, predicate) emulator::ballot(mask, predicate, __LINE__)

// Defines and registers a kernel with one argument, a structure.
#define KERNEL(threads, name, Arguments)                                                     \
  static void name(const Arguments a);                                                       \
  static void run_##name(const void* arguments) {                                            \
    name(*static_cast<const Arguments*>(arguments));                                         \
  }                                                                                          \
  static const emulator::Kernel kernel_##name(#name, threads, sizeof(Arguments), run_##name); \
  static void name(const Arguments a)

static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline void __threadfence() {}
template <class Number>
static inline Number atomicAdd(Number* place, Number value) {
  return __atomic_fetch_add(place, value, __ATOMIC_SEQ_CST);
}
static inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
