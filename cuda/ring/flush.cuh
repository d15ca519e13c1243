// The flush of a ring into a state on tensor cores: the update of 16 rows by K columns is a product over the entries, of
// which a ring has as many as one product sums.
//
// A lane must end with the columns that it has of the state, eight in a row, where the product's layout gives it two of
// every eight. So the columns of the keys are stored in an order in which the pairs of four products are neighbours.
#pragma once

#include "fragments.cuh"

namespace gdn {
namespace ring {

// The keys' terms, entry by entry. Rows are an odd multiple of 16 bytes apart, for ldmatrix.
template <typename T, int K> struct FlushKeys {
  static constexpr int kTerms = Fragment<T>::kTerms;
  alignas(16) uint32_t terms[kTerms][kEntries][K / 2 + 4];

  // Stores columns `column` and the next of entry j: x and y. All kEntries must be stored, with zeros after the last.
  __device__ __forceinline__ void put(int j, int column, float x, float y) {
    uint32_t w[kTerms];
    split(x, y, w);
#pragma unroll
    for (int t = 0; t < kTerms; ++t) terms[t][j][column / 32 * 16 + column % 8 / 2 * 4 + column / 8 % 4] = w[t];
  }

  // Stores all entries, by all threads, from rows of T: key(j) is where that of entry j begins. The caller has a barrier before
  // and after it.
  template <typename Key> __device__ __forceinline__ void fill(const Key &key, int length, int thread, int threads) {
    for (int i = thread; i < kEntries * K / 8; i += threads) {
      const int j = i / (K / 8), run = i % (K / 8), m = run / 4, c = run % 4;
      uint32_t w[kTerms][4] = {};
      if (j < length) {
        Fragment<T> fragment;
        fragment.load(key(j) + 8 * run);
        fragment.terms(w);
      }
#pragma unroll
      for (int t = 0; t < kTerms; ++t)
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) terms[t][j][16 * m + 4 * pair + c] = w[t][pair];
    }
  }
};

// The entry that is the x-th, 0 .. 3, of lane % 4 = c in an operand of a product over entries.
__device__ __forceinline__ int entry_of(int x, int c) { return 2 * c + x % 2 + x / 2 * 8; }

// Two rows of a lane, eight apart, as that operand: the updates of the lane's entries.
template <int TERMS> struct FlushUpdates {
  uint32_t low[TERMS][2], high[TERMS][2];

  // update(x, half): by the x-th entry.
  template <typename F> __device__ __forceinline__ explicit FlushUpdates(F &&update) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      uint32_t a[TERMS], b[TERMS];
      split(update(2 * s, 0), update(2 * s + 1, 0), a);
      split(update(2 * s, 1), update(2 * s + 1, 1), b);
#pragma unroll
      for (int i = 0; i < TERMS; ++i) low[i][s] = a[i], high[i][s] = b[i];
    }
  }
};

// s[half][..] += updates times keys, for this lane's fragment m in both rows. With a state of 16 bits, for which two terms are
// enough, the products are added to s in the tensor core; for an f32 state its truncation errors would accumulate.
template <typename T, int K, int TERMS>
__device__ __forceinline__ void flush_fragment(float (&s)[2][8], const FlushUpdates<TERMS> &updates, const FlushKeys<T, K> &keys, int m,
                                               int lane) {
#pragma unroll
  for (int pair = 0; pair < 4; pair += 2) {
    float acc[2][4] = {}, rest[2][4] = {};
    if constexpr (TERMS < 3) {
#pragma unroll
      for (int x = 0; x < 2; ++x)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[x][i] = s[i / 2][2 * (pair + x) + i % 2];
    }
#pragma unroll
    for (int j = 0; j < FlushKeys<T, K>::kTerms; ++j) {
      uint32_t b[4];    // the columns of this product and of the next one
      ptx::load_matrices_trans(b, ptx::shared_address(&keys.terms[j][lane % 16][16 * m + 4 * (pair + lane / 16)]));
#pragma unroll
      for (int i = 0; i < TERMS; ++i) {
        if (i + j > 2) continue;
#pragma unroll
        for (int x = 0; x < 2; ++x)
          ptx::mma16816<__nv_bfloat16>(TERMS < 3 || i + j == 0 ? acc[x] : rest[x], updates.low[i][0], updates.high[i][0],
                                       updates.low[i][1], updates.high[i][1], b[2 * x], b[2 * x + 1]);
      }
    }
#pragma unroll
    for (int x = 0; x < 2; ++x)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float &sum = s[i / 2][2 * (pair + x) + i % 2];
        if constexpr (TERMS < 3) sum = acc[x][i];
        else sum += acc[x][i] + rest[x][i];
      }
  }
}

// Flushes the 16 rows that begin at `rows` and writes them to `out`.
template <typename ST, typename T, int K, int TERMS>
__device__ __forceinline__ void flush_rows(const ST (*rows)[K], ST *out, float state_decay, const FlushKeys<T, K> &keys,
                                           const FlushUpdates<TERMS> &updates, int lane) {
  using F = Fragment<ST>;
  const int row = lane / 4, c = lane % 4;
#pragma unroll
  for (int m = 0; m < kFragments<K>; ++m) {
    float s[2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      F fragment;
      fragment.load(rows[row + 8 * half] + 8 * c + m * kFragmentStep);
      fragment.floats(s[half]);
#pragma unroll
      for (int i = 0; i < 8; ++i) s[half][i] *= state_decay;
    }
    flush_fragment(s, updates, keys, m, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) F::store(out + (row + 8 * half) * K + 8 * c + m * kFragmentStep, s[half]);
  }
}

}  // namespace ring
}  // namespace gdn
