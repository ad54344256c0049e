// One site of a hyper-connection on the CPU, forward and backward, a block of tokens at a time.
//
// A block's streams stay in the cache from one use to the next, so that each pass reads and writes main memory once:
//
//   pre             x → h, maps        project, finish the maps (lanes are tokens), mix
//   post            x, f → y
//   cross           post, then the next site's pre on the block of y that is still in cache
//   post_backward   gy, x, f → gf, gmaps
//   pre_backward    gy, gh, gmaps, x → gx, gφ, gbase, gscale     gx = H_resᵀ gy + p ⊗ gh + (r gz) φ − (r²/K)(gz·z) x
//   cross_backward  the next site's pre_backward, then post_backward on the block of gradient that is still in cache
//
// Everything is accumulated in fp32 and rounded once. A token's results do not depend on how many there are, nor on threads; the
// gradients of φ, base and scale are sums over threads' parts in a fixed order.
// Streams are contiguous [N, n, C], f and h [N, C]; maps [N, m] hold pre (n), post (n), H_res ([out][in]); z [N, m] the normalised
// projection in the order of φ's rows: pre, post, res ([in][out]). m = n(n + 2), K = nC.

#include <omp.h>

#include <algorithm>
#include <memory>
#include <new>

#include "gemm.h"
#include "sinkhorn.h"

namespace {

constexpr int CACHE = 256 << 10;  // bytes of one block of streams: about half of a core's second-level cache
constexpr int DEPTH = 256;        // numbers of x that ``project`` takes at a time
constexpr int COLUMNS = 128;      // columns of a stream that pre_backward takes at a time
constexpr int LINE = 64;          // bytes of a cache line
constexpr int AHEAD = 2;          // tokens that pre_backward prefetches: main memory answers in about the time of two
constexpr int BLOCK = 64;         // most tokens of a block

struct Site {
  int64_t tokens;
  int n;
  int64_t c;
  int threads;
  float norm_eps, eps, cap;
  int iterations;

  int maps() const { return n * (n + 2); }
  int64_t k() const { return n * c; }
};

struct Parameters {
  const float *fn, *base, *scale;
};

// Tokens of a block: a multiple of W, of the register tile and of nothing else that depends on N.
int block_tokens(const Site& s, size_t item) {
  const int64_t fitting = CACHE / std::max<int64_t>(1, s.k() * item);
  const int64_t shared = (s.tokens + s.threads - 1) / std::max(1, s.threads);
  const int step = std::max(W, TOKENS);
  return (int)std::max<int64_t>(step, std::min<int64_t>({BLOCK, fitting, shared + step - 1}) / step * step);
}

template <class V>
struct Buffer {  // aligned and uninitialised; made outside parallel regions, which no exception may leave
  V* p;
  explicit Buffer(size_t count) : p((V*)std::aligned_alloc(64, (count * sizeof(V) + 63) / 64 * 64 + 64)) {
    if (!p) throw std::bad_alloc();
  }
  ~Buffer() { std::free(p); }
  Buffer(const Buffer&) = delete;
  operator V*() const { return p; }
};

// ---------------------------------------------------------------- maps of a block, lanes = tokens

// z [t][width] (before normalisation) and r of ``count`` tokens → finished maps and z in memory.
template <int NS>
NOINLINE void finish(const Site& s, const Parameters& w, const float* zb, int width, const float* r, int count, float* maps, float* z) {
  const int n = NS ? NS : s.n, m = n * (n + 2);
  Sinkhorn sinkhorn(n, s.iterations, s.eps);
  vf logits[LARGEST * (LARGEST + 2)], log_k[LARGEST * LARGEST], p[LARGEST * LARGEST], res[LARGEST * LARGEST];
  for (int t0 = 0; t0 < count; t0 += W) {
    const int lanes = std::min(W, count - t0);
    const vf rv = load_part(r + t0, lanes);
    for (int q = 0; q < m; q++) {
      float column[W] = {};
      for (int t = 0; t < lanes; t++) column[t] = zb[(t0 + t) * width + q];
      const vf zv = load(column) * rv;
      store(column, zv);
      for (int t = 0; t < lanes; t++) z[(t0 + t) * m + q] = column[t];
      logits[q] = zv * w.scale[q < n ? 0 : q < 2 * n ? 1 : 2] + w.base[q];
    }
    for (int q = 0; q < n; q++) logits[q] = vsigmoid(logits[q]) + s.eps;
    for (int q = n; q < 2 * n; q++) logits[q] = 2.0f * vsigmoid(logits[q]);
    if (s.cap > 0.0f)
      for (int q = 2 * n; q < m; q++) logits[q] = s.cap * vtanh(logits[q] / s.cap);
    sinkhorn.first(logits + 2 * n, log_k, p);
    sinkhorn.run(log_k, res, false);
    for (int q = 0; q < m; q++) {
      const int o = (q - 2 * n) / n, i = (q - 2 * n) % n;
      float column[W];
      store(column, q < 2 * n ? logits[q] : res[i * n + o]);
      for (int t = 0; t < lanes; t++) maps[(t0 + t) * m + q] = column[t];
    }
  }
}

// Gradients of the finished maps → r · gradient of z (gz [t][width]), and what multiplies x; adds to the sums of base and scale.
template <int NS>
NOINLINE void finish_backward(const Site& s, const Parameters& w, const float* gmaps, const float* dots, const float* z,
                              const float* r, int count, float* gz, int width, float* along_x, double* sums) {
  const int n = NS ? NS : s.n, m = n * (n + 2);
  Sinkhorn sinkhorn(n, s.iterations, s.eps);
  vf logits[LARGEST * (LARGEST + 2)], slope[LARGEST * LARGEST], g[LARGEST * (LARGEST + 2)], zs[LARGEST * (LARGEST + 2)];
  for (int t0 = 0; t0 < count; t0 += W) {
    const int lanes = std::min(W, count - t0);
    const vf rv = load_part(r + t0, lanes);
    for (int q = 0; q < m; q++) {
      float zc[W] = {}, gc[W] = {};
      const int from = q < 2 * n ? q : 2 * n + (q - 2 * n) % n * n + (q - 2 * n) / n;  // [out][in] → [in][out]
      for (int t = 0; t < lanes; t++) {
        zc[t] = z[(t0 + t) * m + q];
        gc[t] = (gmaps ? gmaps[(t0 + t) * m + from] : 0.0f) + (q < n && dots ? dots[(t0 + t) * n + q] : 0.0f);
      }
      zs[q] = load(zc), g[q] = load(gc);
      logits[q] = zs[q] * w.scale[q < n ? 0 : q < 2 * n ? 1 : 2] + w.base[q];
    }
    for (int q = 0; q < 2 * n; q++) g[q] *= (q < n ? 1.0f : 2.0f) * vsigmoid_slope(logits[q]);
    if (s.cap > 0.0f)
      for (int q = 2 * n; q < m; q++) {
        slope[q - 2 * n] = vtanh_slope(logits[q] / s.cap);
        logits[q] = s.cap * vtanh(logits[q] / s.cap);
      }
    sinkhorn.backward(logits + 2 * n, g + 2 * n);
    vf along = splat(0.0f);
    for (int q = 0; q < m; q++) {
      if (q >= 2 * n && s.cap > 0.0f) g[q] *= slope[q - 2 * n];
      float gc[W], zc[W];
      store(gc, g[q]), store(zc, zs[q]);
      for (int t = 0; t < lanes; t++) sums[q] += gc[t], sums[m + q] += double(gc[t]) * zc[t];
      g[q] *= w.scale[q < n ? 0 : q < 2 * n ? 1 : 2];
      along += g[q] * zs[q];
      store(gc, g[q] * rv);
      for (int t = 0; t < lanes; t++) gz[(t0 + t) * width + q] = gc[t];
    }
    store_part(along_x + t0, along * rv * rv * (-1.0f / s.k()), lanes);
  }
}

// ---------------------------------------------------------------- one token

// Reads and writes of V neighbouring vectors, whole, or of one of which ``count`` numbers are real.
struct Whole {
  template <class T>
  INLINE vf read(const T* p) const { return load(p); }
  template <class T>
  INLINE void write(T* p, vf v) const { store(p, v); }
};
struct Part {
  int count;
  template <class T>
  INLINE vf read(const T* p) const { return load_part(p, count); }
  template <class T>
  INLINE void write(T* p, vf v) const { store_part(p, v, count); }
};
template <int V>
struct Vectors : std::integral_constant<int, V> {};

// Visit C columns: body(c, Vectors<V>, Whole), then body(c, Vectors<1>, Part) for what is left.
template <int V, class F>
INLINE void for_columns(int64_t C, F body) {
  int64_t c = 0;
  for (; c + V * W <= C; c += V * W) body(c, Vectors<V>{}, Whole{});
  if (V > 1)
    for (; c + W <= C; c += W) body(c, Vectors<1>{}, Whole{});
  if (c < C) body(c, Vectors<1>{}, Part{int(C - c)});
}

#define EACH(v, V) _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
#define STREAMS(j) _Pragma("GCC unroll 8") for (int j = 0; j < n; j++)

template <class T, int NS>
NOINLINE void post_token(int streams, int64_t C, const T* x, const T* f, const float* maps, T* y) {
  const int n = NS ? NS : streams;
  const float *post = maps + n, *res = maps + 2 * n;
  for_columns<2>(C, [&](int64_t c, auto V, auto io) {
    vf in[NS ? NS : LARGEST][V], fv[V];
    EACH(v, V) fv[v] = io.read(f + c + v * W);
    STREAMS(j) EACH(v, V) in[j][v] = io.read(x + j * C + c + v * W);
    STREAMS(i) {
      vf out[V];
      EACH(v, V) out[v] = post[i] * fv[v];
      STREAMS(j) EACH(v, V) out[v] += res[i * n + j] * in[j][v];
      EACH(v, V) io.write(y + i * C + c + v * W, out[v]);
    }
  });
}

template <class T, int NS>
NOINLINE void mix_token(int streams, int64_t C, const T* x, const float* pre, T* h) {
  const int n = NS ? NS : streams;
  for_columns<2>(C, [&](int64_t c, auto V, auto io) {
    vf out[V];
    EACH(v, V) out[v] = splat(0.0f);
    STREAMS(j) EACH(v, V) out[v] += pre[j] * io.read(x + j * C + c + v * W);
    EACH(v, V) io.write(h + c + v * W, out[v]);
  });
}

// gh · x_j for every stream.
template <class T, int NS>
NOINLINE void dots_token(int streams, int64_t C, const T* x, const T* gh, float* dots) {
  const int n = NS ? NS : streams;
  vf sum[NS ? NS : LARGEST];
  STREAMS(j) sum[j] = splat(0.0f);
  for_columns<1>(C, [&](int64_t c, auto, auto io) {
    const vf g = io.read(gh + c);
    STREAMS(j) sum[j] += g * io.read(x + j * C + c);
  });
  STREAMS(j) dots[j] = sum_lanes(sum[j]);
}

// gf = Σ_i post_i gy_i; gradients of post and H_res: gy_i · f and gy_i · x_j. Two rows of H_res at a time, to fit the registers.
template <class T, int NS>
NOINLINE void post_backward_token(int streams, int64_t C, const T* gy, const T* x, const T* f, const float* maps, T* gf, float* gmaps) {
  constexpr int STRIP = 512;
  constexpr int LINES = NS == 4 ? (REGISTERS == 32 ? 4 : 2) : NS && NS <= 3 ? NS : 1;
  const int n = NS ? NS : streams;
  vf sum[NS ? NS : LARGEST][(NS ? NS : LARGEST) + 1];
  for (int i = 0; i < n; i++)
    for (int j = 0; j <= n; j++) sum[i][j] = splat(0.0f);
  const float* post = maps + n;
  for (int j = 0; j < n; j++) gmaps[j] = 0.0f;
  for (int64_t c0 = 0; c0 < C; c0 += STRIP) {
    const int64_t width = std::min<int64_t>(STRIP, C - c0);
    for_columns<2>(width, [&](int64_t c, auto V, auto io) {
      vf out[V];
      EACH(v, V) out[v] = splat(0.0f);
      STREAMS(i) EACH(v, V) out[v] += post[i] * io.read(gy + i * C + c0 + c + v * W);
      EACH(v, V) io.write(gf + c0 + c + v * W, out[v]);
    });
    for (int i0 = 0; i0 < n; i0 += LINES) {
      vf part[LINES][(NS ? NS : LARGEST) + 1];
#pragma GCC unroll 4
      for (int i = 0; i < LINES; i++)
#pragma GCC unroll 9
        for (int j = 0; j <= n; j++) part[i][j] = sum[i0 + i][j];
      for_columns<1>(width, [&](int64_t c, auto, auto io) {
        vf g[LINES];
        EACH(i, LINES) g[i] = io.read(gy + (i0 + i) * C + c0 + c);
#pragma GCC unroll 9
        for (int j = 0; j <= n; j++) {
          const vf v = j < n ? io.read(x + j * C + c0 + c) : io.read(f + c0 + c);
          EACH(i, LINES) part[i][j] += g[i] * v;
        }
      });
#pragma GCC unroll 4
      for (int i = 0; i < LINES; i++)
#pragma GCC unroll 9
        for (int j = 0; j <= n; j++) sum[i0 + i][j] = part[i][j];
    }
  }
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < n; j++) gmaps[2 * n + i * n + j] = sum_lanes(sum[i][j]);
    gmaps[n + i] = sum_lanes(sum[i][n]);
  }
}

// ``width`` columns from c0 of one token: gx, and x in fp32 for ``accumulate``. s [j][s_stride] is what comes through φ.
template <class T, int NS>
NOINLINE void gradient_token(int streams, int64_t C, int64_t c0, int width, const T* gy, const T* gh, const T* extra, const T* x,
                             const float* pre, const float* res, float along_x, const float* s, int s_stride, T* gx, float* xs,
                             int64_t xs_tile, int64_t ahead) {
  const int n = NS ? NS : streams;
  for_columns<2>(width, [&](int64_t c, auto V, auto io) {
    vf g[NS ? NS : LARGEST][V], h[V];
    if (gy) STREAMS(i) EACH(v, V) {
      const T* p = gy + i * C + c0 + c + v * W;
      if (v * W * sizeof(T) % LINE == 0) __builtin_prefetch(p + ahead, 0, 3);
      g[i][v] = io.read(p);
    }
    if (gh) EACH(v, V) h[v] = io.read(gh + c0 + c + v * W);
    STREAMS(j) {
      vf out[V];
      EACH(v, V) {
        const vf xv = io.read(x + j * C + c0 + c + v * W);
        store(xs + (j * (COLUMNS / TILE) + (c + v * W) / TILE) * xs_tile + (c + v * W) % TILE, xv);
        out[v] = load(s + j * s_stride + c + v * W) + along_x * xv;
      }
      if (gh) EACH(v, V) out[v] += pre[j] * h[v];
      if (gy) STREAMS(i) EACH(v, V) out[v] += res[i * n + j] * g[i][v];
      if (extra) EACH(v, V) out[v] += io.read(extra + j * C + c0 + c + v * W);
      EACH(v, V) io.write(gx + j * C + c0 + c + v * W, out[v]);
    }
  });
}

// ---------------------------------------------------------------- blocks of tokens

// Projection and sum of squares of tokens t0 … t1 → zb [t][width], r.
template <class T>
void project_block(const Site& s, const T* x, int64_t t0, int64_t t1, const float* packed, int width, float* zb, float* r, float* wide) {
  const int count = int(t1 - t0), padded = round_up(count, TOKENS);
  const int64_t K = s.k();
  std::fill(zb, zb + size_t(padded) * width, 0.0f);
  vf squares[BLOCK];
  for (int t = 0; t < padded; t++) squares[t] = splat(0.0f);
  for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
    const int64_t k1 = std::min<int64_t>(K, k0 + DEPTH);
    for (int q = 0; q < padded; q += TOKENS) {
      const float* rows[TOKENS];
      for (int t = 0; t < TOKENS; t++) {
        const T* row = x + (t0 + std::min(q + t, count - 1)) * K;  // beyond the end: the last token again
        vf sum = squares[q + t];
        // What comes next to this row's cache line: its next numbers, or the first ones of the next block's row.
        const T* next = k1 < K ? row + k1 : row - (t0 + std::min(q + t, count - 1)) * K + std::min(t0 + count + q + t, s.tokens - 1) * K;
        float* copy = wide + t * DEPTH;
        constexpr bool narrow = sizeof(T) != sizeof(float);
        for_columns<1>(k1 - k0, [&](int64_t c, auto, auto io) {
          if (c * sizeof(T) % 64 == 0) __builtin_prefetch(next + c, 0, 2);
          const vf v = io.read(row + k0 + c);
          sum += v * v;
          if (narrow) io.write(copy + c, v);
        });
        squares[q + t] = sum;
        rows[t] = narrow ? copy - k0 : (const float*)(const void*)row;
      }
      project(rows, k0, k1, packed, width, zb + q * width);
    }
  }
  for (int t = 0; t < count; t++) r[t] = 1.0f / std::sqrt(sum_lanes(squares[t]) / K + s.norm_eps);
}

struct Pre {  // where pre puts its results
  void* h;
  float *maps, *z, *r;
  const float* carried;
};

template <class T, int NS>
void pre_block(const Site& s, const Parameters& w, const T* x, int64_t t0, int64_t t1, const float* packed, int width, float* zb,
               float* wide, const Pre& out) {
  const int m = s.maps();
  project_block<T>(s, x, t0, t1, packed, width, zb, out.r + t0, wide);
  finish<NS>(s, w, zb, width, out.r + t0, int(t1 - t0), out.maps + t0 * m, out.z + t0 * m);
  for (int64_t t = t0; t < t1; t++)
    mix_token<T, NS>(s.n, s.c, x + t * s.k(), out.carried ? out.carried + t * s.n : out.maps + t * m, (T*)out.h + t * s.c);
}

// φ [m][K] → [K][width], zeros beyond m.
void pack_for_projection(const Site& s, const float* fn, int width, float* packed) {
  const int m = s.maps();
  const int64_t K = s.k();
#pragma omp parallel for schedule(static) num_threads(s.threads)
  for (int64_t k0 = 0; k0 < K; k0 += 64)
    for (int64_t k = k0; k < std::min(K, k0 + 64); k++)
      for (int q = 0; q < width; q++) packed[k * width + q] = q < m ? fn[q * K + k] : 0.0f;
}

// Tiles of a stream; φ [m][n][C] ↔ [n][tiles][rows][TILE].
int64_t tiles(const Site& s) { return (s.c + TILE - 1) / TILE; }

void pack_for_gradient(const Site& s, const float* fn, int rows, float* packed) {
  const int m = s.maps();
#pragma omp parallel for schedule(static) num_threads(s.threads)
  for (int64_t tile = 0; tile < s.n * tiles(s); tile++) {
    const int64_t j = tile / tiles(s), c0 = tile % tiles(s) * TILE;
    for (int q = 0; q < rows; q++)
      for (int c = 0; c < TILE; c++)
        packed[(tile * rows + q) * TILE + c] = q < m && c0 + c < s.c ? fn[q * s.k() + j * s.c + c0 + c] : 0.0f;
  }
}

void unpack_gradient(const Site& s, const float* parts, int count, int rows, float* gfn) {
  const int m = s.maps();
  const size_t part = size_t(s.n) * tiles(s) * rows * TILE;
#pragma omp parallel for schedule(static) num_threads(s.threads)
  for (int64_t tile = 0; tile < s.n * tiles(s); tile++) {
    const int64_t j = tile / tiles(s), c0 = tile % tiles(s) * TILE;
    for (int q = 0; q < m; q++)
      for (int c = 0; c < TILE && c0 + c < s.c; c++) {
        float sum = 0.0f;
        for (int p = 0; p < count; p++) sum += parts[p * part + (tile * rows + q) * TILE + c];
        gfn[q * s.k() + j * s.c + c0 + c] = sum;
      }
  }
}

struct Gradient {  // what pre_backward is given, and where it puts its results
  const void *gy, *extra, *gh;
  const float *gmaps, *maps, *z, *r, *carried;
  void* gx;
  float* gcarried;
};

struct Workspace {  // of one thread of pre_backward
  Buffer<float> dots, gz, along, s, xs;
  Workspace(const Site& site, int block, int rows)
      : dots(size_t(block) * site.n), gz(size_t(round_up(block, ROWS)) * rows), along(block), s(size_t(ROWS) * site.n * COLUMNS),
        xs(size_t(site.n) * COLUMNS * block) {}
};

template <class T, int NS>
void pre_backward_block(const Site& s, const Parameters& w, const T* x, int64_t t0, int64_t t1, const float* packed, int rows,
                        int block, Workspace& work, const Gradient& g, float* gfn, double* sums) {
  const int n = s.n, m = s.maps(), count = int(t1 - t0), padded = round_up(count, ROWS);
  const int64_t K = s.k(), xs_tile = int64_t(block) * TILE;
  const T *gy = (const T*)g.gy, *gh = (const T*)g.gh, *extra = (const T*)g.extra;
  if (gh)
    for (int t = 0; t < count; t++) dots_token<T, NS>(n, s.c, x + (t0 + t) * K, gh + (t0 + t) * s.c, work.dots + t * n);
  if (g.gcarried)
    for (int t = 0; t < count * n; t++) g.gcarried[t0 * n + t] = gh ? work.dots[t] : 0.0f;
  std::fill(work.gz.p, work.gz.p + size_t(padded) * rows, 0.0f);
  finish_backward<NS>(s, w, g.gmaps ? g.gmaps + t0 * m : nullptr, gh && !g.carried ? work.dots.p : nullptr, g.z + t0 * m, g.r + t0,
                      count, work.gz, rows, work.along, sums);
  for (int64_t c0 = 0; c0 < s.c; c0 += COLUMNS) {
    const int wide = (int)std::min<int64_t>(COLUMNS, s.c - c0), across = (wide + TILE - 1) / TILE;
    for (int q = 0; q < padded; q += ROWS) {
      for (int j = 0; j < n; j++)
        for (int b = 0; b < across; b++)
          spread(work.gz + q * rows, rows, m, packed + (j * tiles(s) + c0 / TILE + b) * rows * TILE, work.s + j * COLUMNS + b * TILE,
                 n * COLUMNS);
      for (int t = q; t < std::min(q + ROWS, count); t++) {
        const int64_t at = t0 + t;
        const float* maps = g.maps + at * m;
        gradient_token<T, NS>(n, s.c, c0, wide, gy ? gy + at * K : nullptr, gh ? gh + at * s.c : nullptr,
                              extra ? extra + at * K : nullptr, x + at * K, g.carried ? g.carried + at * n : maps, maps + 2 * n,
                              work.along[t], work.s + (t - q) * n * COLUMNS, COLUMNS, (T*)g.gx + at * K, work.xs + t * TILE, xs_tile,
                              at + AHEAD < s.tokens ? AHEAD * K : 0);
      }
    }
    for (int j = 0; j < n; j++)
      for (int b = 0; b < across; b++)
        accumulate(work.gz, rows, m, work.xs + (j * (COLUMNS / TILE) + b) * xs_tile, count,
                   gfn + (j * tiles(s) + c0 / TILE + b) * rows * TILE);
  }
}

// ---------------------------------------------------------------- whole calls

struct Post {  // the post-mix before a pre (cross); x is null where there is none
  const void *x, *f;
  const float* maps;
};

template <class T, int NS>
void forward(const Site& s, const Parameters& w, const Post& before, T* x, const Pre& out) {
  const int width = round_up(s.maps(), W), block = block_tokens(s, sizeof(T)), m = s.maps();
  Buffer<float> packed(size_t(s.k()) * width);
  pack_for_projection(s, w.fn, width, packed);
  const int64_t blocks = (s.tokens + block - 1) / block;
  const size_t own = size_t(block) * width + TOKENS * DEPTH;
  Buffer<float> work(own * s.threads);
#pragma omp parallel num_threads(s.threads)
  {
    float *zb = work + own * omp_get_thread_num(), *wide = zb + size_t(block) * width;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t t0 = b * block, t1 = std::min(s.tokens, t0 + block);
      if (before.x)
        for (int64_t t = t0; t < t1; t++)
          post_token<T, NS>(s.n, s.c, (const T*)before.x + t * s.k(), (const T*)before.f + t * s.c, before.maps + t * m, x + t * s.k());
      pre_block<T, NS>(s, w, x, t0, t1, packed, width, zb, wide, out);
    }
  }
}

struct PostGradient {  // where the post-backward after a pre-backward (cross) puts its results
  void* gf;
  float* gmaps;
};

template <class T, int NS>
void backward(const Site& s, const Parameters& w, const T* x, const Gradient& g, const Post& before, const PostGradient& after,
              float* gfn, float* gbase, float* gscale) {
  const int m = s.maps(), rows = round_up(m, MAPS), block = block_tokens(s, sizeof(T)), n = s.n;
  const size_t part = size_t(n) * tiles(s) * rows * TILE;
  Buffer<float> packed(part);
  pack_for_gradient(s, w.fn, rows, packed);
  const int64_t blocks = (s.tokens + block - 1) / block;
  const int threads = (int)std::max<int64_t>(1, std::min<int64_t>(s.threads, blocks));
  Buffer<float> parts(part * threads);
  Buffer<double> sums(size_t(2) * m * threads);
  std::fill(sums.p, sums.p + size_t(2) * m * threads, 0.0);
  std::vector<std::unique_ptr<Workspace>> work;
  for (int t = 0; t < threads; t++) work.push_back(std::make_unique<Workspace>(s, block, rows));
  int used = 1;
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
#pragma omp single
    used = omp_get_num_threads();
    float* own = parts + part * thread;
    std::fill(own, own + part, 0.0f);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t t0 = b * block, t1 = std::min(s.tokens, t0 + block);
      pre_backward_block<T, NS>(s, w, x, t0, t1, packed, rows, block, *work[thread], g, own, sums + size_t(2) * m * thread);
      if (before.x)
        for (int64_t t = t0; t < t1; t++)
          post_backward_token<T, NS>(n, s.c, (const T*)g.gx + t * s.k(), (const T*)before.x + t * s.k(), (const T*)before.f + t * s.c,
                                     before.maps + t * m, (T*)after.gf + t * s.c, after.gmaps + t * m);
    }
  }
  unpack_gradient(s, parts, used, rows, gfn);
  double of_scale[3] = {};
  for (int q = 0; q < m; q++) {
    double base = 0.0;
    for (int p = 0; p < used; p++) base += sums[size_t(2) * m * p + q], of_scale[q < n ? 0 : q < 2 * n ? 1 : 2] += sums[size_t(2) * m * p + m + q];
    gbase[q] = (float)base;
  }
  for (int i = 0; i < 3; i++) gscale[i] = (float)of_scale[i];
}

template <class F>
void for_streams(int n, F body) {
  switch (n) {
    case 1: return body(std::integral_constant<int, 1>{});
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 8: return body(std::integral_constant<int, 8>{});
    default: return body(std::integral_constant<int, 0>{});
  }
}

// 0, or 1 where memory ran out.
template <class F>
int for_kind(int narrow, int n, F body) {
  try {
    for_streams(n, [&](auto streams) {
      if (narrow) body(bf16{}, streams);
      else body(float{}, streams);
    });
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

}  // namespace

extern "C" {

int laneway_vector_width() { return W; }
int laneway_largest() { return LARGEST; }

// pre, or cross when before_x is not null (then x is written).
int laneway_forward(int narrow, int64_t tokens, int n, int64_t c, int threads, float norm_eps, float eps, float cap, int iterations,
                     const float* fn, const float* base, const float* scale, const float* carried, const void* before_x,
                     const void* before_f, const float* before_maps, void* x, void* h, float* maps, float* z, float* r) {
  const Site s{tokens, n, c, threads, norm_eps, eps, cap, iterations};
  return for_kind(narrow, n, [&](auto kind, auto streams) {
    using T = decltype(kind);
    forward<T, streams()>(s, {fn, base, scale}, {before_x, before_f, before_maps}, (T*)x, {h, maps, z, r, carried});
  });
}

int laneway_post(int narrow, int64_t tokens, int n, int64_t c, int threads, const void* x, const void* f, const float* maps, void* y) {
  return for_kind(narrow, n, [&](auto kind, auto streams) {
    using T = decltype(kind);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tokens; t++)
      post_token<T, streams()>(n, c, (const T*)x + t * n * c, (const T*)f + t * c, maps + t * n * (n + 2), (T*)y + t * n * c);
  });
}

int laneway_post_backward(int narrow, int64_t tokens, int n, int64_t c, int threads, const void* gy, const void* x, const void* f,
                           const float* maps, void* gf, float* gmaps) {
  return for_kind(narrow, n, [&](auto kind, auto streams) {
    using T = decltype(kind);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tokens; t++)
      post_backward_token<T, streams()>(n, c, (const T*)gy + t * n * c, (const T*)x + t * n * c, (const T*)f + t * c,
                                        maps + t * n * (n + 2), (T*)gf + t * c, gmaps + t * n * (n + 2));
  });
}

// pre_backward, or cross_backward when before_x is not null. gy, extra, gh, gmaps and carried may be null.
int laneway_backward(int narrow, int64_t tokens, int n, int64_t c, int threads, float eps, float cap, int iterations, const float* fn,
                      const float* base, const float* scale, const void* gy, const void* extra, const void* gh, const float* gmaps,
                      const void* x, const float* carried, const float* maps, const float* z, const float* r, void* gx, float* gfn,
                      float* gbase, float* gscale, float* gcarried, const void* before_x, const void* before_f,
                      const float* before_maps, void* gf, float* before_gmaps) {
  const Site s{tokens, n, c, threads, 0.0f, eps, cap, iterations};
  return for_kind(narrow, n, [&](auto kind, auto streams) {
    using T = decltype(kind);
    backward<T, streams()>(s, {fn, base, scale}, (const T*)x, {gy, extra, gh, gmaps, maps, z, r, carried, gx, gcarried},
                           {before_x, before_f, before_maps}, {gf, before_gmaps}, gfn, gbase, gscale);
  });
}
}
