// Races: checks of every access of a kernel, which the compiler reports through the callbacks of a thread sanitizer.
#include "checks.h"

#include <algorithm>
#include <dlfcn.h>

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace emulator {

void Checks::begin(uint32_t blocks, uint32_t threads, uint32_t order) {
  launch_++;
  random_ = order;
  yields_ = order >= 2;
  threads_ = threads;
  fences_ = 1;
  // Pages of freed memory are not kept for ever.
  if (pages_.size() > 4096) pages_.clear();
  cache_.fill({});
  splits_.clear();
  fenced_.assign(size_t(blocks) * threads, {});
  published_.assign(size_t(blocks) * threads, 0);
  blocks_.assign(blocks, {});
  atomics_.clear();
  host_stores_.clear();
  is_released_ = false;
}

Access Checks::now() const {
  const Fiber& fiber = *block->current;
  return {fiber.number, uint16_t(block->generation), uint16_t(block->warps[fiber.warp].syncs), fences_};
}

bool Checks::is_own(uint32_t thread) const { return thread - block->first_thread < threads_; }

// Whether a thread that performed an atomic has fenced after a barrier after the access.
bool Checks::is_before_barrier(const Access& access) const {
  return int16_t(access.barrier - blocks_[access.thread / threads_].published_barrier) < 0;
}

// Whether the current block has seen an atomic of the other block, which followed a fence after the access, and has fenced since.
bool Checks::is_published(const Access& before, const Access& now) const {
  const BlockState& state = blocks_[now.thread / threads_];
  const uint32_t other = before.thread / threads_;
  if (state.acquired.empty() || !state.acquired[other]) return false;
  const auto follows = [&](const Access& later, const Access& earlier) {
    return later.thread == earlier.thread || later.barrier != earlier.barrier;
  };
  // The thread of the atomic fences before a barrier, or this thread after it.
  const auto fences = [&](uint32_t thread) {
    const Access& fence = fenced_[thread];
    return fence.thread != NOBODY && fence.fences > state.atomic.fences && follows(fence, state.atomic) && follows(now, fence);
  };
  if (!fences(now.thread) && !fences(state.atomic.thread)) return false;
  return before.fences < published_[before.thread] || is_before_barrier(before);
}

bool Checks::is_ordered(const Access& before, const Access& now, bool is_shared) const {
  if (before.thread == now.thread || before.thread == NOBODY) return true;
  // Shared memory of a block that ran here before is not this block's.
  if (!is_own(before.thread)) return is_shared || is_published(before, now);
  if (before.barrier != now.barrier) return true;
  const uint32_t first = block->first_thread;
  return (before.thread - first) / WARP == (now.thread - first) / WARP && before.sync != now.sync;
}

void Checks::report(const char* does, const Access& other, const char* did, uintptr_t address, const char* why) {
  const Block& b = *block;
  char place[96], text[400];
  const uintptr_t shared = uintptr_t(b.shared);
  if (address - shared < b.shared_bytes) {
    std::snprintf(place, sizeof place, "byte %zu of shared memory", size_t(address - shared));
  } else {
    const Allocation allocation = find_allocation(address);
    std::snprintf(place, sizeof place, "byte %zu of %zu of a buffer", size_t(address - allocation.start),
                  allocation.bytes);
  }
  const uint32_t number = other.thread / threads_;
  std::snprintf(text, sizeof text, "%s %s, which block (%u, %u, %u) thread %u %s, %s", does, place,
                number % b.grid.x, number / b.grid.x % b.grid.y, number / b.grid.x / b.grid.y,
                other.thread % threads_, did, why);
  fail(text, 0);
}

void Checks::check(Cell& cell, Kind kind, const Access& now, uintptr_t address, bool is_shared) {
  const Access& writer = cell.writer;
  const auto why = [&](const Access& other) {
    return is_own(other.thread) ? "without a barrier between" : "unordered by fences and an atomic";
  };
  if (kind == Kind::LAND) {
    cell.writer = now;
    cell.copying = false;
    return;
  }
  const char* does = kind == Kind::READ ? "reads" : "overwrites";
  if (cell.copying && is_own(writer.thread))
    report(does, writer, "copies to asynchronously", address, "before it has waited for the copy");
  if (!is_ordered(writer, now, is_shared)) report(does, writer, "wrote", address, why(writer));
  if (kind != Kind::READ) {
    for (const Access& reader : cell.readers) {
      if (!is_ordered(reader, now, is_shared)) report("overwrites", reader, "read", address, why(reader));
    }
    cell = {now, {}, kind == Kind::COPY};
    return;
  }
  // An earlier reader that is ordered before this one is covered by it. Of those that are not, two are kept, of
  // different blocks or warps if possible.
  Access(&readers)[2] = cell.readers;
  for (Access& reader : readers) {
    if (is_ordered(reader, now, is_shared)) {
      reader = now;
      return;
    }
  }
  const auto group = [&](const Access& a) { return std::array{a.thread / threads_, a.thread % threads_ / WARP}; };
  if (group(readers[0]) == group(readers[1])) readers[1] = now;
}

// Whether a thread reads a constant of the program or the kernel's arguments.
bool Checks::is_constant(uintptr_t address, Kind kind) {
  if (kind != Kind::READ) return false;
  if (address - uintptr_t(block->arguments) < block->kernel->argument_bytes) return true;
  uintptr_t& known = constants_[address / PAGE_BYTES % constants_.size()];
  Dl_info info;
  if (known != address / PAGE_BYTES && !dladdr(reinterpret_cast<void*>(address), &info)) return false;
  known = address / PAGE_BYTES;
  return true;
}

Checks::Page* Checks::find_page(uintptr_t address, size_t bytes, Kind kind) {
  const uintptr_t number = address / PAGE_BYTES;
  Cached& cached = cache_[number % CACHED];
  if (cached.number != number) {
    const Allocation allocation = find_allocation(address);
    if (!allocation.start) {
      if (is_constant(address, kind)) return nullptr;
      char text[160];
      std::snprintf(text, sizeof text, "accesses memory out of bounds, %s", Outside(address).text);
      fail(text, 0);
    }
    std::unique_ptr<Page>& page = pages_[number];
    if (!page) page = std::make_unique<Page>();
    if (page->launch != launch_) {
      page->launch = launch_;
      page->allocation = allocation;
      page->words.fill({});
    }
    cached = {number, page.get()};
  }
  // Pages are not shared between allocations.
  const Allocation& allocation = cached.page->allocation;
  const uintptr_t from = address - allocation.start;
  if (from < allocation.bytes && bytes <= allocation.bytes - from) return cached.page;
  char text[160];
  std::snprintf(text, sizeof text, "accesses %zu bytes out of bounds, %s", bytes, Outside(address).text);
  fail(text, 0);
}

void Checks::access(const void* pointer, size_t bytes, Kind kind) {
  const Block& b = *block;
  uintptr_t address = uintptr_t(pointer);
  if (address - uintptr_t(b.current->stack) < STACK_BYTES) return;
  random_ = random_ * 1664525u + 1013904223u;
  if (yields_ && random_ >> 27 == 0) yield();
  const bool is_shared = address - uintptr_t(b.shared) < b.shared_bytes;
  const Access now = this->now();
  while (bytes) {
    const unsigned first = address % 4, count = unsigned(bytes < 4 - first ? bytes : 4 - first);
    Word* word;
    if (is_shared) {
      const size_t index = (address - uintptr_t(b.shared)) / 4;
      if (index >= b.shadow.size()) return;  // out of bounds: the access faults
      word = const_cast<Word*>(&b.shadow[index]);
    } else {
      Page* page = find_page(address, count, kind);
      if (!page) return;
      word = &page->words[address % PAGE_BYTES / 4];
      if (page->allocation.is_host && kind == Kind::WRITE) {
        if (is_released_) fail("stores to host memory after the host's flag is released", 0);
        host_stores_[now.thread] = now;
      }
    }
    if (word->split < 0 && count < 4) {
      word->split = int32_t(splits_.size());
      splits_.push_back({word->cell, word->cell, word->cell, word->cell});
    }
    if (word->split < 0) {
      check(word->cell, kind, now, address, is_shared);
    } else {
      for (unsigned byte = first; byte < first + count; byte++)
        check(splits_[word->split][byte], kind, now, address + byte - first, is_shared);
    }
    address += count;
    bytes -= count;
  }
}

void Checks::fence() {
  fences_++;
  fenced_[block->current->number] = now();
}

void Checks::atomic(const void* address) {
  const Access now = this->now();
  const uint32_t own = now.thread / threads_;
  // A fence publishes the accesses of its thread, and those of others before the last barrier.
  for (uint32_t thread = block->first_thread; thread < block->first_thread + threads_; thread++) {
    const Access& fenced = fenced_[thread];
    if (is_ordered(fenced, now, true)) published_[thread] = std::max(published_[thread], fenced.fences);
  }
  BlockState& state = blocks_[own];
  if (fenced_[now.thread].thread != NOBODY) state.published_barrier = fenced_[now.thread].barrier;
  std::vector<uint32_t>& others = atomics_[address];
  state.acquired.resize(blocks_.size());
  for (const uint32_t other : others) state.acquired[other] = true;
  state.atomic = now;
  if (others.empty() || others.back() != own) others.push_back(own);
}

void Checks::release_to_host() {
  const Access now = this->now();
  for (const auto& [thread, store] : host_stores_) {
    if (is_ordered(store, now, false)) continue;
    char text[160];
    std::snprintf(text, sizeof text, "releases the host's flag before block %u thread %u has finished to write for it",
                  thread / threads_, thread % threads_);
    fail(text, 0);
  }
  is_released_ = true;
}

namespace {

void observe(const void* address, size_t bytes, Kind kind) {
  if (block && block->current && block->checks) block->checks->access(address, bytes, kind);
}

}  // namespace
}  // namespace emulator

// What the compiler calls with `-fsanitize=thread`.
extern "C" {
#define ACCESS(bytes)                                                                                   \
  void __tsan_read##bytes(void* address) { emulator::observe(address, bytes, emulator::Kind::READ); }   \
  void __tsan_write##bytes(void* address) { emulator::observe(address, bytes, emulator::Kind::WRITE); } \
  void __tsan_unaligned_read##bytes(void* address) { __tsan_read##bytes(address); }                     \
  void __tsan_unaligned_write##bytes(void* address) { __tsan_write##bytes(address); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
#undef ACCESS
void __tsan_read_range(void* address, size_t bytes) { emulator::observe(address, bytes, emulator::Kind::READ); }
void __tsan_write_range(void* address, size_t bytes) { emulator::observe(address, bytes, emulator::Kind::WRITE); }
// Some compilers call these for copies of memory.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  emulator::observe(from, bytes, emulator::Kind::READ);
  emulator::observe(to, bytes, emulator::Kind::WRITE);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  emulator::observe(from, bytes, emulator::Kind::READ);
  emulator::observe(to, bytes, emulator::Kind::WRITE);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  emulator::observe(to, bytes, emulator::Kind::WRITE);
  return std::memset(to, value, bytes);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
