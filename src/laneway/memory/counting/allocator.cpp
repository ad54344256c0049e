// A CPU allocator for torch that counts: exact live and peak bytes, a hard limit, page-aligned big blocks.
//
// Blocks below 64 KiB come from malloc with their size in a header; they are never page-aligned. Blocks from 64 KiB on are
// anonymous mappings of whole pages, found by address in a sharded table; page alignment alone tells the two apart, so that
// the deleter needs the address only and the raw interface works. Bytes counted are bytes asked for.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

// What blocks need is on the heap and never destroyed: tensors may outlive every static object.

constexpr size_t PAGE = 4096, BIG = 64 << 10, HEADER = 64;
const c10::Device CPU{c10::DeviceType::CPU};

std::atomic<int64_t> live{0}, peak{0}, allocations{0}, refused{0}, cached{0};
std::atomic<int64_t> limit{INT64_MAX};
std::atomic<int64_t> fail_in{0}, fail_min{0};
std::atomic<bool> caching{false}, recording{false};

void raise_peak(int64_t seen) {
  int64_t before = peak.load(std::memory_order_relaxed);
  while (seen > before && !peak.compare_exchange_weak(before, seen)) {
  }
}

// ------------------------------------------------------------------------------------------------ the log

struct Event {
  double seconds;  // of the monotonic clock
  int64_t bytes;   // negative where freed
};

std::mutex log_lock;
auto& ring = *new std::vector<Event>;  // the newest ring.size() events; event i lies at i modulo the size
uint64_t logged = 0;

void note(int64_t bytes) noexcept {
  if (!recording.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> guard(log_lock);
  if (ring.empty()) return;
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  ring[logged++ % ring.size()] = {std::chrono::duration<double>(now).count(), bytes};
}

// ------------------------------------------------------------------------------------------------ big blocks

struct Block {
  size_t bytes, mapped;
};

struct Shard {
  std::mutex lock;
  std::unordered_map<void*, Block> blocks;
};

auto& shards = *new std::array<Shard, 32>;

Shard& shard_of(void* p) {
  return shards[(reinterpret_cast<uintptr_t>(p) / PAGE * 0x9E3779B97F4A7C15u) >> 59];
}

// Freed blocks by size class, linked through their first word. Eight classes to an octave: at most an eighth is lost.
constexpr int FIRST_OCTAVE = 16, CLASSES = (64 - FIRST_OCTAVE) * 8;
std::mutex cache_lock;
std::array<void*, CLASSES> cache{};

size_t class_step(size_t mapped) { return size_t{1} << (63 - __builtin_clzll(mapped) - 3); }

size_t up(size_t n, size_t step) { return (n + step - 1) / step * step; }

int class_of(size_t mapped) {
  const int octave = 63 - __builtin_clzll(mapped);
  return (octave - FIRST_OCTAVE) * 8 + static_cast<int>((mapped - (size_t{1} << octave)) / class_step(mapped));
}

void unmap(void* p, size_t mapped) noexcept {
  // It can fail only where a mapping would have to be split beyond the system's count: then the pages go, the addresses stay.
  if (munmap(p, mapped)) madvise(p, mapped, MADV_DONTNEED);
}

void* take_cached(size_t mapped) noexcept {
  std::lock_guard<std::mutex> guard(cache_lock);
  void*& head = cache[class_of(mapped)];
  void* p = head;
  if (!p) return nullptr;
  head = *static_cast<void**>(p);
  cached -= static_cast<int64_t>(mapped);
  return p;
}

bool keep(void* p, size_t mapped) noexcept {
  if (!caching || mapped % class_step(mapped)) return false;
  std::lock_guard<std::mutex> guard(cache_lock);
  void*& head = cache[class_of(mapped)];
  *static_cast<void**>(p) = head;
  head = p;
  cached += static_cast<int64_t>(mapped);
  return true;
}

void empty_cache() noexcept {
  std::lock_guard<std::mutex> guard(cache_lock);
  for (int i = 0; i < CLASSES; ++i) {
    const size_t octave = size_t{1} << (FIRST_OCTAVE + i / 8), mapped = octave + octave / 8 * (i % 8);
    while (void* p = cache[i]) {
      cache[i] = *static_cast<void**>(p);
      unmap(p, mapped);
      cached -= static_cast<int64_t>(mapped);
    }
  }
}

void* map_big(size_t n) noexcept {
  size_t mapped = up(n, PAGE);
  void* p = nullptr;
  if (caching) {
    mapped = up(mapped, class_step(mapped));
    p = take_cached(mapped);
  }
  for (int attempt = 0; !p && attempt < 2; ++attempt) {
    p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p != MAP_FAILED) break;
    p = nullptr;
    empty_cache();
  }
  if (!p) return nullptr;
  try {
    Shard& shard = shard_of(p);
    std::lock_guard<std::mutex> guard(shard.lock);
    shard.blocks[p] = {n, mapped};
  } catch (const std::bad_alloc&) {
    unmap(p, mapped);
    return nullptr;
  }
  return p;
}

size_t free_big(void* p) noexcept {
  Block block;
  {
    Shard& shard = shard_of(p);
    std::lock_guard<std::mutex> guard(shard.lock);
    const auto found = shard.blocks.find(p);
    if (found == shard.blocks.end()) {
      std::fprintf(stderr, "laneway: the counting allocator was asked to free a block that it does not have\n");
      std::abort();
    }
    block = found->second;
    shard.blocks.erase(found);
  }
  if (!keep(p, block.mapped)) unmap(p, block.mapped);
  return block.bytes;
}

// ------------------------------------------------------------------------------------------------ small blocks

struct Header {
  size_t bytes;
  void* start;
};

bool page_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % PAGE == 0; }

void* malloc_small(size_t n) noexcept {
  void* start = nullptr;
  if (posix_memalign(&start, HEADER, HEADER + n)) return nullptr;
  char* p = static_cast<char*>(start) + HEADER;
  if (page_aligned(p)) {  // one in 64: take a block that can begin elsewhere
    std::free(start);
    if (posix_memalign(&start, HEADER, 2 * HEADER + n)) return nullptr;
    p = static_cast<char*>(start) + HEADER;
    if (page_aligned(p)) p += HEADER;
  }
  *reinterpret_cast<Header*>(p - HEADER) = {n, start};
  return p;
}

size_t free_small(void* p) noexcept {
  const Header header = *reinterpret_cast<Header*>(static_cast<char*>(p) - HEADER);
  std::free(header.start);
  return header.bytes;
}

// ------------------------------------------------------------------------------------------------ the allocator

[[noreturn]] void refuse(size_t n, int64_t now, const char* why) {
  ++refused;
  c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(n), now, now + cached, CPU);
  const int64_t most = limit;
  const std::string bound = most == INT64_MAX ? "none" : c10::str(most, " bytes");
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CPU out of memory (", why, "): wanted ", n, " bytes, live ", now,
                   " bytes, limit ", bound);
  std::abort();
}

bool fails_by_request(size_t n) {
  return fail_in.load(std::memory_order_relaxed) > 0 && static_cast<int64_t>(n) >= fail_min && fail_in.fetch_sub(1) == 1;
}

// Bytes are taken from the limit before the memory is, in one step, so that threads neither pass it nor block each other.
int64_t reserve(size_t n) {
  int64_t now = live.load();
  if (n > static_cast<size_t>(INT64_MAX)) refuse(n, now, "more than there can be");
  do {
    if (static_cast<int64_t>(n) > limit - now) refuse(n, now, "over the limit");
  } while (!live.compare_exchange_weak(now, now + static_cast<int64_t>(n)));
  return now + static_cast<int64_t>(n);
}

void release(void* p) {
  if (!p) return;
  const int64_t bytes = static_cast<int64_t>(page_aligned(p) ? free_big(p) : free_small(p));
  const int64_t now = live -= bytes;
  note(-bytes);
  c10::reportMemoryUsageToProfiler(p, -bytes, now, now + cached, CPU);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &release, CPU};
    if (fails_by_request(n)) refuse(n, live, "a failure that was asked for");
    const int64_t now = reserve(n);
    void* p = n < BIG ? malloc_small(n) : map_big(n);
    if (!p) refuse(n, live -= static_cast<int64_t>(n), "the system has no more");
    raise_peak(now);
    ++allocations;
    note(static_cast<int64_t>(n));
    c10::reportMemoryUsageToProfiler(p, static_cast<int64_t>(n), now, now + cached, CPU);
    return {p, p, &release, CPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};

Counting* const counting = new Counting;

// A fork while another thread allocates must not leave the child with a lock that nobody holds.
void lock_all() {
  for (Shard& shard : shards) shard.lock.lock();
  cache_lock.lock();
  log_lock.lock();
}

void unlock_all() {
  log_lock.unlock();
  cache_lock.unlock();
  for (Shard& shard : shards) shard.lock.unlock();
}

}  // namespace

extern "C" {

// Make torch use it; 0 where another allocator has a higher priority.
int laneway_counting_install(int with_cache) {
  static const int registered = pthread_atfork(lock_all, unlock_all, unlock_all);
  if (registered) return 0;
  caching = with_cache != 0;
  if (c10::GetCPUAllocator() != counting) c10::SetCPUAllocator(counting, 255);
  return c10::GetCPUAllocator() == counting;
}

int64_t laneway_counting_live() { return live; }
int64_t laneway_counting_peak() { return peak; }
int64_t laneway_counting_allocations() { return allocations; }
int64_t laneway_counting_refused() { return refused; }
int64_t laneway_counting_cached() { return cached; }
int64_t laneway_counting_limit() { return limit; }
void laneway_counting_set_limit(int64_t bytes) { limit = bytes; }
void laneway_counting_empty_cache() { empty_cache(); }

void laneway_counting_reset_peak() {
  peak = live.load();
  raise_peak(live);
}

void laneway_counting_fail_at(int64_t allocation, int64_t min_bytes) {
  fail_in = 0;
  fail_min = min_bytes;
  fail_in = allocation;
}

int64_t laneway_counting_fails_in() { return std::max<int64_t>(fail_in, 0); }

// Bytes from p on that belong to the block of 64 KiB or more that begins there; 0 where none does.
int64_t laneway_counting_mapped(void* p) {
  if (!p || !page_aligned(p)) return 0;
  Shard& shard = shard_of(p);
  std::lock_guard<std::mutex> guard(shard.lock);
  const auto found = shard.blocks.find(p);
  return found == shard.blocks.end() ? 0 : static_cast<int64_t>(found->second.mapped);
}

// Start a log of the newest `events`; 0 ends it and keeps nothing. Returns 0 where there is no memory for it.
int laneway_counting_record(int64_t events) {
  std::lock_guard<std::mutex> guard(log_lock);
  recording = false;
  logged = 0;
  try {
    ring = std::vector<Event>(static_cast<size_t>(events));
  } catch (const std::bad_alloc&) {
    return 0;
  }
  recording = events > 0;
  return 1;
}

// Events since the log was started, and how many of them it still has.
int64_t laneway_counting_logged() {
  std::lock_guard<std::mutex> guard(log_lock);
  return static_cast<int64_t>(logged);
}

int64_t laneway_counting_kept() {
  std::lock_guard<std::mutex> guard(log_lock);
  return static_cast<int64_t>(std::min<uint64_t>(logged, ring.size()));
}

// Copy the newest events, at most `room`, oldest first; returns how many.
int64_t laneway_counting_events(double* seconds, int64_t* bytes, int64_t room) {
  std::lock_guard<std::mutex> guard(log_lock);
  const uint64_t count = std::min<uint64_t>({logged, ring.size(), static_cast<uint64_t>(room)});
  for (uint64_t i = 0; i < count; ++i) {
    const Event& event = ring[(logged - count + i) % ring.size()];
    seconds[i] = event.seconds;
    bytes[i] = event.bytes;
  }
  return static_cast<int64_t>(count);
}

}  // extern "C"
