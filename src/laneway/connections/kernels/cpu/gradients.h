// What paths of gradients hold: Σ g² and max |g| of each in one pass over memory, and counts of sampled magnitudes in bins of half
// an octave.
//
// A path consists of segments: contiguous numbers of a gradient, fp32 or bf16. Squares are accumulated in fp64, so that no finite
// gradient overflows or vanishes; blocks of a fixed size are summed in a fixed order, whatever the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

#include "vec.h"

namespace gradients {

constexpr int64_t SPAN = 1 << 15;  // numbers that one thread takes at a time
constexpr int BINS = 256;
constexpr int LOWEST = 31;              // exponent bits of 2^-96, the lower edge of the first bin
constexpr uint32_t ROOT = 0x3504f3;     // mantissa bits of √2, rounded down
constexpr uint32_t FINITE = 0x7f800000;  // what a finite magnitude is below, as bits

typedef double vd __attribute__((vector_size(4 * W)));  // half as many numbers as a vector of floats
typedef float vf_half __attribute__((vector_size(2 * W), aligned(4)));

struct Segment {
  const void* data;
  int64_t size;
  int narrow;  // bf16
  int path;
};

struct Block {
  int segment;
  int64_t begin, end;
};

struct Sum {
  double squares = 0;
  float peak = 0;
  bool odd = false;  // a NaN: maxima drop it
};

INLINE vd wide(const float* lanes) { return __builtin_convertvector(*(const vf_half*)lanes, vd); }

template <class T>
Sum sum(const T* g, int64_t count) {
  vd squares[4] = {};
  vf most = {};
  vi odd = {};
  const auto take = [&](vf v, vd& low, vd& high) {
    float lanes[W];
    store(lanes, v);
    const vd a = wide(lanes), b = wide(lanes + W / 2);
    low += a * a;
    high += b * b;
    most = vmax(v < 0.0f ? -v : v, most);  // the second where the first is NaN
    odd |= v != v;
  };
  int64_t i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    take(load(g + i), squares[0], squares[1]);
    take(load(g + i + W), squares[2], squares[3]);
  }
  for (; i < count; i += W) take(load_part(g + i, (int)std::min<int64_t>(W, count - i)), squares[0], squares[1]);
  const vd all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  Sum found;
  for (int lane = 0; lane < W / 2; lane++) found.squares += all[lane];
  for (int lane = 0; lane < W; lane++) {
    found.peak = std::max(found.peak, most[lane]);
    found.odd |= odd[lane] != 0;
  }
  return found;
}

inline void sums(const Segment* segments, int count, int paths, double* squares, double* peaks, int threads) {
  std::vector<Block> blocks;
  for (int s = 0; s < count; s++)
    for (int64_t begin = 0; begin < segments[s].size; begin += SPAN)
      blocks.push_back({s, begin, std::min(begin + SPAN, segments[s].size)});
  std::vector<Sum> found(blocks.size());
#pragma omp parallel for schedule(static) num_threads(threads) if (blocks.size() > 1)
  for (int64_t b = 0; b < (int64_t)blocks.size(); b++) {
    const Block& block = blocks[b];
    const Segment& s = segments[block.segment];
    const int64_t size = block.end - block.begin;
    found[b] = s.narrow ? sum((const bf16*)s.data + block.begin, size) : sum((const float*)s.data + block.begin, size);
  }
  std::fill(squares, squares + paths, 0.0);
  std::fill(peaks, peaks + paths, 0.0);
  for (size_t b = 0; b < blocks.size(); b++) {
    const int path = segments[blocks[b].segment].path;
    squares[path] += found[b].squares;
    const double peak = found[b].odd ? NAN : found[b].peak;
    peaks[path] = peak != peak || peaks[path] != peaks[path] ? NAN : std::max(peaks[path], peak);
  }
}

// Every ``steps[s]``-th number of a segment from ``firsts[s]`` on: how many magnitudes of each path fall into each bin. Zeros and
// what is not finite are left out; what lies beyond the bins counts in the first or last one.
inline void counts(const Segment* segments, int count, const int64_t* firsts, const int64_t* steps, double* found) {
  for (int s = 0; s < count; s++) {
    double* bins = found + (int64_t)segments[s].path * BINS;
    for (int64_t i = firsts[s]; i < segments[s].size; i += steps[s]) {
      uint32_t bits;
      if (segments[s].narrow) bits = (uint32_t)((const bf16*)segments[s].data)[i].bits << 16;
      else std::memcpy(&bits, (const float*)segments[s].data + i, 4);
      bits &= 0x7fffffffu;
      if (bits == 0 || bits >= FINITE) continue;
      const int bin = 2 * ((int)(bits >> 23) - LOWEST) + ((bits & 0x7fffffu) > ROOT);
      bins[std::clamp(bin, 0, BINS - 1)]++;
    }
  }
}

}  // namespace gradients

extern "C" {

int laneway_path_sums(int count, const void* segments, int paths, double* squares, double* peaks, int threads) {
  try {
    gradients::sums((const gradients::Segment*)segments, count, paths, squares, peaks, threads);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

int laneway_path_counts(int count, const void* segments, const int64_t* firsts, const int64_t* steps, double* found) {
  gradients::counts((const gradients::Segment*)segments, count, firsts, steps, found);
  return 0;
}
}
