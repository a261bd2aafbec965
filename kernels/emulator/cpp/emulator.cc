// Fibers, barriers, memory and launches of the emulator.
#include "emulator.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <algorithm>
#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

namespace emulator {

thread_local Block* block = nullptr;

namespace {

constexpr size_t STACK_BYTES = 128 << 10;

const Kernel*& kernels() {
  static const Kernel* first = nullptr;
  return first;
}

size_t page_bytes() {
  static const size_t bytes = size_t(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t whole_pages(size_t bytes) {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

// Alignment of device memory. Accesses to the padding after its end are not caught.
constexpr size_t ALIGNMENT = 16;

struct sigaction previous;

// An invalid access aborts the launch, not the program.
void on_fault(int signal, siginfo_t* about, void* context) {
  if (block && block->current) {
    Block& b = *block;
    std::snprintf(b.message, sizeof b.message,
                  "%s accesses %p out of bounds: block (%u, %u, %u) thread %u",
                  b.kernel, about->si_addr, b.index.x, b.index.y, b.index.z, b.current->index);
    b.failed = true;
    _longjmp(b.scheduler, 1);
  }
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal, about, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal);
  std::signal(signal, SIG_DFL);  // the instruction is repeated, and kills the program
}

void install_fault_handler() {
  static const bool watching = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGBUS, &action, nullptr);
    return sigaction(SIGSEGV, &action, &previous) == 0;
  }();
  (void)watching;
}

void enter() {
  Block* b = block;
  b->body(b->arguments);
  b->current->done = true;
  b->running--;
  b->progress++;
  // Finished threads do not block a barrier.
  if (b->running && b->waiting == b->running) {
    b->waiting = 0;
    b->generation++;
  }
  _longjmp(b->scheduler, 1);
}

void start(Fiber& fiber) {
  fiber.started = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
  setcontext(&fiber.context);
}

// A permutation of 0..count: 0 forward, 1 reverse, from 2 shuffled with `order` as seed.
void make_order(std::vector<unsigned>& numbers, unsigned count, unsigned order) {
  numbers.resize(count);
  for (unsigned i = 0; i < count; i++) numbers[i] = i;
  if (order == 1) std::reverse(numbers.begin(), numbers.end());
  if (order < 2) return;
  uint32_t state = order * 2654435761u + count;
  for (unsigned i = count; i > 1; i--) {
    state = state * 1664525u + 1013904223u;
    std::swap(numbers[i - 1], numbers[(uint64_t(state) * i) >> 32]);
  }
}

// Writes the message for a deadlock.
void explain_deadlock(Block& b) {
  for (const Warp& warp : b.warps) {
    if (warp.arrived) {
      std::snprintf(b.message, sizeof b.message,
                    "%s: a warp primitive at line %d never completes: mask %08x, lanes arrived %08x", b.kernel,
                    warp.line, warp.mask, warp.arrived);
      return;
    }
  }
  std::snprintf(b.message, sizeof b.message,
                "%s: __syncthreads at line %d never completes: %u of %u threads have arrived", b.kernel, b.line,
                b.waiting, b.running);
}

// Runs all fibers of a block to the end, or to a failure.
void run_block(Block& b, const std::vector<unsigned>& order) {
  while (b.running && !b.failed) {
    const uint64_t before = b.progress;
    for (unsigned index = 0; index < order.size() && !b.failed; index++) {
      Fiber& fiber = b.fibers[order[index]];
      if (fiber.done) continue;
      b.current = &fiber;
      if (!_setjmp(b.scheduler)) {
        if (fiber.started) _longjmp(fiber.resume, 1);
        start(fiber);
      }
    }
    if (b.running && !b.failed && b.progress == before) {
      explain_deadlock(b);
      b.failed = true;
    }
  }
  b.current = nullptr;
}

}  // namespace

Kernel::Kernel(const char* name, unsigned max_threads, size_t argument_bytes, void (*body)(const void*))
    : name(name), max_threads(max_threads), argument_bytes(argument_bytes), body(body), next(kernels()) {
  kernels() = this;
}

void yield_fiber() {
  Fiber* fiber = block->current;
  if (!_setjmp(fiber->resume)) _longjmp(block->scheduler, 1);
}

void fail(const char* what, int line) {
  Block& b = *block;
  std::snprintf(b.message, sizeof b.message, "%s: %s, line %d, block (%u, %u, %u) thread %u", b.kernel, what, line,
                b.index.x, b.index.y, b.index.z, b.current->index);
  b.failed = true;
  for (;;) yield_fiber();
}

void wait_for_block(int line) {
  Block& b = *block;
  const unsigned generation = b.generation;
  if (b.waiting == 0) b.line = line;
  if (b.line != line) fail("threads of a block wait at two different __syncthreads", line);
  b.waiting++;
  b.progress++;
  if (b.waiting == b.running) {
    b.waiting = 0;
    b.generation++;
    return;
  }
  while (b.generation == generation) yield_fiber();
}

void wait_for_warp(uint32_t mask, int line) {
  Fiber* fiber = block->current;
  Warp& warp = block->warps[fiber->warp];
  if (!(mask >> fiber->lane & 1)) fail("a lane is not in its own mask", line);
  if (warp.arrived == 0) {
    warp.mask = mask;
    warp.line = line;
  }
  if (warp.mask != mask) fail("lanes of a warp disagree about the mask", line);
  const uint32_t generation = warp.generation;
  warp.arrived |= 1u << fiber->lane;
  block->progress++;
  if (warp.arrived == mask) {
    warp.arrived = 0;
    warp.generation++;
    return;
  }
  while (warp.generation == generation) yield_fiber();
}

uint32_t ballot(uint32_t mask, bool predicate, int line) {
  Fiber* fiber = block->current;
  Warp& warp = block->warps[fiber->warp];
  warp.values[fiber->lane] = predicate;
  wait_for_warp(mask, line);
  uint32_t bits = 0;
  for (unsigned lane = 0; lane < WARP; lane++) {
    if (mask >> lane & 1) bits |= uint32_t(warp.values[lane]) << lane;
  }
  wait_for_warp(mask, line);
  return bits;
}

void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line) {
  Fiber* fiber = block->current;
  Warp& warp = block->warps[fiber->warp];
  const unsigned lane = fiber->lane;
  std::memcpy(warp.fragments[lane], a, sizeof a);
  std::memcpy(warp.fragments[lane] + 4, b, sizeof b);
  wait_for_warp(0xffffffffu, line);
  const auto value = [&](unsigned source_lane, unsigned word, unsigned index) {
    const uint16_t bits = uint16_t(warp.fragments[source_lane][word] >> 16 * (index % 2));
    _Float16 value;
    std::memcpy(&value, &bits, sizeof value);
    return float(value);
  };
  for (unsigned index = 0; index < 4; index++) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + index % 2, lower = index / 2;
    for (unsigned k = 0; k < 16; k++) {
      const unsigned within = k % 8 / 2, further = k / 8;
      sums[index] += value(row * 4 + within, lower + 2 * further, k) * value(column * 4 + within, 4 + further, k);
    }
  }
  wait_for_warp(0xffffffffu, line);
}

// Allocates memory that ends at an inaccessible page; null on failure.
extern "C" void* emulator_allocate(size_t bytes) {
  const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  const size_t usable = std::max(whole_pages(rounded), page_bytes());
  const size_t mapped = usable + 2 * page_bytes();
  char* start = static_cast<char*>(
      mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (start == MAP_FAILED) return nullptr;
  if (mprotect(start + page_bytes(), usable, PROT_READ | PROT_WRITE) != 0) {
    munmap(start, mapped);
    return nullptr;
  }
  char* memory = start + page_bytes() + usable - rounded;
  std::memset(memory, 0xff, rounded);  // NaN, so that reads of uninitialised memory show
  return memory;
}

extern "C" void emulator_free(void* memory, size_t bytes) {
  const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  const size_t usable = std::max(whole_pages(rounded), page_bytes());
  char* start = static_cast<char*>(memory) + rounded - usable - page_bytes();
  munmap(start, usable + 2 * page_bytes());
}

// Finds a kernel by name; null if there is none.
extern "C" const void* emulator_find(const char* name) {
  for (const Kernel* kernel = kernels(); kernel; kernel = kernel->next) {
    if (std::strcmp(kernel->name, name) == 0) return kernel;
  }
  return nullptr;
}

// Runs a kernel; returns null, or an error message that is valid until the next launch on this thread.
extern "C" const char* emulator_launch(const void* which, const unsigned grid[3], unsigned threads,
                                       size_t shared_bytes, unsigned order, const void* arguments,
                                       size_t argument_bytes) {
  static thread_local Block memory;
  static thread_local std::vector<unsigned> thread_order, block_order;
  const Kernel& kernel = *static_cast<const Kernel*>(which);
  Block& b = memory;
  const auto refuse = [&](const char* why) {
    std::snprintf(b.message, sizeof b.message, "%s: %s", kernel.name, why);
    return b.message;
  };
  if (argument_bytes != kernel.argument_bytes) return refuse("the size of the arguments does not match");
  if (threads == 0 || threads > kernel.max_threads || threads > MAX_THREADS)
    return refuse("the block exceeds the kernel's launch bounds");
  if (!grid[0] || !grid[1] || !grid[2]) return refuse("the grid is empty");
  install_fault_handler();
  while (b.fibers.size() < threads) {
    Fiber fiber = {};
    void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) return refuse("out of memory for its threads");
    fiber.stack = static_cast<char*>(stack);
    b.fibers.push_back(fiber);
  }
  b.grid = {grid[0], grid[1], grid[2]};
  b.size = {threads, 1, 1};
  b.kernel = kernel.name;
  b.body = kernel.body;
  b.arguments = arguments;
  b.failed = false;
  b.shared = static_cast<char*>(emulator_allocate(shared_bytes));
  if (!b.shared) return refuse("out of memory for its shared memory");
  make_order(thread_order, threads, order);
  make_order(block_order, grid[0] * grid[1] * grid[2], order);
  block = &b;
  for (const unsigned number : block_order) {
    b.index = {number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
    b.running = threads;
    b.waiting = 0;
    b.warps.assign((threads + WARP - 1) / WARP, Warp{});
    std::memset(b.shared, 0xff, shared_bytes);
    for (unsigned i = 0; i < threads; i++) {
      Fiber& fiber = b.fibers[i];
      fiber.started = fiber.done = false;
      fiber.index = i;
      fiber.lane = i % WARP;
      fiber.warp = i / WARP;
      fiber.thread = {i, 0, 0};
    }
    run_block(b, thread_order);
    if (b.failed) break;
  }
  block = nullptr;
  emulator_free(b.shared, shared_bytes);
  return b.failed ? b.message : nullptr;
}

}  // namespace emulator
