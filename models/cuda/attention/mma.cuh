// bf16 and f16: both products on tensor cores (mma.sync), softmax and sums in f32.
//
// Each of the four warps computes the scores of a quarter of a tile's keys, for all rows of the block. Then each computes all
// weights from the scores, which costs less than another exchange, and adds the values of a quarter of the columns.
#pragma once

#include "output.cuh"
#include "ring.cuh"
#include "../common.cuh"

namespace gdn {
namespace attention {

// Heads of up to DIM, 16 * MT rows a block.
template <typename T, int DIM, int MT, int SLOTS, bool WINDOW> struct Mma {
  using R = Ring<T, DIM, SLOTS, WINDOW>;
  static constexpr int kRows = 16 * MT, kKeys = R::kKeys;
  static constexpr int kRowBytes = DIM * 2, kStride = kKeys + 8;    // of a row of scores, in floats: no bank conflicts
  static constexpr int kQ = R::kBytes, kScores = kQ + kRows * kRowBytes;
  static constexpr int kBytes = kScores + kRows * kStride * static_cast<int>(sizeof(float));
};

// The address of the piece `pieces` after that of `address` in a row of a tile; the two numbers share no bit. NOTES: a constant
// flip of bits and an offset. With (piece ^ row % 8) written out the compiler keeps an address for every step in registers, and
// spills.
__device__ __forceinline__ uint32_t later_piece(uint32_t address, int pieces) {
  return (address ^ (pieces % 8 * 16)) + pieces / 8 * 128;
}

// One function: its steps share the registers of queries, sums and scores.
template <typename T, int DIM, int MT, int SLOTS, bool WINDOW>
__global__ void __launch_bounds__(kThreads, 2)
    mma_kernel(const __grid_constant__ gdn_attention_params p, const __grid_constant__ Plan plan) {
  using M = Mma<T, DIM, MT, SLOTS, WINDOW>;
  using R = typename M::R;
  constexpr int kSteps = DIM / 16;             // of the product of queries and keys
  constexpr int kTiles = M::kKeys / 8 / kWarps;    // of eight keys a warp
  constexpr int kKeySteps = M::kKeys / 16;     // of the product of weights and values
  constexpr int kColumns = DIM / 8 / kWarps;   // eights of columns a warp
  constexpr bool kKeep = MT == 1;              // queries in registers
  constexpr int kTogether = MT == 1 || kKeySteps == 8 ? 1 : 2;    // sixteens of rows with weights in registers at once
  // Sums of every kChains-th step apart: products that add to the same registers wait for each other.
  constexpr int kChains = MT * kTiles >= 4 ? 1 : 4 / (MT * kTiles);
  extern __shared__ __align__(128) uint8_t smem[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;

  // Find the block's rows and keys, and start its first tiles.
  Block b(p, plan, std::bool_constant<WINDOW>());
  if (b.rows == 0) {
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    return;
  }
  R ring(smem, p, b);
  ring.start(b.position);

  // Load the queries, in the layout of a tile of keys.
  const uint32_t base = ptx::shared_address(smem), queries = base + M::kQ;
  constexpr int kLoads = M::kRows * R::kPieces / kThreads, kRowStep = kThreads / R::kPieces;
  {
    const int piece = threadIdx.x % R::kPieces, row = threadIdx.x / R::kPieces;
    uint4 x[kLoads];
    // All loads before the first use.
#pragma unroll
    for (int c = 0; c < kLoads; ++c) {
      const int r = row + c * kRowStep;
      x[c] = make_uint4(0, 0, 0, 0);
      if (b.first_row + r < b.rows && piece * 8 < p.head_dim && b.keys > 0)
        x[c] = ptx::load_after_wait(heads_at<T>(p.q, b.n, b.tokens.first + b.token(plan, r), b.head(plan, r)) + piece * 8);
    }
#pragma unroll
    for (int c = 0; c < kLoads; ++c) {
      const int r = row + c * kRowStep;
      *reinterpret_cast<uint4 *>(smem + M::kQ + r * M::kRowBytes + (piece ^ r % 8) * 16) = x[c];
    }
  }
  // The first piece of this lane's rows in tiles of queries, keys and values.
  const uint32_t lane_query = queries + lane % 16 * M::kRowBytes + (lane / 16 ^ lane % 8) * 16;
  const uint32_t lane_key = (warp * kTiles * 8 + lane % 8) * M::kRowBytes + (lane / 8 ^ lane % 8) * 16;
  const uint32_t lane_value = later_piece(lane % 16 * M::kRowBytes + lane % 8 * 16, warp * kColumns + lane / 16);
  const auto load_query = [&](uint32_t(&a)[4], int mt, int step) {
    ptx::load_matrices(a, later_piece(lane_query, 2 * step) + mt * 16 * M::kRowBytes);
  };
  uint32_t kept[kKeep ? kSteps : 1][4];
  if constexpr (kKeep) {
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) load_query(kept[s], 0, s);
  }

  // Running maximum and sums of this lane's rows.
  int seen[MT][2];    // keys that the rows see
  float largest[MT][2], total[MT][2], acc[MT][kColumns][4];
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      seen[mt][h] = b.seen(plan, mt * 16 + h * 8 + lane / 4);
      largest[mt][h] = -INFINITY;
      total[mt][h] = 0.f;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[mt][c][i] = 0.f;
  }

  float *const scores = reinterpret_cast<float *>(smem + M::kScores);
  for (int tile = b.first_tile; tile < b.end_tile; ++tile) {
    const int pass = 2 * (tile - b.first_tile);

    // Scores of the warp's keys, to shared memory.
    const uint32_t keys = base + ring.next(pass) + lane_key;
    {
      float sum[kChains][MT][kTiles][4] = {};
#pragma unroll
      for (int two = 0; two < kSteps / 2; ++two) {
        uint32_t key[kTiles][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) ptx::load_matrices(key[t], later_piece(keys, 4 * two) + t * 8 * M::kRowBytes);
#pragma unroll
        for (int s = 2 * two; s < 2 * two + 2; ++s)
#pragma unroll
          for (int mt = 0; mt < MT; ++mt) {
            uint32_t q[4];
            if constexpr (kKeep) {
#pragma unroll
              for (int i = 0; i < 4; ++i) q[i] = kept[s][i];
            } else {
              load_query(q, mt, s);
            }
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
              ptx::mma16816<T>(sum[s % kChains][mt][t], q[0], q[1], q[2], q[3], key[t][s % 2 * 2],
                               key[t][s % 2 * 2 + 1]);
          }
      }
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i] = sum[0][mt][t][i];
#pragma unroll
            for (int c = 1; c < kChains; ++c) x[i] += sum[c][mt][t][i];
          }
          float *row = scores + (mt * 16 + lane / 4) * M::kStride + (warp * kTiles + t) * 8 + 2 * quad;
          *reinterpret_cast<float2 *>(row) = make_float2(x[0], x[1]);
          *reinterpret_cast<float2 *>(row + 8 * M::kStride) = make_float2(x[2], x[3]);
        }
    }

    // Weights from the scores, and their products with the values of the warp's columns.
    const uint32_t values = base + ring.next(pass + 1) + lane_value;
    const Tile keys_of_tile = Tile::of<WINDOW, M::kKeys>(p.cache, tile);
#pragma unroll
    for (int begin = 0; begin < MT; begin += kTogether) {
      uint32_t weight[kTogether][kKeySteps][4];
#pragma unroll
      for (int m = 0; m < kTogether; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int mt = begin + m;
          const float *row = scores + (mt * 16 + h * 8 + lane / 4) * M::kStride + 2 * quad;
          // Keys from this lane's first on.
          const int visible = b.seen_of<WINDOW>(keys_of_tile, seen[mt][h]) - 2 * quad;
          const int hidden = b.hidden_of<WINDOW>(p.cache, keys_of_tile, seen[mt][h]) - 2 * quad;
          const auto sees = [&](int key) { return key < visible && (!WINDOW || key >= hidden); };
          float x[kKeySteps][4];
          float most = largest[mt][h];
#pragma unroll
          for (int s = 0; s < kKeySteps; ++s) {
            const float2 near = *reinterpret_cast<const float2 *>(row + 16 * s);
            const float2 far = *reinterpret_cast<const float2 *>(row + 16 * s + 8);
            x[s][0] = sees(16 * s) ? near.x * plan.scale : -INFINITY;
            x[s][1] = sees(16 * s + 1) ? near.y * plan.scale : -INFINITY;
            x[s][2] = sees(16 * s + 8) ? far.x * plan.scale : -INFINITY;
            x[s][3] = sees(16 * s + 9) ? far.y * plan.scale : -INFINITY;
#pragma unroll
            for (int i = 0; i < 4; ++i) most = fmaxf(most, x[s][i]);
          }
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
          most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
          const float zero = finite_or_zero(most), keep = power_of_two(largest[mt][h] - zero);
          largest[mt][h] = most;
          float added = 0.f;
#pragma unroll
          for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              x[s][i] = power_of_two(x[s][i] - zero);
              added += x[s][i];
            }
            weight[m][s][h] = pack2<T>(x[s][0], x[s][1]);
            weight[m][s][2 + h] = pack2<T>(x[s][2], x[s][3]);
          }
          total[mt][h] = fmaf(total[mt][h], keep, added);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            acc[mt][c][2 * h] *= keep;
            acc[mt][c][2 * h + 1] *= keep;
          }
        }
      // Add the weighted values.
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s)
#pragma unroll
        for (int c = 0; c < kColumns; c += 2) {
          uint32_t value[4];
          ptx::load_matrices_trans(value, later_piece(values, c) + 16 * s * M::kRowBytes);
#pragma unroll
          for (int m = 0; m < kTogether; ++m) {
            const uint32_t(&w)[4] = weight[m][s];
            ptx::mma16816<T>(acc[begin + m][c], w[0], w[1], w[2], w[3], value[0], value[1]);
            ptx::mma16816<T>(acc[begin + m][c + 1], w[0], w[1], w[2], w[3], value[2], value[3]);
          }
        }
    }
  }

  // Store the rows, gated, or their partial sums.
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = mt * 16 + h * 8 + lane / 4;
      const float sum = group_sum<4>(total[mt][h]);
      if (b.first_row + row >= b.rows) continue;
      const Output<T> out(p, plan, b, row, sum);
      if (plan.splits > 1 && warp == 0 && quad == 0) store_sums(p, plan, b, row, largest[mt][h], sum);
      const int column = warp * kColumns * 8 + 2 * quad;
      float gate[kColumns][2] = {};
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (column + 8 * c < p.head_dim) out.load_gate(column + 8 * c, gate[c]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const float x[2] = {acc[mt][c][2 * h], acc[mt][c][2 * h + 1]};
        if (column + 8 * c < p.head_dim) out.store(column + 8 * c, x, gate[c]);
      }
    }
}

}  // namespace attention
}  // namespace gdn
