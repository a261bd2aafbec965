// Fibers, barriers, memory and launches of the emulator.
#include "checks.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <algorithm>
#include <csignal>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace emulator {

__thread Block* block = nullptr;

namespace {

constexpr uint32_t ALL = 0xffffffffu;

// Blocks that are resident at once in shuffled orders.
constexpr unsigned RESIDENT = 4;

std::mutex allocations_mutex;
std::map<uintptr_t, Allocation>& allocations() {
  static std::map<uintptr_t, Allocation> all;
  return all;
}

size_t page_bytes() {
  static const size_t bytes = size_t(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t whole_pages(size_t bytes) {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

// Alignment of device memory. Only the checks report accesses to the padding after its end.
constexpr size_t ALIGNMENT = 16;

// Inaccessible memory on both sides of an allocation, 1 to 64 MiB and four times its size if possible: wider than any stride of the
// tests, so that an address computed from one allocation never lies in another.
size_t guard_bytes(size_t bytes) {
  const size_t least = size_t(1) << 20, most = size_t(64) << 20;
  return whole_pages(std::min(std::max(4 * bytes, least), most));
}

struct sigaction previous;

// An invalid access aborts the launch, not the program.
void on_fault(int signal, siginfo_t* about, void* context) {
  if (block && block->current) {
    Block& b = *block;
    std::snprintf(b.message, sizeof b.message,
                  "%s accesses memory out of bounds: block (%u, %u, %u) thread %u, %s", b.kernel->name, b.index.x, b.index.y,
                  b.index.z, b.current->index, Outside(uintptr_t(about->si_addr)).text);
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

void switch_to_scheduler() {
  Fiber* fiber = block->current;
  if (!_setjmp(fiber->resume)) _longjmp(block->scheduler, 1);
}

// Waits until the counter changes.
void wait_for_change(const unsigned& counter) {
  Fiber* fiber = block->current;
  fiber->counter = &counter;
  fiber->value = counter;
  switch_to_scheduler();
  fiber->counter = nullptr;
}

// Runs a fiber, for one thread after the other.
void enter() {
  for (;;) {
    Block& b = *block;
    b.kernel->body(b.arguments);
    b.current->done = true;
    b.running--;
    b.progress++;
    // Finished threads do not block a barrier.
    if (b.running && b.waiting == b.running) {
      b.waiting = 0;
      b.generation++;
    }
    switch_to_scheduler();
  }
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
                    "%s: a warp primitive at line %d never completes: mask %08x, lanes arrived %08x", b.kernel->name,
                    warp.line, warp.mask, warp.arrived);
      return;
    }
  }
  std::snprintf(b.message, sizeof b.message,
                "%s: __syncthreads at line %d never completes: %u of %u threads have arrived", b.kernel->name, b.line,
                b.waiting, b.running);
}

// Runs each fiber of a block until it waits.
void run_round(Block& b, const std::vector<unsigned>& order) {
  const uint64_t before = b.progress;
  block = &b;
  for (unsigned index = 0; index < order.size() && !b.failed; index++) {
    Fiber& fiber = b.fibers[order[index]];
    if (fiber.done || (fiber.counter && *fiber.counter == fiber.value)) continue;
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
  b.current = nullptr;
  block = nullptr;
}

// Prepares a block to run from the beginning.
void begin_block(Block& b, unsigned number) {
  const unsigned threads = b.size.x;
  b.index = {number % b.grid.x, number / b.grid.x % b.grid.y, number / b.grid.x / b.grid.y};
  b.first_thread = number * threads;
  b.running = threads;
  b.waiting = b.generation = 0;
  b.warps.assign((threads + WARP - 1) / WARP, Warp{});
  std::memset(b.shared, 0xff, b.shared_bytes);
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = b.fibers[i];
    fiber.done = false;
    fiber.counter = nullptr;
    fiber.index = i;
    fiber.lane = i % WARP;
    fiber.warp = i / WARP;
    fiber.number = b.first_thread + i;
    fiber.thread = {i, 0, 0};
    fiber.copies.clear();
    fiber.groups.clear();
  }
}

void wait_for_lanes(uint32_t mask, int line) {
  Fiber* fiber = block->current;
  Warp& warp = block->warps[fiber->warp];
  if (!(mask >> fiber->lane & 1)) fail("a lane is not in its own mask", line);
  if (warp.arrived == 0) {
    warp.mask = mask;
    warp.line = line;
  }
  if (warp.mask != mask) fail("lanes of a warp disagree about the mask", line);
  warp.arrived |= 1u << fiber->lane;
  block->progress++;
  if (warp.arrived == mask) {
    warp.arrived = 0;
    warp.generation++;
    return;
  }
  wait_for_change(warp.generation);
}

// Lets the oldest copies land.
void land(size_t count) {
  Fiber& fiber = *block->current;
  for (size_t index = 0; index < count; index++) {
    const Copy& copy = fiber.copies[index];
    std::memcpy(copy.to, copy.from, 16);
    if (block->checks) block->checks->access(copy.to, 16, Kind::LAND);
  }
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + count);
  for (size_t& end : fiber.groups) end -= std::min(end, count);
}

float f16_to_float(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fff, sign = (bits & 0x8000) << 16;
  uint32_t word = (magnitude << 13) + (112u << 23);
  if (magnitude >= 0x7c00) word += 112u << 23;
  float value;
  std::memcpy(&value, &word, sizeof value);
  if (magnitude < 0x400) value = float(magnitude) * 0x1p-24f;
  return sign ? -value : value;
}

// Products added at once by a tensor core of compute capability 8.0, and bits kept below the last bit of the largest.
constexpr unsigned PRODUCTS_AT_ONCE = 8;
constexpr int EXTRA_BITS = 1;

// sum + a . b as tensor cores compute it: exact products, aligned to the largest addend, truncated, added, truncated.
float add_products(float sum, const float (&a)[PRODUCTS_AT_ONCE], const float (&b)[PRODUCTS_AT_ONCE]) {
  double addends[PRODUCTS_AT_ONCE + 1] = {sum}, largest = std::fabs(sum);
  for (unsigned k = 0; k < PRODUCTS_AT_ONCE; k++) {
    addends[k + 1] = double(a[k]) * double(b[k]);
    largest = std::max(largest, std::fabs(addends[k + 1]));
  }
  double plain = 0.0;
  for (const double addend : addends) plain += addend;
  if (largest == 0.0 || !std::isfinite(plain)) return float(plain);
  // The power of two of the largest addend.
  uint64_t bits;
  std::memcpy(&bits, &largest, sizeof bits);
  const int exponent = int(bits >> 52) - 1023;
  const auto power = [](int exponent) {
    const uint64_t bits = uint64_t(exponent + 1023) << 52;
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  const int last = std::max(exponent - 23 - EXTRA_BITS, -149);
  const double inverse = power(-last);
  int64_t total = 0;
  for (const double addend : addends) total += int64_t(addend * inverse);
  uint64_t magnitude = uint64_t(total < 0 ? -total : total);
  if (magnitude >> 24) {
    const int excess = 64 - __builtin_clzll(magnitude) - 24;
    magnitude = magnitude >> excess << excess;
  }
  const double rounded = double(magnitude) * power(last);
  return float(total < 0 ? -rounded : rounded);
}

}  // namespace

Block::Block() = default;

Block::~Block() {
  for (Fiber& fiber : fibers) munmap(fiber.stack, STACK_BYTES);
}

void fail(const char* what, int line) {
  Block& b = *block;
  int length = std::snprintf(b.message, sizeof b.message, "%s: block (%u, %u, %u) thread %u %s", b.kernel->name,
                             b.index.x, b.index.y, b.index.z, b.current->index, what);
  if (line && length < int(sizeof b.message))
    std::snprintf(b.message + length, sizeof b.message - length, ", line %d", line);
  b.failed = true;
  for (;;) switch_to_scheduler();
}

void yield() {
  block->progress++;
  switch_to_scheduler();
}

char* shared_memory() { return block->shared; }
dim3 thread_index() { return block->current->thread; }
dim3 block_index() { return block->index; }
dim3 block_size() { return block->size; }
dim3 grid_size() { return block->grid; }
unsigned lane() { return block->current->lane; }

void wait_for_block(int line) {
  Block& b = *block;
  if (b.waiting == 0) b.line = line;
  if (b.line != line) fail("waits at another __syncthreads than other threads of the block", line);
  b.waiting++;
  b.progress++;
  if (b.waiting == b.running) {
    b.waiting = 0;
    b.generation++;
    return;
  }
  wait_for_change(b.generation);
}

void sync_warp(uint32_t mask, int line) {
  Warp& warp = block->warps[block->current->warp];
  const uint32_t syncs = warp.syncs;
  wait_for_lanes(mask, line);
  warp.syncs = syncs + 1;
}

uint64_t shuffle_bits(uint32_t mask, uint64_t value, unsigned source, int line) {
  Fiber* fiber = block->current;
  Warp& warp = block->warps[fiber->warp];
  uint64_t* values = warp.values[warp.generation % 2];
  values[fiber->lane] = value;
  wait_for_lanes(mask, line);
  if (source >= WARP) source = fiber->lane;
  if (!(mask >> source & 1)) fail("shuffles from a lane outside of its mask", line);
  value = values[source];
  if (mask != ALL) wait_for_lanes(mask, line);
  return value;
}

uint32_t ballot(uint32_t mask, bool predicate, int line) {
  Fiber* fiber = block->current;
  Warp& warp = block->warps[fiber->warp];
  uint64_t* values = warp.values[warp.generation % 2];
  values[fiber->lane] = predicate;
  wait_for_lanes(mask, line);
  uint32_t bits = 0;
  for (unsigned lane = 0; lane < WARP; lane++) {
    if (mask >> lane & 1) bits |= uint32_t(values[lane]) << lane;
  }
  if (mask != ALL) wait_for_lanes(mask, line);
  return bits;
}

void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line) {
  Fiber* fiber = block->current;
  Warp& warp = block->warps[fiber->warp];
  const unsigned lane = fiber->lane;
  float(&fragments)[WARP][12] = warp.fragments[warp.generation % 2];
  for (unsigned word = 0; word < 6; word++) {
    const unsigned bits = word < 4 ? a[word] : b[word - 4];
    fragments[lane][2 * word] = f16_to_float(bits & 0xffff);
    fragments[lane][2 * word + 1] = f16_to_float(bits >> 16);
  }
  wait_for_lanes(ALL, line);
  for (unsigned index = 0; index < 4; index++) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + index % 2, lower = index / 2;
    for (unsigned half = 0; half < 2; half++) {
      float of_a[PRODUCTS_AT_ONCE], of_b[PRODUCTS_AT_ONCE];
      for (unsigned k = 0; k < PRODUCTS_AT_ONCE; k++) {
        of_a[k] = fragments[row * 4 + k / 2][2 * (lower + 2 * half) + k % 2];
        of_b[k] = fragments[column * 4 + k / 2][2 * (4 + half) + k % 2];
      }
      sums[index] = add_products(sums[index], of_a, of_b);
    }
  }
}

void copy_to_shared(void* to, const void* from) {
  if (block->checks) {
    block->checks->access(from, 16, Kind::READ);
    block->checks->access(to, 16, Kind::COPY);
  }
  std::memset(to, 0xff, 16);
  block->current->copies.push_back({static_cast<char*>(to), static_cast<const char*>(from)});
}

void commit_copies() { block->current->groups.push_back(block->current->copies.size()); }

void wait_for_copies() {
  block->current->groups.clear();
  land(block->current->copies.size());
}

void wait_for_copies_but(unsigned groups) {
  std::vector<size_t>& ends = block->current->groups;
  if (ends.size() <= groups) return;
  const size_t count = ends[ends.size() - groups - 1];
  ends.erase(ends.begin(), ends.end() - groups);
  land(count);
}

void fence() {
  if (block->checks) block->checks->fence();
}

template <class Number>
static Number add(Number* place, Number value) {
  const Number before = __atomic_fetch_add(place, value, __ATOMIC_SEQ_CST);
  if (block->checks) block->checks->atomic(place);
  return before;
}

unsigned atomic_add(unsigned* place, unsigned value) { return add(place, value); }
uint64_t atomic_add(uint64_t* place, uint64_t value) { return add(place, value); }

unsigned atomic_exchange(unsigned* place, unsigned value) {
  const unsigned before = __atomic_exchange_n(place, value, __ATOMIC_SEQ_CST);
  if (block->checks) block->checks->atomic(place);
  return before;
}

void release_to_host(unsigned* flag, unsigned value) {
  if (block->checks) block->checks->release_to_host();
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

unsigned acquire_from_host(const unsigned* flag) {
  yield();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

float load_sys_scope(const float* address) { return *address; }

float load_gpu_scope(const float* address) {
  if (block->checks) block->checks->access(address, 4, Kind::READ);
  return *address;
}

Outside::Outside(uintptr_t address) {
  std::lock_guard lock(allocations_mutex);
  const auto next = allocations().upper_bound(address);
  std::snprintf(text, sizeof text, "far from every buffer");
  size_t nearest = size_t(64) << 20;
  if (next != allocations().end() && next->first - address < nearest) {
    nearest = next->first - address;
    std::snprintf(text, sizeof text, "%zu bytes before a buffer of %zu", nearest, next->second.bytes);
  }
  if (next == allocations().begin()) return;
  const Allocation& before = std::prev(next)->second;
  if (address - before.start < before.bytes + nearest)
    std::snprintf(text, sizeof text, "at byte %zu of a buffer of %zu", size_t(address - before.start), before.bytes);
}

// Whether a range lies within one allocation.
extern "C" bool emulator_holds(uintptr_t address, size_t bytes) {
  const Allocation allocation = find_allocation(address);
  return !bytes || (allocation.start && bytes <= allocation.bytes - (address - allocation.start));
}

Allocation find_allocation(uintptr_t address) {
  std::lock_guard lock(allocations_mutex);
  auto next = allocations().upper_bound(address);
  if (next == allocations().begin()) return {};
  const Allocation& allocation = std::prev(next)->second;
  return address - allocation.start < allocation.bytes ? allocation : Allocation{};
}

// Allocates memory between inaccessible pages, which ends where they begin; null on failure. `is_host` marks it as host memory.
extern "C" void* emulator_allocate(size_t bytes, bool is_host) {
  const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  const size_t usable = std::max(whole_pages(rounded), page_bytes());
  const size_t guard = guard_bytes(rounded), mapped = usable + 2 * guard;
  char* start = static_cast<char*>(
      mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (start == MAP_FAILED) return nullptr;
  if (mprotect(start + guard, usable, PROT_READ | PROT_WRITE) != 0) {
    munmap(start, mapped);
    return nullptr;
  }
  char* memory = start + guard + usable - rounded;
  std::memset(memory, 0xff, rounded);  // NaN, so that reads of uninitialised memory show
  std::lock_guard lock(allocations_mutex);
  allocations()[uintptr_t(memory)] = {uintptr_t(memory), bytes, is_host};
  return memory;
}

extern "C" void emulator_free(void* memory, size_t bytes) {
  const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  const size_t usable = std::max(whole_pages(rounded), page_bytes());
  char* start = static_cast<char*>(memory) + rounded - usable - guard_bytes(rounded);
  {
    std::lock_guard lock(allocations_mutex);
    allocations().erase(uintptr_t(memory));
  }
  munmap(start, usable + 2 * guard_bytes(rounded));
}

// Finds a kernel by name, in the copy with checks or without; null if there is none.
extern "C" const void* emulator_find(const char* name, bool has_checks) {
  for (const Kernel* kernel = has_checks ? checked_kernels() : plain_kernels(); kernel; kernel = kernel->next) {
    if (std::strcmp(kernel->name, name) == 0) return kernel;
  }
  return nullptr;
}

// Runs a kernel; returns null, or an error message that is valid until the next launch on this thread.
extern "C" const char* emulator_launch(const void* which, const unsigned grid[3], unsigned threads,
                                       size_t shared_bytes, unsigned order, bool has_checks, const void* arguments,
                                       size_t argument_bytes) {
  static thread_local Block residents[RESIDENT];
  static thread_local Checks checks;
  static thread_local std::vector<unsigned> thread_order, block_order;
  static thread_local char message[sizeof Block::message];
  const Kernel& kernel = *static_cast<const Kernel*>(which);
  const auto refuse = [&](const char* why) {
    std::snprintf(message, sizeof message, "%s: %s", kernel.name, why);
    return message;
  };
  if (argument_bytes != kernel.argument_bytes) return refuse("the size of the arguments does not match");
  if (threads == 0 || threads > kernel.max_threads || threads > MAX_THREADS)
    return refuse("the block exceeds the kernel's launch bounds");
  if (!grid[0] || !grid[1] || !grid[2]) return refuse("the grid is empty");
  install_fault_handler();
  const unsigned blocks = grid[0] * grid[1] * grid[2];
  make_order(thread_order, threads, order);
  make_order(block_order, blocks, order);
  if (has_checks) checks.begin(blocks, threads, order);
  const unsigned resident = order < 2 ? 1 : std::min(blocks, RESIDENT);
  std::vector<Block*> running;
  const char* why = nullptr;
  for (unsigned index = 0; index < resident && !why; index++) {
    Block& b = residents[index];
    b.kernel = &kernel;
    b.arguments = arguments;
    b.grid = {grid[0], grid[1], grid[2]};
    b.size = {threads, 1, 1};
    b.checks = has_checks ? &checks : nullptr;
    b.failed = false;
    b.shared_bytes = shared_bytes;
    b.shadow.assign(has_checks ? (shared_bytes + 3) / 4 : 0, Word{});
    b.shared = static_cast<char*>(emulator_allocate(shared_bytes, false));
    if (!b.shared) why = refuse("out of memory for its shared memory");
    while (b.fibers.size() < threads && !why) {
      void* stack =
          mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stack == MAP_FAILED) {
        why = refuse("out of memory for its threads");
        break;
      }
      // Fibers that wait for their next thread are not moved.
      if (b.fibers.capacity() < MAX_THREADS) b.fibers.reserve(MAX_THREADS);
      b.fibers.emplace_back().stack = static_cast<char*>(stack);
    }
    running.push_back(&b);
  }
  unsigned next = 0;
  uint32_t random = order;
  std::vector<Block*> idle;
  if (!why) idle.swap(running);
  while (!why && (next < blocks || !running.empty())) {
    while (!idle.empty() && next < blocks) {
      begin_block(*idle.back(), block_order[next++]);
      running.push_back(idle.back());
      idle.pop_back();
    }
    random = random * 1664525u + 1013904223u;
    const size_t chosen = uint64_t(random) * running.size() >> 32;
    Block& b = *running[chosen];
    run_round(b, thread_order);
    if (b.failed) why = std::strcpy(message, b.message);
    if (b.running) continue;
    running.erase(running.begin() + chosen);
    idle.push_back(&b);
  }
  for (unsigned index = 0; index < resident; index++) {
    Block& b = residents[index];
    if (b.shared) emulator_free(b.shared, shared_bytes);
    b.shared = nullptr;
    // After a failure, threads are still in the midst of the kernel.
    for (Fiber& fiber : b.fibers) fiber.started &= fiber.done;
  }
  return why;
}

}  // namespace emulator
