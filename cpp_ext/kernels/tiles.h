// The eight tile registers of AMX, each 16 rows of 64 bytes, or the first five of them fewer rows; and the same in plain
// C++, so that what is built on them can be tested on a CPU that has none. No flag of the compiler is needed: the
// instructions are spelled out. For amx.cpp alone.
#pragma once

#include <cstdint>
#include <cstring>

namespace hybridgen {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row: 16 sums, 32 bf16 or 64 int8
constexpr int kShortTiles = 5;  // may have fewer rows, each of which takes a product a cycle

// Tiles of the CPU. A thread's are its own, and lost when it calls `release`.
struct CpuTiles {
  static void configure(int short_rows = kTileRows) {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64);
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kTileBytes;
      config.rows[tile] = static_cast<std::uint8_t>(tile < kShortTiles ? short_rows : kTileRows);
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
  // The same where the bytes of B are unsigned.
  template <int Sum, int A, int B>
  static void add_codes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
  }
  // The same for bf16 by twos, in fp32. Subnormal numbers count as zero.
  template <int Sum, int A, int B>
  static void add_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
  }
};

// What these instructions do, for tests.
struct EmulatedTiles {
  static void configure(int short_rows = kTileRows) {
    std::memset(tiles(), 0, 8 * sizeof(Tile));
    for (int tile = 0; tile < 8; ++tile) rows()[tile] = tile < kShortTiles ? short_rows : kTileRows;
  }
  static void release() {
    std::memset(tiles(), 0xff, 8 * sizeof(Tile));
    for (int tile = 0; tile < 8; ++tile) rows()[tile] = 0;
  }

  template <int T>
  static void zero() {
    std::memset(tiles()[T], 0, sizeof(Tile));
  }
  template <int T>
  static void load(const void* from, std::int64_t stride) {
    for (int row = 0; row < rows()[T]; ++row) {
      std::memcpy(tiles()[T][row], static_cast<const char*>(from) + row * stride, kTileBytes);
    }
  }
  template <int T>
  static void store(void* to, std::int64_t stride) {
    for (int row = 0; row < rows()[T]; ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, tiles()[T][row], kTileBytes);
    }
  }
  template <int Sum, int A, int B>
  static void add_bytes() {
    add<Sum, A, B, std::int32_t>([](const std::uint8_t* a, const std::uint8_t* b) {
      std::int32_t sum = 0;
      for (int k = 0; k < 4; ++k) sum += static_cast<std::int8_t>(a[k]) * static_cast<std::int8_t>(b[k]);
      return sum;
    });
  }
  template <int Sum, int A, int B>
  static void add_codes() {
    add<Sum, A, B, std::int32_t>([](const std::uint8_t* a, const std::uint8_t* b) {
      std::int32_t sum = 0;
      for (int k = 0; k < 4; ++k) sum += static_cast<std::int8_t>(a[k]) * b[k];
      return sum;
    });
  }
  template <int Sum, int A, int B>
  static void add_bf16() {
    add<Sum, A, B, float>([](const std::uint8_t* a, const std::uint8_t* b) {
      return bf16(a) * bf16(b) + bf16(a + 2) * bf16(b + 2);
    });
  }

 private:
  using Tile = std::uint8_t[kTileRows][kTileBytes];

  static Tile* tiles() {
    static thread_local Tile all[8];
    return all;
  }
  static int* rows() {
    static thread_local int all[8];
    return all;
  }
  template <int Sum, int A, int B, class Number, class Products>
  static void add(Products products) {
    for (int m = 0; m < rows()[Sum]; ++m) {
      for (int n = 0; n < 16; ++n) {
        Number sum;
        std::memcpy(&sum, tiles()[Sum][m] + 4 * n, 4);
        for (int k = 0; k < rows()[B]; ++k) sum += products(tiles()[A][m] + 4 * k, tiles()[B][k] + 4 * n);
        std::memcpy(tiles()[Sum][m] + 4 * n, &sum, 4);
      }
    }
  }
  static float bf16(const void* at) {
    std::uint16_t half;
    std::memcpy(&half, at, sizeof half);
    const std::uint32_t bits = half & 0x7f80 ? std::uint32_t{half} << 16 : 0;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

}  // namespace
}  // namespace hybridgen
