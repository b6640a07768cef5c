#include "read_ceiling.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>

namespace hybridgen {
namespace {

constexpr std::size_t kLine = 64;

// A load that nothing uses: the widest that the CPU has. Assembly, so that no compiler drops it and this file needs no
// target region; a load retires when its bytes are there, so nothing has to be made of them.
struct Portable {
  static void line(const char* p) {
    for (std::size_t i = 0; i < kLine; i += 8) {
      static_cast<void>(*reinterpret_cast<const volatile std::uint64_t*>(p + i));
    }
  }
  static void end() {}
};

#if defined(__x86_64__)
struct Zmm {
  static void line(const char* p) { asm volatile("vmovdqu64 (%0), %%zmm0" : : "r"(p) : "xmm0"); }
  static void end() { asm volatile("vzeroupper" : : : "xmm0"); }
};

struct Ymm {
  static void line(const char* p) {
    asm volatile("vmovdqu (%0), %%ymm0\n\tvmovdqu 32(%0), %%ymm1" : : "r"(p) : "xmm0", "xmm1");
  }
  static void end() { asm volatile("vzeroupper" : : : "xmm0"); }
};
#endif

using Walk = void (*)(const char* from, std::size_t bytes, std::size_t ahead);

template <class Load, int Streams>
void walk(const char* from, std::size_t bytes, std::size_t ahead) {
  const std::size_t part = bytes / Streams;
  const auto each = [&](auto touch) {
    for (std::size_t at = 0; at < part; at += kLine) {
      for (int s = 0; s < Streams; ++s) touch(from + static_cast<std::size_t>(s) * part + at);
    }
  };
  if (ahead == 0) {
    each([](const char* p) { Load::line(p); });
  } else {
    each([&](const char* p) {  // beyond the end it is a wish without effect
      __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(p) + ahead), 0, 2);
      Load::line(p);
    });
  }
  Load::end();
}

template <class Load>
Walk walk_of(int streams) {
  switch (streams) {
    case 1: return walk<Load, 1>;
    case 2: return walk<Load, 2>;
    case 4: return walk<Load, 4>;
    case 8: return walk<Load, 8>;
    default: throw std::invalid_argument("streams=" + std::to_string(streams) + ": must be 1, 2, 4 or 8");
  }
}

Walk best_walk(int streams) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return walk_of<Zmm>(streams);
  if (__builtin_cpu_supports("avx")) return walk_of<Ymm>(streams);
#endif
  return walk_of<Portable>(streams);
}

bool run_on([[maybe_unused]] int core) {
#if defined(__linux__)
  if (core < 0 || core >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
#else
  return true;
#endif
}

}  // namespace

double read_seconds(const void* data, std::size_t bytes, int passes, const std::vector<int>& cores,
                    const ReadLoop& loop, std::size_t* walked) {
  using Clock = std::chrono::steady_clock;
  if (cores.empty() || passes < 1) throw std::invalid_argument("cores: none given, or passes < 1");
  if (loop.chunk_bytes == 0 || loop.chunk_bytes % (8 * kLine) != 0 || bytes < loop.chunk_bytes || !data) {
    throw std::invalid_argument("chunk_bytes=" + std::to_string(loop.chunk_bytes) + ": must be a multiple of 512, and "
                                "at most bytes=" + std::to_string(bytes));
  }
  const Walk read = best_walk(loop.streams);
  const std::size_t chunks = bytes / loop.chunk_bytes;
  const std::size_t all = chunks * static_cast<std::size_t>(passes);
  std::atomic<std::size_t> next{0}, ready{0};
  std::atomic<bool> pinned{true};
  struct Times {
    Clock::time_point start, end;
  };
  std::vector<Times> times(cores.size());
  const auto work = [&](std::size_t i) {
    if (!run_on(cores[i])) pinned = false;
    ++ready;
    while (ready < cores.size()) std::this_thread::yield();  // all begin together
    const auto start = Clock::now();
    for (std::size_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < all;) {
      read(static_cast<const char*>(data) + chunk % chunks * loop.chunk_bytes, loop.chunk_bytes, loop.ahead_bytes);
    }
    times[i] = {start, Clock::now()};
  };
  std::vector<std::thread> threads;
  try {
    for (std::size_t i = 0; i < cores.size(); ++i) threads.emplace_back(work, i);
  } catch (...) {  // those that there are must not wait for those that there are not
    next = all;
    ready = cores.size();
    for (auto& thread : threads) thread.join();
    throw;
  }
  for (auto& thread : threads) thread.join();
  if (!pinned) throw std::invalid_argument("cores: one of them is not a core that this process may run on");
  *walked = all * loop.chunk_bytes;
  Times span = times.front();
  for (const Times& t : times) span = {std::min(span.start, t.start), std::max(span.end, t.end)};
  return std::chrono::duration<double>(span.end - span.start).count();
}

}  // namespace hybridgen
