// The three narrow products of a site, for blocks of tokens that stay in cache.
//
//   project      Z[t, q]  += Σ_k x[t, k] φ[q, k]      vectors along q; φ packed [k][q]
//   spread       S[t, k]   = Σ_q g[t, q] φ[q, k]      vectors along k; φ packed [k / TILE][q][TILE]
//   accumulate   G[q, k]  += Σ_t g[t, q] x[t, k]      vectors along k; G packed as φ
//
// Each is a register tile: a few broadcast numbers times a few vectors. The sums over k and q are taken in a fixed order, whatever
// the number of tokens; the registers of a tile fill the machine's.
#pragma once

#include "vec.h"

constexpr int TOKENS = REGISTERS == 32 ? 8 : 4;  // tokens of a register tile of ``project``
constexpr int ROWS = REGISTERS == 32 ? 12 : 6;   // tokens of a register tile of ``spread``
constexpr int TILE = 2 * W;                      // columns of a packed tile
constexpr int MAPS = 6;                          // maps of a register tile of ``accumulate``
constexpr int PANEL = 3;                         // vectors of maps of a register tile of ``project``

// Keeps a vector in a register where the compiler would load it again for every use, and so be bound by loads.
#if defined(__x86_64__) && defined(__GNUC__)
#define IN_REGISTER(v) asm("" : "+x"(v))
#else
#define IN_REGISTER(v)
#endif

INLINE int round_up(int a, int b) { return (a + b - 1) / b * b; }

template <int VECTORS>
INLINE void project_panel(const float* const* x, int64_t k0, int64_t k1, const float* w, int64_t w_stride, float* z, int z_stride) {
  vf sum[TOKENS][VECTORS];
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 3
    for (int v = 0; v < VECTORS; v++) sum[t][v] = load(z + t * z_stride + v * W);
  w += k0 * w_stride;
  for (int64_t k = k0; k < k1; k++, w += w_stride) {
    vf w0 = load(w), w1 = VECTORS > 1 ? load(w + W) : w0, w2 = VECTORS > 2 ? load(w + 2 * W) : w0;
    IN_REGISTER(w0);
    if (VECTORS > 1) IN_REGISTER(w1);
    if (VECTORS > 2) IN_REGISTER(w2);
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      const vf number = splat(x[t][k]);
      sum[t][0] += number * w0;
      if (VECTORS > 1) sum[t][VECTORS > 1 ? 1 : 0] += number * w1;
      if (VECTORS > 2) sum[t][VECTORS > 2 ? 2 : 0] += number * w2;
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 3
    for (int v = 0; v < VECTORS; v++) store(z + t * z_stride + v * W, sum[t][v]);
}

// Z of TOKENS tokens, whose numbers k0 … k1 of x are at x[t][k0 …]; w [k][width], width a multiple of W.
INLINE void project(const float* const* x, int64_t k0, int64_t k1, const float* w, int width, float* z) {
  int q = 0;
  for (; q + PANEL * W <= width; q += PANEL * W) project_panel<PANEL>(x, k0, k1, w + q, width, z + q, width);
  if (q + 2 * W <= width) project_panel<2>(x, k0, k1, w + q, width, z + q, width), q += 2 * W;
  if (q + W <= width) project_panel<1>(x, k0, k1, w + q, width, z + q, width);
}

// One tile of S for ROWS tokens: g [t][g_stride], w [q][TILE], result [t][s_stride].
INLINE void spread(const float* g, int g_stride, int maps, const float* w, float* s, int64_t s_stride) {
  vf sum[ROWS][2];
#pragma GCC unroll 12
  for (int t = 0; t < ROWS; t++) sum[t][0] = sum[t][1] = splat(0.0f);
  for (int q = 0; q < maps; q++) {
    vf w0 = load(w + q * TILE), w1 = load(w + q * TILE + W);
    IN_REGISTER(w0);
    IN_REGISTER(w1);
#pragma GCC unroll 12
    for (int t = 0; t < ROWS; t++) {
      const vf number = splat(g[t * g_stride + q]);
      sum[t][0] += number * w0;
      sum[t][1] += number * w1;
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < ROWS; t++) store(s + t * s_stride, sum[t][0]), store(s + t * s_stride + W, sum[t][1]);
}

// One tile of G: g [t][g_stride] with maps rounded up to MAPS, x [t][TILE], out [q][TILE].
INLINE void accumulate(const float* g, int g_stride, int maps, const float* x, int tokens, float* out) {
  for (int q = 0; q < maps; q += MAPS) {
    vf sum[MAPS][2];
    float* o = out + q * TILE;
#pragma GCC unroll 6
    for (int i = 0; i < MAPS; i++) sum[i][0] = load(o + i * TILE), sum[i][1] = load(o + i * TILE + W);
    for (int t = 0; t < tokens; t++) {
      vf x0 = load(x + t * TILE), x1 = load(x + t * TILE + W);
      IN_REGISTER(x0);
      IN_REGISTER(x1);
#pragma GCC unroll 6
      for (int i = 0; i < MAPS; i++) {
        const vf number = splat(g[t * g_stride + q + i]);
        sum[i][0] += number * x0;
        sum[i][1] += number * x1;
      }
    }
#pragma GCC unroll 6
    for (int i = 0; i < MAPS; i++) store(o + i * TILE, sum[i][0]), store(o + i * TILE + W, sum[i][1]);
  }
}
