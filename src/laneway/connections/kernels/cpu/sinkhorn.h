// Sinkhorn-Knopp of W small matrices at once, one in each lane: forward, and the exact derivative of the iterations that were run.
//
// The same arithmetic as kernels/sinkhorn.py, which explains it: the first iteration on the logits (two softmaxes), the others as
// scalings a, b of a fixed K, M = diag(a) K diag(b), restarted every few iterations so that neither leaves fp32.
// Matrices are [in][out] (entry in·n + out).
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

constexpr int LARGEST = 16;  // streams
constexpr int SEGMENT = 10;  // iterations between two restarts
constexpr int DIGITS = 36;   // decimal digits that the square of a scaling may have

struct Sinkhorn {
  int n, iterations, segment;
  float eps;
  std::vector<vf> store;  // for every segment: K, then a and b of steps 0 … segment

  Sinkhorn(int n, int iterations, float eps) : n(n), iterations(iterations), eps(eps) {
    segment = std::max(1, std::min(SEGMENT, int(DIGITS / (2 * std::log10(double(std::max(n, 2)))))));
  }

  size_t stride() const { return size_t(n) * n + 2 * size_t(segment + 1) * n; }
  int segments() const { return iterations <= 1 ? 0 : (iterations - 1 + segment - 1) / segment; }
  int steps(int s) const { return std::min(segment, iterations - 1 - s * segment); }

  // (log K, P) from the logits; P is the softmax over outputs (+ eps).
  void first(const vf* logits, vf* log_k, vf* p) const {
    for (int i = 0; i < n; i++) {
      vf most = logits[i * n], total = splat(0.0f);
      for (int o = 1; o < n; o++) most = vmax(most, logits[i * n + o]);
      for (int o = 0; o < n; o++) total += p[i * n + o] = vexp(logits[i * n + o] - most);
      const vf log_total = vlog(total);
      for (int o = 0; o < n; o++) {
        p[i * n + o] = p[i * n + o] / total + eps;
        log_k[i * n + o] = logits[i * n + o] - most - log_total;
      }
    }
    for (int o = 0; o < n; o++) {
      if (eps == 0.0f) {
        vf most = log_k[o], total = splat(0.0f);
        for (int i = 1; i < n; i++) most = vmax(most, log_k[i * n + o]);
        for (int i = 0; i < n; i++) total += vexp(log_k[i * n + o] - most);
        const vf shift = most + vlog(total);
        for (int i = 0; i < n; i++) log_k[i * n + o] -= shift;
      } else {
        vf total = splat(eps);
        for (int i = 0; i < n; i++) total += p[i * n + o];
        const vf shift = vlog(total);
        for (int i = 0; i < n; i++) log_k[i * n + o] = vlog(p[i * n + o]) - shift;
      }
    }
  }

  // All iterations after the first, kept in ``store`` (the last segment alone unless ``keep``). m: H_res, [in][out].
  void run(vf* log_k, vf* m, bool keep) {
    const int count = segments();
    store.resize(stride() * std::max(1, keep ? count : 1));
    if (count == 0) {
      for (int e = 0; e < n * n; e++) m[e] = store[e] = vexp(log_k[e]);
      return;
    }
    for (int s = 0; s < count; s++) {
      vf *k = store.data() + (keep ? s : 0) * stride(), *a = k + n * n, *b = a + (segment + 1) * n;
      const int last = steps(s);
      for (int e = 0; e < n * n; e++) k[e] = vexp(log_k[e]);
      for (int i = 0; i < n; i++) a[i] = b[i] = splat(1.0f);
      for (int t = 1; t <= last; t++) step(k, a + (t - 1) * n, b + (t - 1) * n, a + t * n, b + t * n);
      a += last * n, b += last * n;
      if (s + 1 < count) {
        vf la[LARGEST], lb[LARGEST];
        for (int i = 0; i < n; i++) la[i] = vlog(a[i]), lb[i] = vlog(b[i]);
        for (int i = 0; i < n; i++)
          for (int o = 0; o < n; o++) log_k[i * n + o] += la[i] + lb[o];
      } else {
        for (int i = 0; i < n; i++)
          for (int o = 0; o < n; o++) m[i * n + o] = k[i * n + o] * a[i] * b[o];
      }
    }
  }

  void step(const vf* k, const vf* a0, const vf* b0, vf* a, vf* b) const {
    for (int i = 0; i < n; i++) {
      vf total = eps == 0.0f ? splat(0.0f) : eps / a0[i];
      for (int o = 0; o < n; o++) total += k[i * n + o] * b0[o];
      a[i] = 1.0f / total;
    }
    for (int o = 0; o < n; o++) {
      vf total = eps == 0.0f ? splat(0.0f) : eps / b0[o];
      for (int i = 0; i < n; i++) total += k[i * n + o] * a[i];
      b[o] = 1.0f / total;
    }
  }

  // logits, gradient g of M → gradient of the logits, in g.
  void backward(const vf* logits, vf* g) {
    vf log_k[LARGEST * LARGEST], p[LARGEST * LARGEST], m[LARGEST * LARGEST];
    first(logits, log_k, p);
    run(log_k, m, true);
    for (int e = 0; e < n * n; e++) g[e] *= m[e];
    for (int s = segments() - 1; s >= 0; s--) backward_segment(s, g);
    backward_first(store.data(), p, g);
  }

  // Gradient of log(diag(a) K diag(b)) → of log K.
  void backward_segment(int s, vf* g) {
    const vf *k = store.data() + s * stride(), *a = k + n * n, *b = a + (segment + 1) * n;
    const int last = steps(s);
    vf ga[LARGEST], gb[LARGEST], sa[LARGEST], sb[LARGEST], gk[LARGEST * LARGEST];
    for (int i = 0; i < n; i++) ga[i] = gb[i] = sa[i] = splat(0.0f);
    for (int i = 0; i < n; i++)
      for (int o = 0; o < n; o++) ga[i] += g[i * n + o], gb[o] += g[i * n + o], gk[i * n + o] = splat(0.0f);
    for (int i = 0; i < n; i++) ga[i] /= a[last * n + i], gb[i] /= b[last * n + i];
    for (int t = last; t > 0; t--) {
      const vf *at = a + t * n, *bt = b + t * n, *b0 = bt - n;
      for (int o = 0; o < n; o++) sb[o] = -gb[o] * bt[o] * bt[o];
      for (int i = 0; i < n; i++) {
        vf total = t == last ? ga[i] : eps == 0.0f ? splat(0.0f) : sa[i] * (-eps / (at[i] * at[i]));
        for (int o = 0; o < n; o++) {
          gk[i * n + o] += at[i] * sb[o];
          total += k[i * n + o] * sb[o];
        }
        ga[i] = total;
      }
      for (int i = 0; i < n; i++) sa[i] = -ga[i] * at[i] * at[i];
      for (int o = 0; o < n; o++) {
        vf total = eps == 0.0f ? splat(0.0f) : sb[o] * (-eps / (b0[o] * b0[o]));
        for (int i = 0; i < n; i++) {
          gk[i * n + o] += sa[i] * b0[o];
          total += k[i * n + o] * sa[i];
        }
        gb[o] = total;
      }
    }
    for (int e = 0; e < n * n; e++) g[e] += gk[e] * k[e];
  }

  // Through the first iteration: gradient of log K → of log P → of the logits.
  void backward_first(const vf* k, const vf* p, vf* g) const {
    for (int o = 0; o < n; o++) {
      vf total = splat(0.0f), column = splat(eps);
      for (int i = 0; i < n; i++) total += g[i * n + o], column += p[i * n + o];
      for (int i = 0; i < n; i++) g[i * n + o] -= (eps == 0.0f ? k[i * n + o] : p[i * n + o] / column) * total;
    }
    for (int i = 0; i < n; i++) {
      vf total = splat(0.0f);
      if (eps != 0.0f)
        for (int o = 0; o < n; o++) g[i * n + o] *= (p[i * n + o] - eps) / p[i * n + o];
      for (int o = 0; o < n; o++) total += g[i * n + o];
      for (int o = 0; o < n; o++) g[i * n + o] -= (p[i * n + o] - eps) * total;
    }
  }
};
