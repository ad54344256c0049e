// A float vector of the widest registers that the compiler may use, in GCC's vector extension: AVX-512, AVX2 or anything else.
// Loads and stores of fp32 and bf16, whole or a part, and exp, log, tanh and sigmoid to about one unit in the last place.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int REGISTERS = 16;
#else
constexpr int W = 4;
constexpr int REGISTERS = 16;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * W), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

INLINE vf splat(float a) { return a - vf{}; }
INLINE vf as_vf(vi a) { return (vf)a; }

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE void store(float* p, vf v) { *(vf_any*)p = v; }

INLINE vf load(const bf16* p) {
  const vu u = __builtin_convertvector(*(const vh_any*)p, vu) << 16;
  return (vf)u;
}

// Round to nearest, ties to even; a NaN stays one.
INLINE void store(bf16* p, vf v) {
  const vu u = (vu)v;
  const vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vu nan = (u >> 16) | 0x40u;
  *(vh_any*)p = __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded, vh);
}

// The first ``count`` numbers, the rest zero; and only these written back.
template <class T>
INLINE vf load_part(const T* p, int count) {
  T part[W];
  std::memset(part, 0, sizeof part);
  std::memcpy(part, p, count * sizeof(T));
  return load(part);
}
template <class T>
INLINE void store_part(T* p, vf v, int count) {
  T part[W];
  store(part, v);
  std::memcpy(p, part, count * sizeof(T));
}

INLINE float sum_lanes(vf v) {
  float lanes[W];
  store(lanes, v);
  for (int width = W / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

// e^x: 2^k times a polynomial in the rest (Cephes' expf); 0 under the smallest normal number, inf over the largest.
INLINE vf vexp(vf x) {
  const vf magic = splat(12582912.0f);  // adding it rounds to an integer
  const vf inside = x > 88.7f ? splat(88.7f) : (x < -87.3f ? splat(-87.3f) : x);
  const vf k = (inside * 1.44269504f + magic) - magic;
  vf r = inside - k * 0.693359375f;
  r = r - k * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi exponent = __builtin_convertvector(k, vi);
  const vi half = exponent >> 1;  // 2^128 is no float, 2^64 · 2^64 is fine
  p = p * as_vf((half + 127) << 23) * as_vf((exponent - half + 127) << 23);
  p = x > 88.72283f ? splat(INFINITY) : p;
  return x < -87.3f ? splat(0.0f) : (x == x ? p : x);
}

// log x of normal numbers x > 0 (Cephes' logf).
INLINE vf vlog(vf x) {
  vi bits = (vi)x;
  vi exponent = ((bits - 0x3f3504f3) >> 23);
  const vf f = as_vf(bits - (exponent << 23)) - 1.0f;  // x / 2^e − 1, in [√½ − 1, √2 − 1]
  const vf e = __builtin_convertvector(exponent, vf);
  vf p = splat(7.0376836292e-2f);
  p = p * f + -1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f + -1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f + -1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f + -2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  vf y = p * f * f * f;
  y = y + e * -2.12194440e-4f;
  y = y - 0.5f * f * f;
  const vf result = f + y + e * 0.693359375f;
  return x == x ? result : x;
}

INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }

// Its derivative, not as a (1 - a): that loses all digits where a is near one.
INLINE vf vsigmoid_slope(vf x) {
  const vf e = vexp(x < 0.0f ? x : -x);
  return e / ((1.0f + e) * (1.0f + e));
}

// tanh: an odd polynomial near zero, through exp elsewhere (Cephes' tanhf).
INLINE vf vtanh(vf x) {
  const vf z = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  const vf near = p * z * x + x;
  const vf a = x < 0.0f ? -x : x;
  const vf far = 1.0f - 2.0f / (vexp(2.0f * a) + 1.0f);
  return a < 0.625f ? near : (x < 0.0f ? -far : far);
}

// Its derivative; as 1 - tanh² it would lose all digits where tanh is near one.
INLINE vf vtanh_slope(vf x) { return 4.0f * vsigmoid_slope(2.0f * x); }
