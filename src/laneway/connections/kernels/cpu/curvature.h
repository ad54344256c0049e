// The curvature of clouds of tokens, and the sample of the streams that it is measured on. connections/curvature.py says what both
// are; the arithmetic is the same, in fp32.
//
//   curvature      clouds [B, S, d] → Σ κ_i and number of tokens in the sum, of each cloud
//   token sample   streams, row numbers, projection [C, d] → points [n, S, d]
//
// Lanes are the tokens whose κ is computed. Distances come from differences, and a neighbourhood's weights by one product with a
// vector at a time. A cloud's results depend on nothing but the cloud.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "gemm.h"

namespace curvature {

constexpr float COINCIDING = 8.0f / (1 << 23);  // square distance over the two squares, up to which tokens are one
constexpr float FOUND = 1e-4f;                  // mean weight under which nothing is left to normalise
constexpr int STEPS = 32;                       // of gradient descent
constexpr int TOGETHER = 4;                     // sums that are taken at once
constexpr int64_t ALONE = 8;                    // clouds, or tiles of rows, that are too few for a thread of their own

INLINE vi lane_numbers() {
  vi numbers;
  for (int i = 0; i < W; i++) numbers[i] = i;
  return numbers;
}

struct Cloud {
  int tokens, dims, k, stride, padded;
  std::vector<vf> memory;
  float *z, *lanes;                   // tokens [S][d], and the same [d][S]
  float *size, *square, *finite;      // of each: largest |number|, |z|², 1 or 0
  float *here, *away;                 // of W tokens: place [d], square distances to each candidate
  float *offsets, *gram;              // to the k nearest: [k][d], I − G / tr G [k][k]
  float *weights, *next;
  std::vector<char> valid, first;     // finite; and no copy of an earlier one
  std::vector<int> candidates;        // the first ones
  std::vector<vf> near;               // square distances of the k nearest
  std::vector<vi> index;              // and which they are
  std::vector<std::pair<float, int>> order;

  Cloud(int tokens, int dims, int k, int stride)
      : tokens(tokens), dims(dims), k(k), stride(stride), padded(round_up(tokens, W)),
        memory(2 * size_t(dims) * padded / W + 3 * padded / W + size_t(dims) * (k + 1) + padded + size_t(k) * (k + 2) + 8),
        valid(tokens), first(tokens), candidates(tokens), near(k), index(k), order(tokens) {
    float* at = (float*)memory.data();
    const auto take = [&](size_t numbers) { return std::exchange(at, at + numbers); };
    z = take(size_t(dims) * padded), lanes = take(size_t(dims) * padded), square = take(padded), size = take(padded), finite = take(padded);
    here = take(size_t(dims) * W), away = take(size_t(padded) * W);
    offsets = take(size_t(k) * dims * W), gram = take(size_t(k) * k * W), weights = take(size_t(k) * W), next = take(size_t(k) * W);
  }

  Cloud(const Cloud&) = delete;

  // Largest |number| of every token, and which of the valid ones (that are not zero) has the median one; -1 without any.
  int median(bool not_zero) {
    int count = 0;
    for (int group = 0; group < padded; group += W) {
      vf most = splat(0.0f);
      for (int c = 0; c < dims; c++) {
        const vf number = load(lanes + c * padded + group);
        most = vmax(most, number < 0.0f ? -number : number);
      }
      store(size + group, most);
    }
    for (int s = 0; s < tokens; s++)
      if (valid[s] && !(not_zero && size[s] == 0.0f)) order[count++] = {size[s], s};
    if (!count) return -1;
    std::nth_element(order.begin(), order.begin() + (count - 1) / 2, order.begin() + count);
    return order[(count - 1) / 2].second;
  }

  // Around the token of median size, in units of the others' median distance; zeros where a token is not finite.
  bool centre(const float* points) {
    for (int c = 0; c < dims; c++)
      for (int s = 0; s < padded; s++) lanes[c * padded + s] = s < tokens ? points[s * dims + c] : 0.0f;
    for (int group = 0; group < padded; group += W) {
      vf nothing = splat(0.0f);
      for (int c = 0; c < dims; c++) nothing += load(lanes + c * padded + group) * 0.0f;  // NaN where one is not finite
      const vi fine = nothing == 0.0f;
      for (int lane = 0; lane < W && group + lane < tokens; lane++) valid[group + lane] = fine[lane] != 0;
      store(finite + group, fine ? splat(1.0f) : splat(0.0f));
      for (int c = 0; c < dims; c++) {
        float* at = lanes + c * padded + group;
        store(at, fine ? load(at) : splat(0.0f));
      }
    }
    const int middle = median(false);
    if (middle < 0) return false;
    for (int c = 0; c < dims; c++) {
      float* row = lanes + c * padded;
      const float own = row[middle];
      for (int group = 0; group < padded; group += W)
        store(row + group, load(finite + group) > 0.0f ? load(row + group) - own : splat(0.0f));
    }
    const int typical = median(true);
    const float scale = typical < 0 ? 1.0f : size[typical];
    for (int group = 0; group < padded; group += W) {
      vf sum = splat(0.0f);
      for (int c = 0; c < dims; c++) {
        float* at = lanes + c * padded + group;
        const vf number = load(at) / scale;
        store(at, number);
        sum += number * number;
      }
      store(square + group, sum);
    }
    for (int c = 0; c < dims; c++)
      for (int s = 0; s < tokens; s++) z[s * dims + c] = lanes[c * padded + s];
    return true;
  }

  // Square distances of W tokens, at [d] with that many numbers from one dimension to the next, to up to TOGETHER others.
  INLINE void distances(const float* at, int64_t step, const float* const* others, vf* sums) const {
    for (int i = 0; i < TOGETHER; i++) sums[i] = splat(0.0f);
    for (int c = 0; c < dims; c++) {
      const vf own = load(at + c * step);
#pragma GCC unroll 4
      for (int i = 0; i < TOGETHER; i++) {
        const vf offset = own - others[i][c];
        sums[i] += offset * offset;
      }
    }
  }

  const float* token(int s) const { return z + size_t(s) * dims; }

  // Which valid tokens coincide with no earlier valid one.
  void find_first() {
    const vi numbers = lane_numbers();
    for (int group = 0; group < tokens; group += W) {
      const vf own = load(square + group);
      vi copy{};
      const int last = std::min(group + W, tokens) - 1;
      for (int s0 = 0; s0 < last; s0 += TOGETHER) {
        const float* others[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) others[i] = token(std::min(s0 + i, last));
        vf sums[TOGETHER];
        distances(lanes + group, padded, others, sums);
        for (int i = 0; i < TOGETHER && s0 + i < last; i++) {
          if (!valid[s0 + i]) continue;
          const vf bound = (own + square[s0 + i]) * COINCIDING;
          copy |= (sums[i] <= bound) & (bound < INFINITY) & (numbers + group > s0 + i);
        }
      }
      for (int i = 0; i < W && group + i < tokens; i++) first[group + i] = valid[group + i] && !copy[i];
    }
  }

  // The k nearest of ``count`` candidates to W tokens: square distances in order, of equal ones the earlier token first.
  void find_near(int count) {
    vf own = splat(0.0f);
    for (int c = 0; c < dims; c++) own += load(here + c * W) * load(here + c * W);
    for (int j0 = 0; j0 < count; j0 += TOGETHER) {
      const float* others[TOGETHER];
      for (int i = 0; i < TOGETHER; i++) others[i] = token(candidates[std::min(j0 + i, count - 1)]);
      vf sums[TOGETHER];
      distances(here, W, others, sums);
      for (int i = 0; i < TOGETHER && j0 + i < count; i++) {
        const vf bound = (own + square[candidates[j0 + i]]) * COINCIDING;
        store(away + (j0 + i) * W, sums[i] > bound ? sums[i] : splat(INFINITY));
      }
    }
    for (int t = 0; t < k; t++) near[t] = splat(INFINITY), index[t] = vi{};
    for (int j = 0; j < count; j++) insert(load(away + j * W), vi{} + candidates[j], std::min(j + 1, k), near.data(), index.data());
  }

  static INLINE void copy_lane(const float* from, int dims, float* to) {
    for (int c = 0; c < dims; c++) to[c * W] = from[c];
  }

  // Into the first ``held`` of lists in order, one in each lane.
  static INLINE void insert(vf distance, vi which, int held, vf* near, vi* index) {
    for (int t = 0; t < held; t++) {
      const vf other = near[t];
      const vi whose = index[t], less = distance < other;
      near[t] = less ? distance : other;
      index[t] = less ? which : whose;
      distance = less ? other : distance;
      which = less ? whose : which;
    }
  }

  // offsets, I − G / tr G, and tr G; 1 where that is no positive finite number.
  vf find_gram(vi* usable) {
    for (int t = 0; t < k; t++)
      for (int lane = 0; lane < W; lane++) copy_lane(token(index[t][lane]), dims, offsets + size_t(t) * dims * W + lane);
    for (int t = 0; t < k; t++)
      for (int c = 0; c < dims; c++) store(offsets + (t * dims + c) * W, load(offsets + (t * dims + c) * W) - load(here + c * W));
    vf trace = splat(0.0f);
    for (int a = 0; a < k; a++) {
      for (int b0 = 0; b0 <= a; b0 += TOGETHER) {
        const float* rows[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) rows[i] = offsets + size_t(std::min(b0 + i, a)) * dims * W;
        vf sums[TOGETHER] = {};
        for (int c = 0; c < dims; c++) {
          const vf own = load(offsets + (a * dims + c) * W);
#pragma GCC unroll 4
          for (int i = 0; i < TOGETHER; i++) sums[i] += own * load(rows[i] + c * W);
        }
        for (int i = 0; i < TOGETHER && b0 + i <= a; i++) store(gram + (a * k + b0 + i) * W, sums[i]);
      }
      trace += load(gram + (a * k + a) * W);
    }
    *usable &= (trace > 0.0f) & (trace < INFINITY);
    trace = *usable ? trace : splat(1.0f);
    for (int a = 0; a < k; a++)
      for (int b = 0; b <= a; b++) {
        const vf entry = (a == b ? 1.0f : 0.0f) - load(gram + (a * k + b) * W) / trace;
        store(gram + (a * k + b) * W, entry);
        store(gram + (b * k + a) * W, entry);
      }
    return trace;
  }

  // Weights [k] that sum to one; equal ones where the descent leaves nothing to normalise.
  void find_weights() {
    for (int t = 0; t < k; t++) store(weights + t * W, splat(1.0f));
    for (int step = 0; step < STEPS; step++) {
      for (int a0 = 0; a0 < k; a0 += TOGETHER) {
        const float* rows[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) rows[i] = gram + size_t(std::min(a0 + i, k - 1)) * k * W;
        vf sums[TOGETHER] = {};
        for (int b = 0; b < k; b++) {
          const vf weight = load(weights + b * W);
#pragma GCC unroll 4
          for (int i = 0; i < TOGETHER; i++) sums[i] += load(rows[i] + b * W) * weight;
        }
        for (int i = 0; i < TOGETHER && a0 + i < k; i++) store(next + (a0 + i) * W, sums[i]);
      }
      std::swap(weights, next);
    }
    vf total = splat(0.0f);
    for (int t = 0; t < k; t++) total += load(weights + t * W);
    const vi found = total > FOUND * k;
    total = found ? total : splat(1.0f);
    for (int t = 0; t < k; t++) store(weights + t * W, found ? load(weights + t * W) / total : splat(1.0f / k));
  }

  // κ of W tokens; lanes that are not usable hold anything.
  void measure(int group, int count, vi* usable, float* kappa) {
    for (int lane = 0; lane < W; lane++) {
      const int s = (group + lane) * stride, from = s < tokens ? s : 0;
      (*usable)[lane] = s < tokens && first[from] ? -1 : 0;
      copy_lane(token(from), dims, here + lane);
    }
    find_near(count);
    *usable &= near[k - 1] < INFINITY;
    const vf trace = find_gram(usable);
    find_weights();
    vf left = splat(0.0f);
    for (int c = 0; c < dims; c++) {
      vf sum = splat(0.0f);
      for (int t = 0; t < k; t++) sum += load(weights + t * W) * load(offsets + (t * dims + c) * W);
      left += sum * sum;
    }
    store(kappa, left * float(k) / trace);
    for (int lane = 0; lane < W; lane++) kappa[lane] = std::min(std::sqrt(kappa[lane]), 1.0f);
  }

  void sum(const float* points, float* total, float* number) {
    double found = 0.0;
    int counted = 0;
    if (centre(points)) {
      find_first();
      int count = 0;
      for (int s = 0; s < tokens; s++)
        if (first[s]) candidates[count++] = s;
      if (count > k)
        for (int group = 0; group * stride < tokens; group += W) {
          vi usable;
          float kappa[W];
          measure(group, count, &usable, kappa);
          for (int lane = 0; lane < W; lane++)
            if (usable[lane]) found += kappa[lane], counted++;
        }
    }
    *total = float(found);
    *number = float(counted);
  }
};

// [k][d] → [k][width], zeros beyond d.
inline void widen(const float* projection, int64_t c, int dims, int width, float* wide) {
  for (int64_t k = 0; k < c; k++) {
    std::copy_n(projection + k * dims, dims, wide + k * width);
    std::fill_n(wide + k * width + dims, width - dims, 0.0f);
  }
}

struct Streams {
  int64_t n, c, token, stream;  // sizes; numbers from one token, and from one stream, to the next
};

// Rows q = s·n + i of a tile, stream i of the token in place s, into points [n][S][d].
template <class T>
void sample_tile(const Streams& s, const T* x, const int64_t* rows, int64_t q0, int64_t taken, int64_t size, const float* w, int width,
                 int dims, float* work, float* points) {
  const float* from[TOKENS];
  float* z = work + TOKENS * s.c;
  for (int t = 0; t < TOKENS; t++) {
    const int64_t q = std::min(q0 + t, taken * s.n - 1);
    const T* row = x + rows[q / s.n] * s.token + q % s.n * s.stream;
    if constexpr (std::is_same_v<T, float>) {
      from[t] = row;
    } else {
      float* wide = work + t * s.c;
      int64_t c = 0;
      for (; c + W <= s.c; c += W) store(wide + c, load(row + c));
      if (c < s.c) store_part(wide + c, load_part(row + c, int(s.c - c)), int(s.c - c));
      from[t] = wide;
    }
  }
  std::fill_n(z, TOKENS * width, 0.0f);
  project(from, 0, s.c, w, width, z);
  for (int t = 0; t < TOKENS && q0 + t < taken * s.n; t++)
    std::copy_n(z + t * width, dims, points + ((q0 + t) % s.n * size + (q0 + t) / s.n) * dims);
}

template <class T>
void sample(const Streams& s, const T* x, const int64_t* rows, int64_t taken, int64_t size, const float* projection, int dims,
            int threads, float* points) {
  for (int64_t i = 0; i < s.n; i++) std::fill(points + (i * size + taken) * dims, points + (i + 1) * size * dims, NAN);
  if (!taken) return;
  const int width = round_up(dims, W);
  std::vector<float> packed(width == dims ? 0 : size_t(s.c) * width);
  if (width != dims) widen(projection, s.c, dims, width, packed.data());
  const float* w = width == dims ? projection : packed.data();
  const int64_t tiles = (taken * s.n + TOKENS - 1) / TOKENS;
  threads = (int)std::max<int64_t>(1, std::min<int64_t>(threads, tiles / ALONE));
  const size_t own = size_t(TOKENS) * (s.c + width);
  std::vector<float> work(own * threads);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t tile = 0; tile < tiles; tile++)
    sample_tile(s, x, rows, tile * TOKENS, taken, size, w, width, dims, work.data() + own * omp_get_thread_num(), points);
}

}  // namespace curvature

extern "C" {

// points [clouds][tokens][dims] → total and count of each cloud.
int laneway_curvature(int64_t clouds, int tokens, int dims, int k, int stride, int threads, const float* points, float* total,
                      float* count) {
  try {
    threads = (int)std::max<int64_t>(1, std::min<int64_t>(threads, clouds / curvature::ALONE));
    std::deque<curvature::Cloud> own;
    for (int i = 0; i < threads; i++) own.emplace_back(tokens, dims, k, stride);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = 0; b < clouds; b++)
      own[omp_get_thread_num()].sum(points + b * tokens * dims, total + b, count + b);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// The first ``taken`` of ``size`` places get the tokens in rows, the rest NaN.
int laneway_token_sample(int narrow, int64_t n, int64_t c, int64_t token, int64_t stream, int threads, const void* x,
                         const int64_t* rows, int64_t taken, int64_t size, const float* projection, int dims, float* points) {
  const curvature::Streams s{n, c, token, stream};
  try {
    if (narrow)
      curvature::sample(s, (const bf16*)x, rows, taken, size, projection, dims, threads, points);
    else
      curvature::sample(s, (const float*)x, rows, taken, size, projection, dims, threads, points);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
}
