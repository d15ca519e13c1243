// How a warp holds rows of a state: eight lanes share a row of K elements, in chunks of 16 bytes that lie 128 bytes apart, so that
// the eight lanes read and write whole 128-byte lines. Four groups of lanes stand for four rows, or for four runs of ROWS rows.
// Where eight lanes do not divide the chunks of a row (K 96 in bf16 has twelve), four share it, and eight groups stand side by side.
#pragma once

#include "../common/convert.cuh"
#include "../common/math.cuh"

namespace gdn {
namespace step {

// Of K = V = 128.
constexpr int kDim = 128;
constexpr int kLanes = 8;       // lanes that share a row
constexpr int kGroups = 4;      // rows, or runs of rows, a warp holds side by side
constexpr int kEach = kDim / kLanes;

template <typename ST, int K = kDim> struct Lanes {
  static constexpr int kVec = 16 / static_cast<int>(sizeof(ST));    // elements a chunk
  static constexpr int kLanes = K / kVec % 8 == 0 ? 8 : 4, kGroups = 32 / kLanes;
  static constexpr int kEach = K / kLanes;                          // elements a lane and row
  static constexpr int kChunks = kEach / kVec;                      // chunks a lane and row
  static_assert(kChunks * kVec * kLanes == K, "lanes divide the chunks of a row");

  // Where chunk j of lane `part` begins in a row.
  static __device__ __forceinline__ int column(int part, int j) { return kVec * (part + kLanes * j); }

  static __device__ __forceinline__ uint4 load(const ST *row, int part, int j) {
    return *reinterpret_cast<const uint4 *>(row + kVec * part + kVec * kLanes * j);
  }

  static __device__ __forceinline__ void unpack(const uint4 &words, float *x) {
    if constexpr (sizeof(ST) == 4) {
      x[0] = __uint_as_float(words.x), x[1] = __uint_as_float(words.y);
      x[2] = __uint_as_float(words.z), x[3] = __uint_as_float(words.w);
    } else {
      const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[2 * i] = __uint_as_float(w[i] << 16), x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }

  static __device__ __forceinline__ void store(ST *row, int part, const float (&x)[kEach]) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      float y[kVec];
#pragma unroll
      for (int c = 0; c < kVec; ++c) y[c] = x[j * kVec + c];
      store_pack<ST, kVec>(row + column(part, j), y);
    }
  }

  // This lane's elements of a row of f32 in shared memory.
  static __device__ __forceinline__ void slice(const float *row, int part, float (&x)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4)
      *reinterpret_cast<float4 *>(&x[i]) =
          *reinterpret_cast<const float4 *>(row + column(part, i / kVec) + i % kVec);
  }
};

// Sum over the lanes of a row; all get the same bits.
template <int LANES = kLanes, int N> __device__ __forceinline__ void row_sums(float (&x)[N]) {
#pragma unroll
  for (int d = LANES / 2; d > 0; d /= 2)
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], d);
}

template <int N> __device__ __forceinline__ float dot(const float (&x)[N], const float (&y)[N]) {
  float sum[2] = {0.f, 0.f};    // two chains, to halve their latency
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i & 1] = fmaf(x[i], y[i], sum[i & 1]);
  return sum[0] + sum[1];
}

// One token on ROWS rows of LANES lanes, EACH elements a lane: S <- decay S + beta (v - decay S k) k^T, and the rows of o = S q for
// the new S.
template <int LANES, int ROWS, int EACH>
__device__ __forceinline__ void update(float (&state)[ROWS][EACH], const float (&k)[EACH], const float (&q)[EACH],
                                       const float (&v)[ROWS], float decay, float beta, float kq, float (&o)[ROWS]) {
  float sums[2 * ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[2 * r] = dot(state[r], k), sums[2 * r + 1] = dot(state[r], q);
  row_sums<LANES>(sums);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float d = beta * (v[r] - decay * sums[2 * r]);
#pragma unroll
    for (int i = 0; i < EACH; ++i) state[r][i] = fmaf(d, k[i], decay * state[r][i]);
    o[r] = fmaf(d, kq, decay * sums[2 * r + 1]);
  }
}

// The same for as many rows as two lanes each make, where many tokens make the arithmetic count: the sums are scattered over the
// lanes, of eight by seven shuffles, where a butterfly takes 24. Lane `part` brings v of row part / 2, and the odd lanes get o of
// that row.
template <int ROWS, int EACH>
__device__ __forceinline__ float update_scattered(float (&state)[ROWS][EACH], const float (&k)[EACH], const float (&q)[EACH], float v,
                                                  float decay, float beta, float kq, int part) {
  constexpr int LANES = 2 * ROWS;
  float sums[LANES];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[2 * r] = dot(state[r], k), sums[2 * r + 1] = dot(state[r], q);
#pragma unroll
  for (int half = LANES / 2; half > 0; half /= 2) {
    const bool upper = part & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[i + half], half);
      sums[i] = (upper ? sums[i + half] : sums[i]) + other;
    }
  }
  const float own = decay * sums[0], d = beta * (v - own);    // of S k in the even lanes, of S q in the odd
  float o = 0.f;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float e = __shfl_sync(0xffffffffu, d, 2 * r, LANES);
    if (part / 2 == r) o = fmaf(e, kq, own);
#pragma unroll
    for (int i = 0; i < EACH; ++i) state[r][i] = fmaf(e, k[i], decay * state[r][i]);
  }
  return o;
}

// update() for q and k as they came. Their norms come out of the same butterfly as S k and S q, since S k = (S k') / |k'|,
// and only scalars are normalised.
//
// NOTES: the key's factor to more than f32, see SquareSum. It multiplies sums here and not elements; their rounding differs
// from token to token, so that it does not add up either.
template <int LANES, int ROWS, int EACH>
__device__ __forceinline__ void normalise_and_update(const gdn_common &p, float (&state)[ROWS][EACH], const float (&k)[EACH],
                                                     const float (&q)[EACH], const float (&v)[ROWS], float decay, float beta,
                                                     float (&o)[ROWS]) {
  SquareSum kk;
  float sums[2 * ROWS + 2];    // q.q, k.q, then S k and S q of each row
#pragma unroll
  for (int i = 0; i < EACH; ++i) kk.add_square(k[i]);
  sums[0] = dot(q, q), sums[1] = dot(k, q);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[2 * r + 2] = dot(state[r], k), sums[2 * r + 3] = dot(state[r], q);
#pragma unroll
  for (int d = LANES / 2; d > 0; d /= 2) {
    kk.add_lane(d);
#pragma unroll
    for (int i = 0; i < 2 * ROWS + 2; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], d);
  }
  const Factor k_scale = p.l2norm ? inverse_root(kk, p.l2_eps) : Factor{1.f, 0.f};
  const float q_scale = p.l2norm ? rsqrtf(sums[0] + p.l2_eps) * p.scale : p.scale;
  const float kq = sums[1] * k_scale.hi * q_scale;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float d = beta * (v[r] - decay * k_scale.times(sums[2 * r + 2])), e = k_scale.times(d);
    o[r] = fmaf(d, kq, decay * (q_scale * sums[2 * r + 3]));
#pragma unroll
    for (int i = 0; i < EACH; ++i) state[r][i] = fmaf(e, k[i], decay * state[r][i]);
  }
}

}  // namespace step
}  // namespace gdn
