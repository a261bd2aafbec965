// CUDA C++ on a processor: what a kernel's source sees when a C++ compiler reads it.
//
// A thread of a block is a fiber, a block runs after the other, and threads change over at barriers and
// warp primitives alone, in an order that is a parameter: what depends on it is a race. Memory lies
// before pages that cannot be read, so that what reads past its end is caught at once.
//
// Not modelled: what one block sees of another that runs at the same time, bank conflicts, speed.
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
constexpr unsigned MOST_THREADS = 1024;

// Lanes that have arrived at a warp primitive, and what they brought.
struct Warp {
  uint64_t brought[WARP];
  // Of tiles that are multiplied: four words of the first, two of the second.
  uint32_t tiles[WARP][6];
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

// The block that runs on a thread of the processor.
struct Block {
  dim3 grid, size, index;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Fiber* current = nullptr;
  unsigned alive = 0;
  // Threads at the barrier, where it stands in the source, and how often all have passed one.
  unsigned waiting = 0, generation = 0;
  int line = 0;
  // Grows whenever a thread gets further: a round in which it does not is a deadlock.
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

// Goes on with another thread of the block.
void change_over();
// Ends the launch with a message.
[[noreturn]] void fail(const char* what, int line);
// Waits for all threads of the block.
void wait_for_block(int line);
// Waits for the lanes of `mask`.
void wait_for_warp(uint32_t mask, int line);

template <class T>
T shuffle(uint32_t mask, T value, unsigned source, int line) {
  static_assert(sizeof(T) <= 8, "a register or two");
  Fiber* fiber = block->current;
  Warp& warp = block->warps[fiber->warp];
  uint64_t raw = 0;
  std::memcpy(&raw, &value, sizeof value);
  warp.brought[fiber->lane] = raw;
  wait_for_warp(mask, line);
  if (source >= WARP) source = fiber->lane;
  if (!(mask >> source & 1)) fail("a shuffle reads a lane outside of its mask", line);
  std::memcpy(&value, &warp.brought[source], sizeof value);
  wait_for_warp(mask, line);
  return value;
}

uint32_t ballot(uint32_t mask, bool predicate, int line);

// What tensor cores do with tiles of 16 x 16 and 16 x 8 halves; sums are rounded after every product.
void multiply_tiles(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line);

// A kernel that can be launched by its name.
struct Kernel {
  const char* name;
  unsigned most_threads;
  size_t argument_bytes;
  void (*body)(const void*);
  const Kernel* next;

  Kernel(const char* name, unsigned most_threads, size_t argument_bytes, void (*body)(const void*));
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

// Takes one argument, a structure.
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
