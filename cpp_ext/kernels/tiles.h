// The eight tile registers of AMX, each 16 rows of 64 bytes; and the same in plain C++, so that what is built on them can
// be tested on a CPU that has none. No flag of the compiler is needed: the instructions are spelled out. For amx.cpp alone.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace hybridgen {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row: 16 sums or 64 int8

// Tiles of the CPU. A thread's are its own, and lost when it calls `release`.
struct CpuTiles {
  static void configure() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kTileBytes;
      config.rows[tile] = kTileRows;
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  static void release() { asm volatile("tilerelease" ::: "memory"); }

  template <int T>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  // Rows that lie `stride` bytes apart.
  template <int T>
  static void load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
  }
  // Sum[m][n] += sum over k of A[m][k] * B[k][n]: int8 by fours, row k / 4 of B has four of each n; int32 sums.
  template <int Sum, int A, int B>
  static void add_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
  }
};

// What these instructions do, for tests; what a CPU refuses ends the process.
struct EmulatedTiles {
  static void configure() {
    check(!state().configured);
    state() = {};
    state().configured = true;
  }
  static void release() {
    check(state().configured);
    state().configured = false;
  }

  template <int T>
  static void zero() {
    check(state().configured);
    std::memset(state().tiles[T], 0, sizeof state().tiles[T]);
  }
  template <int T>
  static void load(const void* from, std::int64_t stride) {
    zero<T>();
    for (int row = 0; row < kTileRows; ++row) {
      std::memcpy(state().tiles[T][row], static_cast<const char*>(from) + row * stride, kTileBytes);
    }
  }
  template <int T>
  static void store(void* to, std::int64_t stride) {
    check(state().configured);
    for (int row = 0; row < kTileRows; ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, state().tiles[T][row], kTileBytes);
    }
  }
  template <int Sum, int A, int B>
  static void add_bytes() {
    static_assert(Sum != A && A != B && Sum != B);
    check(state().configured);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 16; ++n) {
        std::int32_t sum;
        std::uint8_t* at = state().tiles[Sum][m] + 4 * n;
        std::memcpy(&sum, at, 4);
        for (int k = 0; k < 64; ++k) {
          sum += static_cast<std::int8_t>(state().tiles[A][m][k]) *
                 static_cast<std::int8_t>(state().tiles[B][k / 4][4 * n + k % 4]);
        }
        std::memcpy(at, &sum, 4);
      }
    }
  }

 private:
  struct State {
    bool configured = false;
    std::uint8_t tiles[8][kTileRows][kTileBytes] = {};
  };
  static State& state() {
    static thread_local State one;
    return one;
  }
  static void check(bool good) {
    if (!good) std::abort();
  }
};

}  // namespace
}  // namespace hybridgen
