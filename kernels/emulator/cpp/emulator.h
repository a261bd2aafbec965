// CUDA C++ on a CPU: the built-ins of CUDA that the kernels use, for a C++ compiler.
//
// Every thread of a block is a fiber. Fibers switch at barriers and warp primitives, in an order that is a parameter, so
// that races show as results which depend on it. In shuffled orders several blocks are resident and take turns; with
// checks, fibers also yield at random accesses, the same in every run. Memory ends at an inaccessible page, so that
// out-of-bounds accesses fault. Kernels are compiled twice; the second copy reports every access to the checks of
// `checks.h`.
//
// Not modelled: loads that return old values, bank conflicts, speed.
#pragma once

#include <csetjmp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
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
constexpr size_t STACK_BYTES = 128 << 10;

struct Checks;
struct Word;

// State of a warp primitive: the lanes that have arrived, and their operands.
struct Warp {
  // In turns, so that a lane can write its next operand while others read.
  uint64_t values[2][WARP];
  // Operands of mma: eight numbers of a, four of b.
  float fragments[2][WARP][12];
  uint32_t mask = 0, arrived = 0, generation = 0;
  // __syncwarp calls passed. Other warp primitives do not order memory.
  uint32_t syncs = 0;
  int line = 0;
};

// An asynchronous copy of 16 bytes that has not landed.
struct Copy {
  char* to;
  const char* from;
};

struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  char* stack = nullptr;
  bool started = false, done = true;
  // It waits while the counter has this value; null if it does not wait.
  const unsigned* counter = nullptr;
  unsigned value = 0;
  unsigned index, lane, warp;
  // Number of the thread in the launch.
  uint32_t number;
  dim3 thread;
  // Copies that have not landed, the oldest first, and how many of them each committed group ends at.
  std::vector<Copy> copies;
  std::vector<size_t> groups;
};

// A kernel.
struct Kernel {
  const char* name;
  unsigned max_threads;
  size_t argument_bytes;
  void (*body)(const void*);
  const Kernel* next;
};

// A resident thread block.
struct Block {
  const Kernel* kernel;
  const void* arguments;
  dim3 grid, size, index;
  // Number of its first thread in the launch.
  uint32_t first_thread = 0;
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
  size_t shared_bytes = 0;
  // The checks, or null, and their state of each word of shared memory.
  Checks* checks = nullptr;
  std::vector<Word> shadow;
  bool failed = false;
  char message[512];

  Block();
  ~Block();
};

// The block that runs on this CPU thread.
extern __thread Block* block;

// Aborts the launch with a message.
[[noreturn]] void fail(const char* what, int line);
// Lets other threads and blocks run.
void yield();
// __syncthreads.
void wait_for_block(int line);
// __syncwarp for the lanes of `mask`.
void sync_warp(uint32_t mask, int line);
// Exchanges up to 8 bytes between the lanes of `mask`.
uint64_t shuffle_bits(uint32_t mask, uint64_t value, unsigned source, int line);
uint32_t ballot(uint32_t mask, bool predicate, int line);

// mma.m16n8k16 in f16 with f32 sums, with the rounding of tensor cores.
void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line);

// Asynchronous copies: the target is poisoned until the copy lands, which it does in a wait.
void copy_to_shared(void* to, const void* from);
void commit_copies();
void wait_for_copies();
void wait_for_copies_but(unsigned groups);

void fence();
unsigned atomic_add(unsigned* place, unsigned value);
uint64_t atomic_add(uint64_t* place, uint64_t value);
unsigned atomic_exchange(unsigned* place, unsigned value);
void release_to_host(unsigned* flag, unsigned value);
unsigned acquire_from_host(const unsigned* flag);
float load_sys_scope(const float* address);
float load_gpu_scope(const float* address);

// Shared memory of the block.
__attribute__((const)) char* shared_memory();
__attribute__((const)) dim3 thread_index();
__attribute__((const)) dim3 block_index();
__attribute__((const)) dim3 block_size();
__attribute__((const)) dim3 grid_size();
__attribute__((const)) unsigned lane();

template <class T>
static T shuffle(uint32_t mask, T value, unsigned source, int line) {
  static_assert(sizeof(T) <= 8, "at most two registers");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shuffle_bits(mask, bits, source, line);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The kernels of the two copies: without and with checks.
const Kernel* plain_kernels();
const Kernel* checked_kernels();

}  // namespace emulator

#define __device__
#define __forceinline__ inline
#define __noinline__ static
#define __restrict__ __restrict
#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())
#define gridDim (emulator::grid_size())
#define __syncthreads() emulator::wait_for_block(__LINE__)
#define __syncwarp() emulator::sync_warp(0xffffffffu, __LINE__)
#define __shfl_sync(mask, value, lane) emulator::shuffle(mask, value, unsigned(lane), __LINE__)
#define __shfl_xor_sync(mask, value, with) emulator::shuffle(mask, value, emulator::lane() ^ unsigned(with), __LINE__)
#define __shfl_up_sync(mask, value, by) emulator::shuffle(mask, value, emulator::lane() - unsigned(by), __LINE__)
#define __ballot_sync(mask, predicate) emulator::ballot(mask, predicate, __LINE__)
#define __threadfence() emulator::fence()
#define atomicAdd emulator::atomic_add
#define atomicExch emulator::atomic_exchange

// Defines a kernel with one argument, a structure, and adds it to the list `kernels`.
#define KERNEL(threads, name, Arguments)                                                                    \
  static void name(const Arguments a);                                                                      \
  static void run_##name(const void* arguments) {                                                           \
    name(*static_cast<const Arguments*>(arguments));                                                        \
  }                                                                                                         \
  static const emulator::Kernel kernel_##name = {#name, threads, sizeof(Arguments), run_##name, kernels};   \
  static const bool listed_##name = (kernels = &kernel_##name);                                             \
  static void name(const Arguments a)

static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
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
