// The common layouts of both kernels of the chunk form: tiles in shared memory, and the workspace.
#pragma once

#include "../common/convert.cuh"
#include "../common/ptx.cuh"
#include "../common/sequences.cuh"

namespace gdn {
namespace chunk {

constexpr int kChunk = GDN_CHUNK;
// Of a state that a segment does not begin with at most this is left where it counts, as log2: a rounding of f32.
constexpr float kLeft = -24.f;
constexpr int kPiece = 8;                        // elements in 16 bytes
constexpr int kTileBytes = kChunk * 64 * 2;      // 64 rows of 64 elements
constexpr int kImageBytes = kTileBytes;          // a 64 x 64 matrix of 16-bit elements

// ---- tiles: 64 rows of 64 elements, swizzled as wgmma has it (../common/wgmma.cuh), wider ones side by side ----

// Bytes from the tile's begin to 16-byte piece `piece` of `row`.
__device__ __forceinline__ uint32_t tile_offset(int row, int piece) {
  return static_cast<uint32_t>((piece / 8) * kTileBytes + row * 128 + ((piece % 8) ^ (row % 8)) * 16);
}

// The same for rows that depend on the lane and pieces that do not, so that one register a lane and constants remain:
// `lanes` is tile_offset() of a row below 16 and a piece 0 or 1, and the address that of 16 `rows` further and 2 `pieces`.
__device__ __forceinline__ uint32_t tile_at(uint32_t tile, uint32_t lanes, int rows, int pieces) {
  return tile + (lanes ^ static_cast<uint32_t>(pieces % 4 * 32)) + static_cast<uint32_t>(rows * 2048 + pieces / 4 * kTileBytes);
}

// Lanes of four matrices: rows 0 .. 7 of two pieces, then rows 8 .. 15 of them; or rows 0 .. 15 of one piece, then of the next.
__device__ __forceinline__ uint32_t lanes_by_piece(int lane) { return tile_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2); }
__device__ __forceinline__ uint32_t lanes_by_row(int lane) { return tile_offset(lane % 16, lane / 16); }

// Copies `count` rows of `size` elements into a tile PIECES pieces wide, by THREADS threads; elements past either are zero.
template <typename T, int PIECES, int THREADS>
__device__ __forceinline__ void copy_tile(uint32_t tile, const T *rows, int64_t stride, int count, int size, int thread) {
  constexpr int kRows = THREADS / PIECES;    // at once
  static_assert(THREADS % PIECES == 0 && kChunk % kRows == 0, "whole rows");
  const int piece = thread % PIECES, row = thread / PIECES;
  const bool inside = piece * kPiece < size;
  const T *from = rows + row * stride + (inside ? piece * kPiece : 0);
  const int64_t step = kRows * stride;
#pragma unroll
  for (int i = 0; i < kChunk / kRows; ++i) {
    const int r = row + i * kRows;
    const bool there = inside && r < count;
    ptx::copy_async_or_zero(tile + tile_offset(r, piece), there ? from : rows, there ? 16 : 0);
    from += step;
  }
}

// Copies an image.
template <int BYTES, int THREADS> __device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, int thread) {
  static_assert(BYTES % 16 == 0, "pieces of 16 bytes");
#pragma unroll
  for (int i = 0; i < (BYTES / 16 + THREADS - 1) / THREADS; ++i) {
    const int at = thread + i * THREADS;
    if ((i + 1) * THREADS * 16 <= BYTES || at * 16 < BYTES)
      ptx::copy_async(to + at * 16, static_cast<const uint8_t *>(from) + at * 16);
  }
}

// ---- two elements in a word ----

template <typename T> __device__ __forceinline__ uint32_t pack2(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&v);
  }
}

// Packed where it stands, so that two registers become one there.
template <typename T> __device__ __forceinline__ uint32_t pack2_here(float a, float b) {
  uint32_t y;
  if constexpr (std::is_same_v<T, __half>) asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  else asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
  return y;
}

// The same of what has no bound, the state and what is made of it: the largest number of f16 where it is larger. What it is multiplied
// with may be zero, and inf 0 would be NaN, in the state for ever.
template <typename T, bool HERE = false> __device__ __forceinline__ uint32_t pack2_finite(float a, float b) {
  if constexpr (std::is_same_v<T, __half>) {
    uint32_t y;
    asm volatile("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
  } else {
    return HERE ? pack2_here<T>(a, b) : pack2<T>(a, b);
  }
}

template <typename T> __device__ __forceinline__ float2 unpack2(uint32_t v) {
  if constexpr (std::is_same_v<T, __half>) return __half22float2(*reinterpret_cast<const __half2 *>(&v));
  else return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

// ---- the workspace: a record for every (chunk, value head) ----

// Factors of the tokens of a chunk, c being the running sum of the log decay. A lane of a scan has columns 2 (lane % 4) and the
// next of every eight tokens: they lie side by side, so that it reads those of two tiles at once.
// Where a lane's column / 2 = c falls on the banks of c - 2, two groups of four change places.
__device__ __forceinline__ int factor_at(int token) {
  const int c = token % 8 / 2;
  return c * 16 + (token / 16 ^ c / 2) * 4 + token / 8 % 2 * 2 + token % 2;
}
struct Factors {
  float read[kChunk];     // e^c / |k|: of what the state before the chunk gives for raw k
  float out[kChunk];      // e^c scale / |q|: of what it gives for raw q
  float write[kChunk];    // e^(c of the last - c) beta / |k|: of the raw k that is added to the state
  float decay;              // e^(c of the last)
  float unused[3];
};

// Matrices are images of tiles, a row for a token i, a column for a token j <= i; zero above the diagonal.
struct Record {
  uint8_t inverse[kImageBytes];      // (I + L)^-1, L_ij = beta_j (k_i k_j) e^(c_i - c_j) below the diagonal
  uint8_t attention[kImageBytes];    // scale beta_j (q_i k_j) e^(c_i - c_j) up to it
  Factors factors;
};
static_assert(sizeof(Record) % 16 == 0, "copied in pieces of 16 bytes");

// Records of sequence n begin at that of its chunk `first_chunk(n)`. Where sequences are packed each may leave one record
// unused, so that no sum over the sequences before is needed: ceil(len / 64) <= floor(end / 64) - floor(begin / 64) + 1.
__device__ __forceinline__ int64_t first_chunk(const gdn_sequences &s, int n) {
  if (s.cu_seqlens == nullptr) return static_cast<int64_t>(n) * ((s.tokens_per_seq + kChunk - 1) / kChunk);
  return static_cast<int64_t>(s.cu_seqlens[n] / kChunk) + n;
}

// The sequence whose records hold `chunk`, by all lanes of a warp: the last one that begins at or before it.
__device__ __forceinline__ int sequence_of_chunk(const gdn_sequences &s, int64_t chunk) {
  if (s.cu_seqlens == nullptr) return static_cast<int>(chunk / ((s.tokens_per_seq + kChunk - 1) / kChunk));
  const int lane = threadIdx.x % 32;
  int low = 0, high = s.num_seqs;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, candidate = low + lane * step;
    const bool begins = candidate < high && first_chunk(s, candidate) <= chunk;
    low += (__popc(__ballot_sync(0xffffffffu, begins)) - 1) * step;
    high = min(high, low + step);
  }
  return low;
}

}  // namespace chunk
}  // namespace gdn
