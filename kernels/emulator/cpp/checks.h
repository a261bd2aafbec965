// Shadow memory: who wrote and who read each word of shared and global memory last, and what orders two accesses.
//
// Threads of a block are ordered by barriers, lanes of a warp also by __syncwarp. Blocks are ordered by a fence and an
// atomic of the earlier one, followed by an atomic on the same word and a fence of the later one. Every conflicting access that is
// not ordered is reported, whether or not it changed the result.
#pragma once

#include <array>
#include <memory>
#include <unordered_map>

#include "emulator.h"

namespace emulator {

constexpr uint32_t NOBODY = UINT32_MAX;

// The last access of a thread to a byte, with the barriers and warp barriers that the thread had passed, and the number
// of fences of the launch so far.
struct Access {
  uint32_t thread = NOBODY;
  uint16_t barrier = 0, sync = 0;
  uint32_t fences = 0;
};

struct Cell {
  Access writer;
  Access readers[2];
  // Whether an asynchronous copy to it has not landed.
  bool copying = false;
};

// State of a word of four bytes, or the number of the four cells of its bytes.
struct Word {
  Cell cell;
  int32_t split = -1;
};

enum class Kind { READ, WRITE, COPY, LAND };

// An allocation of the device, or mapped host memory.
struct Allocation {
  uintptr_t start = 0;
  size_t bytes = 0;
  bool is_host = false;
};

// The allocation that holds an address; empty if there is none.
Allocation find_allocation(uintptr_t address);

// Where an address outside of all allocations is, as text.
struct Outside {
  explicit Outside(uintptr_t address);
  char text[96];
};

// State of one launch. An object serves one CPU thread.
struct Checks {
  // In shuffled orders, threads yield before one access in 32, at random.
  void begin(uint32_t blocks, uint32_t threads, uint32_t order);
  void access(const void* address, size_t bytes, Kind kind);
  // The block's current thread performs a fence, an atomic, or a store of the host's flag.
  void fence();
  void atomic(const void* address);
  void release_to_host();

 private:
  static constexpr unsigned PAGE_BYTES = 4096, CACHED = 256;

  struct Page {
    uint32_t launch = 0;
    Allocation allocation;
    std::array<Word, PAGE_BYTES / 4> words;
  };
  struct Cached {
    uintptr_t number = 0;
    Page* page = nullptr;
  };
  struct BlockState {
    // Blocks whose atomics were seen.
    std::vector<bool> acquired;
    // When and by whom the last atomic was performed.
    Access atomic;
    // Barriers before the last fence of the thread that performed it.
    uint16_t published_barrier = 0;
  };

  // The page of an address, of which `bytes` are accessed; null for constants and arguments of the kernel. Fails if the bytes are
  // not within one allocation.
  Page* find_page(uintptr_t address, size_t bytes, Kind kind);
  bool is_constant(uintptr_t address, Kind kind);
  void check(Cell& cell, Kind kind, const Access& now, uintptr_t address, bool is_shared);
  Access now() const;
  bool is_own(uint32_t thread) const;
  bool is_ordered(const Access& before, const Access& now, bool is_shared) const;
  bool is_before_barrier(const Access& access) const;
  bool is_published(const Access& before, const Access& now) const;
  [[noreturn]] void report(const char* does, const Access& other, const char* did, uintptr_t address, const char* why);

  uint32_t launch_ = 0, threads_ = 0, fences_ = 0, random_ = 0;
  bool yields_ = false;
  // The last addresses of the program's own memory that the kernel has read, by page.
  std::array<uintptr_t, 16> constants_ = {};
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  std::array<Cached, CACHED> cache_;
  std::vector<std::array<Cell, 4>> splits_;
  // Of each thread: its last fence, and up to which fence its accesses are published.
  std::vector<Access> fenced_;
  std::vector<uint32_t> published_;
  std::vector<BlockState> blocks_;
  // Blocks that performed an atomic on a word.
  std::unordered_map<const void*, std::vector<uint32_t>> atomics_;
  // The last store of each thread to host memory, and whether a flag was released.
  std::unordered_map<uint32_t, Access> host_stores_;
  bool is_released_ = false;
};

}  // namespace emulator
