// The layouts of the backward pass in chunks: records, images of states and updates, and where they lie in the workspace.
//
// Sequences are cut into `sections` parts of equal length, of which the workspace holds one or all. A place is the position of a
// chunk in it; places of a sequence follow each other.
#pragma once

#include "../chunk/layout.cuh"
#include "plan.h"

namespace gdn {
namespace backward {

using chunk::kChunk;
using chunk::kImageBytes;
using chunk::kTileBytes;

constexpr int kKeys = 128;                          // columns of a state; those past head_k are zero
constexpr int kPartTiles = 2;                       // tiles of a step of the gradients kernel
constexpr int kUpdateScales = 256 / 16;             // head_v is at most 256
constexpr int kStateBytes = 2 * kTileBytes;         // kTileRows rows of a state, as two tiles side by side

// Factors of the tokens of a chunk in the order of chunk::factor_at(), c being the running sum of the log decay.
struct WalkFactors {
  float read[kChunk];     // e^c / |k|
  float beta[kChunk];
  float write[kChunk];    // e^(c of the last - c) / |k|
  float query[kChunk];    // e^c scale / |q|
  float key[kChunk];      // -e^c / |k|
  float unbeta[kChunk];   // 1 / beta
  float decay;            // e^(c of the last)
  float left[2];          // of the tokens of each half: log2 of what they leave of a state at most
  uint32_t walked;        // blocks of walks that have stored all they keep of this chunk (Cut::beside)
};

// beta is what U, and then the gradient of beta, are divided by. So it is at least as large as this, which no state notices: less than one
// rounding of f32, for f16 of what f16 has of U.
template <typename T> constexpr float kLeastBeta = std::is_same_v<T, __half> ? 0x1p-14f : 0x1p-40f;

// The same tokens in order. Past the end of the sequence the reciprocal norms are zero.
struct TokenFactors {
  float c[kChunk];    // to base 2
  float beta[kChunk];
  float k_norm[kChunk], q_norm[kChunk];    // reciprocal
  float updates[kUpdateScales];            // powers of two, which 16 columns each of U / beta are divided by in f16; from the forward walk
};

// Of a chunk and a value head. Matrices are images of tiles in f16, a row for a token i, a column for a token j; zero above the diagonal.
//
// NOTES: bf16 is not enough. Where keys repeat the products with the inverse are differences of numbers that are up to eight times as
// large, and roundings of 2^-9 became errors of 1.6e-2 in dV and dbeta.
struct Record {
  uint8_t inverse[kImageBytes];      // (I + L)^-1, L_ij = beta_i (k_i k_j) e^(c_i - c_j) below the diagonal
  uint8_t attention[kImageBytes];    // scale (q_i k_j) e^(c_i - c_j) up to it
  WalkFactors walk;
  TokenFactors tokens;
};
static_assert(sizeof(Record) % 16 == 0 && sizeof(WalkFactors) % 16 == 0, "copied in pieces of 16 bytes");

// Clears the rows of TILES tiles side by side past `count`: a box of packed tokens has those of the next sequence there.
template <int TILES, int THREADS> __device__ __forceinline__ void clear_rows(uint8_t *tiles, int count, int thread) {
  const int pieces = (kChunk - count) * 8;
#pragma unroll 1
  for (int i = thread; i < TILES * pieces; i += THREADS)
    *reinterpret_cast<uint4 *>(tiles + i / pieces * kTileBytes + count * 128 + i % pieces * 16) = make_uint4(0, 0, 0, 0);
}

// The tensor that holds U of a value head in the place of its gradient (updates_in_place()); `head` counts those of the key head.
__device__ __forceinline__ const gdn_heads &updates_of(const gdn_rule_backward_params &p, int head) { return head == 0 ? p.d_q : p.d_k; }

// ---- places ----

__device__ __forceinline__ int chunks_of(const Tokens &seq) { return (seq.count + kChunk - 1) / kChunk; }
// In 32 bits, in which a division takes a fifth of the time: a sequence has fewer than 2^26 chunks, and a launch no more than 2^31 places.
__device__ __forceinline__ int border_of(const Span &s, int chunks, int section) {
  return s.sections == 1 ? section * chunks : static_cast<int>(static_cast<uint32_t>(chunks * section) / static_cast<uint32_t>(s.sections));
}
__device__ __forceinline__ int begin_of(const Span &s, int chunks) { return border_of(s, chunks, s.section); }
__device__ __forceinline__ int end_of(const Span &s, int chunks) { return border_of(s, chunks, s.section + 1); }
__device__ __forceinline__ int longest_section(const Span &s, int chunks) {
  return s.sections == 1 ? chunks : static_cast<int>(static_cast<uint32_t>(chunks + s.sections - 1) / static_cast<uint32_t>(s.sections));
}

// The first place of sequence n. Where sequences are packed each may leave a place or two unused, so that no sum over the
// sequences before is needed (plan.h has the total).
__device__ __forceinline__ int64_t first_place(const gdn_sequences &q, const Span &s, int n) {
  if (q.cu_seqlens == nullptr) {
    return static_cast<int64_t>(n) * longest_section(s, (q.tokens_per_seq + kChunk - 1) / kChunk);
  }
  const int64_t first = chunk::first_chunk(q, n);
  return s.sections == 1 ? first : static_cast<uint32_t>(first) / static_cast<uint32_t>(s.sections) + n;
}

// The chunk at a place, by all lanes of a warp.
struct Chunk {
  Tokens seq;
  int n, index;
  bool there;
};
__device__ __forceinline__ Chunk chunk_at(const gdn_sequences &q, const Span &s, int64_t place) {
  Chunk y;
  if (q.cu_seqlens == nullptr) {
    const int each = longest_section(s, (q.tokens_per_seq + kChunk - 1) / kChunk);
    y.n = static_cast<int>(static_cast<uint32_t>(place) / static_cast<uint32_t>(each));
  } else {
    const int lane = threadIdx.x % 32;
    int low = 0, high = q.num_seqs;
    while (high - low > 1) {
      const int step = (high - low + 31) / 32, candidate = low + lane * step;
      const bool begins = candidate < high && first_place(q, s, candidate) <= place;
      low += (__popc(__ballot_sync(0xffffffffu, begins)) - 1) * step;
      high = min(high, low + step);
    }
    y.n = low;
  }
  y.seq = tokens_of(q, y.n);
  const int chunks = chunks_of(y.seq);
  y.index = begin_of(s, chunks) + static_cast<int>(place - first_place(q, s, y.n));
  y.there = y.index < end_of(s, chunks);
  return y;
}

}  // namespace backward
}  // namespace gdn
