// The fold of a ring into a state on tensor cores: the update of 16 rows by 128 columns is a product over the entries, of
// which a window has as many as a product takes at once.
//
// A lane must be left with the columns that it has of the state, eight in a row, where the product's layout gives it two of
// every eight. So the columns of the keys are laid down in an order in which those two of four products are neighbours.
#pragma once

#include "pieces.cuh"

namespace gdn {
namespace ring {

// The keys' terms, entry by entry. Rows are 16 bytes more than a multiple of 128 apart, for ldmatrix.
template <typename T> struct FoldKeys {
  static constexpr int kTerms = Piece<T>::kTerms;
  alignas(16) uint32_t terms[kTerms][kWindow][kDim / 2 + 4];

  // Of entry j, columns `column` and the next: x and y. All entries of a window are to be put, with zeros past the last.
  __device__ __forceinline__ void put(int j, int column, float x, float y) {
    uint32_t w[kTerms];
    split(x, y, w);
#pragma unroll
    for (int t = 0; t < kTerms; ++t) terms[t][j][column / 32 * 16 + column % 8 / 2 * 4 + column / 8 % 4] = w[t];
  }

  // All of them, by all threads, from rows of T. A barrier belongs before and behind it.
  __device__ __forceinline__ void fill(const T *keys, int stride, int length, int thread, int threads) {
    for (int i = thread; i < kWindow * kDim / 8; i += threads) {
      const int j = i / (kDim / 8), run = i % (kDim / 8), m = run / 4, c = run % 4;
      uint32_t w[kTerms][4] = {};
      if (j < length) {
        Piece<T> piece;
        piece.load(keys + j * stride + 8 * run);
        piece.terms(w);
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

// Two rows of a lane, eight below each other, as that operand: what they add to the state by the lane's entries.
template <int TERMS> struct FoldUpdates {
  uint32_t low[TERMS][2], high[TERMS][2];

  // update(x, half): by the x-th entry.
  template <typename F> __device__ __forceinline__ explicit FoldUpdates(F &&update) {
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

// s[half][..] += updates times keys, of this lane's piece m in both rows. With a state of 16 bits, of which two terms are enough,
// the products add to s where they are; what a tensor core cuts off of an f32 state would add up.
template <typename T, int TERMS>
__device__ __forceinline__ void fold_piece(float (&s)[2][8], const FoldUpdates<TERMS> &updates, const FoldKeys<T> &keys, int m,
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
    for (int j = 0; j < FoldKeys<T>::kTerms; ++j) {
      uint32_t b[4];    // of the first product's columns and of the next one's
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
        float &to = s[i / 2][2 * (pair + x) + i % 2];
        if constexpr (TERMS < 3) to = acc[x][i];
        else to += acc[x][i] + rest[x][i];
      }
  }
}

// Folds 16 rows of `rows` on and writes them from `out` on.
template <typename ST, typename T, int TERMS>
__device__ __forceinline__ void fold_rows(const ST (*rows)[kDim], ST *out, float state_left, const FoldKeys<T> &keys,
                                          const FoldUpdates<TERMS> &updates, int lane) {
  using P = Piece<ST>;
  const int row = lane / 4, c = lane % 4;
#pragma unroll
  for (int m = 0; m < kPieces; ++m) {
    float s[2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      P piece;
      piece.load(rows[row + 8 * half] + 8 * c + m * kPieceStep);
      piece.floats(s[half]);
#pragma unroll
      for (int i = 0; i < 8; ++i) s[half][i] *= state_left;
    }
    fold_piece(s, updates, keys, m, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) P::store(out + (row + 8 * half) * kDim + 8 * c + m * kPieceStep, s[half]);
  }
}

}  // namespace ring
}  // namespace gdn
