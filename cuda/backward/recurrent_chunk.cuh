// The gradients that sum over value rows, chunk by chunk: dq, dk, dbeta and the gradient of the log decay.
//
// From the two walks: S0 before the chunk, dS1 after it, and of every token d = beta y and dv = beta dd. With c the running sum of g in
// the chunk, e_i = exp(c_i), h_i = exp(c_C - c_i), D_ij = exp(c_i - c_j), tril up to the diagonal and stril below it:
//
//   W = tril((do d^T) o D)      X = stril((dv d^T) o D)
//   dq = e o (do S0) + W k      dk = h o (d dS1) + W^T q - X^T k - e o (dv S0) - X k      dbeta_t = dd_t . y_t
//   r1_i = e_i (q_i . (do S0)_i - k_i . (dv S0)_i)      r2_j = h_j k_j . (d dS1)_j      Z = stril(W o q k^T - X o k k^T)
//   dg_t = sum_(i >= t) r1_i + sum_(i >= t > j) Z_ij + sum_(j < t) r2_j + exp(c_C) <dS1, S0>
//
// The last line has no difference of large numbers, so that strong decays cost nothing. A block owns a chunk of a key head and adds its
// value heads in order; then dq and dk go through the norm.
#pragma once

#include "recurrent_walk.cuh"

namespace gdn {
namespace backward {

constexpr int kChunkThreads = 256, kDepth = 16;    // threads, 16 by 16 over tokens and columns; how far products go at a time
constexpr double kLeastSum = -200.;                // of the log decay: exp is zero there, and sums stay finite

// C tokens, KK columns at most.
template <int C, int KK> struct ChunkShared {
  float a[2][kDepth][C + 4], b[kDepth][KK > C ? KK : C];
  float w[C][C + 1], x[C][C + 1], qk[C][C + 1], kk[C][C + 1];
  double sum[C];    // c: in f64, since f32 would lose the difference of neighbours after a strong decay
  float4 factor[C];
  float beta[C], before[C], after[C], r1[C], r2[C];
  float total[kChunkThreads / 32];
};

// y[i] += a_i b over `depth` for one or two a that share b; a_i(row, k), b(k, column). Rows are ty R + r, columns tx 4 + 64 j + e.
template <int COUNT, int R, int N, int C, int COLUMNS, typename Shared, typename A, typename B>
__device__ __forceinline__ void multiply(float (&y)[COUNT][R][N], Shared &s, int depth, const A &a, const B &b) {
  const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  for (int k0 = 0; k0 < depth; k0 += kDepth) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < R; ++i)
#pragma unroll
      for (int m = 0; m < COUNT; ++m) s.a[m][tx][ty + 16 * i] = k0 + tx < depth ? a(m, ty + 16 * i, k0 + tx) : 0.f;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
      const int at = threadIdx.x + kChunkThreads * i, k = at / COLUMNS;
      s.b[k][at % COLUMNS] = k0 + k < depth ? b(k0 + k, at % COLUMNS) : 0.f;
    }
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < kDepth; ++k) {
      float columns[N];
#pragma unroll
      for (int j = 0; j < N / 4; ++j)
        *reinterpret_cast<float4 *>(&columns[4 * j]) = *reinterpret_cast<const float4 *>(&s.b[k][4 * tx + 64 * j]);
#pragma unroll
      for (int m = 0; m < COUNT; ++m)
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const float x = s.a[m][k][ty * R + r];
#pragma unroll
          for (int j = 0; j < N; ++j) y[m][r][j] = fmaf(x, columns[j], y[m][r][j]);
        }
    }
  }
}

// The sum over the 16 threads of a row.
__device__ __forceinline__ float row_sum(float x) { return group_sum<16>(x); }

// The chunk and key head of a block.
template <typename T, int C, int KK> struct ChunkBlock {
  static constexpr int kR = C / 16, kN = KK / 16, kNarrow = C / 16 < 4 ? 4 : C / 16;    // of a product with C columns: at least 4
  using Shared = ChunkShared<C, KK>;
  const gdn_rule_backward_params &p;
  const gdn_common &c;
  const Plan &plan;
  Shared &s;
  Span span;
  int n, key_head, begin, count;    // tokens of the sequence from `begin` on
  int64_t chunk;                    // in the workspace

  __device__ __forceinline__ ChunkBlock(const gdn_rule_backward_params &params, const Plan &made, Shared &shared)
      : p(params), c(params.common), plan(made), s(shared) {
    key_head = static_cast<int>(blockIdx.x % c.num_k_heads), chunk = blockIdx.x / c.num_k_heads;
    n = 0;
    if (plan.by_rows) {    // the last sequence whose chunks begin at or before it
      for (int high = c.seqs.num_seqs; high - n > 1;) {
        const int middle = (n + high) / 2;
        (c.seqs.cu_seqlens[middle] / C + middle <= chunk ? n : high) = middle;
      }
    } else {
      n = static_cast<int>(chunk / ((plan.section_tokens + C - 1) / C));
    }
    span = span_of(c.seqs, plan, n, false);
    begin = static_cast<int>(min(span.begin + (chunk - span.chunk) * C, static_cast<int64_t>(span.end)));
    count = min(C, span.end - begin);
  }

  // Elements of the chunk; zero past its end and past the columns.
  __device__ __forceinline__ float input(const gdn_heads &x, int head, int size, int row, int col) const {
    if (row >= count || col >= size) return 0.f;
    return to_float(heads_at<T>(x, n, span.seq.first + begin + row, head)[col], c.io_dtype);
  }
  __device__ __forceinline__ float query(int row, int col) const { return input(p.q, key_head, c.head_k, row, col) * (s.factor[row].z * c.scale); }
  __device__ __forceinline__ float key(int row, int col) const {
    return Factor{s.factor[row].x, s.factor[row].y}.times(input(p.k, key_head, c.head_k, row, col));
  }
  __device__ __forceinline__ float walked(const float *values, int head, int row, int col) const {
    if (row >= count || col >= c.head_v) return 0.f;
    return values[((span.row + begin - span.begin + row) * c.num_v_heads + head) * c.head_v + col];
  }
  __device__ __forceinline__ float update(int head, int row, int col) const { return s.beta[row] * walked(plan.values, head, row, col); }
  __device__ __forceinline__ float d_value(int head, int row, int col) const { return s.beta[row] * walked(plan.d_values, head, row, col); }
  __device__ __forceinline__ const float *state(const float *states, int head) const {
    return states + (chunk * c.num_v_heads + head) * c.head_v * c.head_k;
  }

  // Products of q and k with k, which all value heads share.
  __device__ __forceinline__ void multiply_keys() {
    for (int i = threadIdx.x; i < C; i += kChunkThreads)
      s.factor[i] = i < count ? plan.factors[(span.factor + begin + i) * c.num_k_heads + key_head] : make_float4(0.f, 0.f, 0.f, 0.f);
    __syncthreads();
    float y[2][kR][kNarrow] = {};
    multiply<2, kR, kNarrow, C, 16 * kNarrow>(y, s, c.head_k, [&](int m, int row, int k) { return m ? key(row, k) : query(row, k); },
                                              [&](int k, int col) { return col < C ? key(col, k) : 0.f; });
    each_narrow([&](int r, int j, int row, int col) { s.qk[row][col] = y[0][r][j], s.kk[row][col] = y[1][r][j]; });
  }

  // Runs fn(r, j, row, column) for this thread's elements of a product with C columns.
  template <typename F> __device__ __forceinline__ void each_narrow(const F &fn) const {
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int r = 0; r < kR; ++r)
#pragma unroll
      for (int j = 0; j < kNarrow; ++j) {
        const int col = 4 * tx + 64 * (j / 4) + j % 4;
        if (col < C) fn(r, j, ty * kR + r, col);
      }
  }
  // The same with KK columns.
  template <typename F> __device__ __forceinline__ void each(const F &fn) const {
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int r = 0; r < kR; ++r) {
#pragma unroll
      for (int j = 0; j < kN; ++j) fn(r, j, ty * kR + r, 4 * tx + 64 * (j / 4) + j % 4);
      asm volatile("" ::: "memory");    // a row's loads in flight at a time, for which there are registers
    }
  }

  // The gates of a value head.
  __device__ __forceinline__ void load_gates(int head) {
    __syncthreads();    // the head before is done
    const int i = threadIdx.x;
    if (i < C) {
      const float g = i < count ? *heads_at<float>(c.a, n, span.seq.first + begin + i, head) : 0.f;
      s.beta[i] = i < count ? *heads_at<float>(c.b, n, span.seq.first + begin + i, head) : 0.f;
      s.sum[i] = g < kLeastSum ? kLeastSum : static_cast<double>(g);    // fmax would hide a NaN
    }
    __syncthreads();
    if (i == 0)
      for (int t = 1; t < C; ++t) s.sum[t] += s.sum[t - 1];
    __syncthreads();
    if (i < C) s.before[i] = expf(static_cast<float>(s.sum[i])), s.after[i] = expf(static_cast<float>(s.sum[C - 1] - s.sum[i]));
  }

  // W and X.
  __device__ __forceinline__ void multiply_values(int head) {
    float y[2][kR][kNarrow] = {};
    multiply<2, kR, kNarrow, C, 16 * kNarrow>(
        y, s, c.head_v, [&](int m, int row, int v) { return m ? d_value(head, row, v) : input(p.d_o, head, c.head_v, row, v); },
        [&](int v, int col) { return col < C ? update(head, col, v) : 0.f; });
    each_narrow([&](int r, int j, int row, int col) {
      const float decay = col <= row ? expf(static_cast<float>(s.sum[row] - s.sum[col])) : 0.f;
      s.w[row][col] = col <= row ? y[0][r][j] * decay : 0.f, s.x[row][col] = col < row ? y[1][r][j] * decay : 0.f;
    });
  }

  // dbeta of a value head, and exp(c_C) <dS1, S0> in parts.
  __device__ __forceinline__ void differentiate_beta(int head) {
    const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
    for (int r = 0; r < kR; ++r) {
      const int row = ty * kR + r;
      float sum = 0.f;
      for (int v = tx; v < c.head_v; v += 16) sum = fmaf(walked(plan.values, head, row, v), walked(plan.d_values, head, row, v), sum);
      sum = row_sum(sum);
      if (tx == 0 && row < count) *out_heads_at<float>(p.d_beta, n, span.seq.first + begin + row, head) = sum;
    }
    const float *x = state(plan.states, head), *y = state(plan.d_states, head);
    float sum = 0.f;
    for (int i = threadIdx.x; i < c.head_v * c.head_k; i += kChunkThreads) sum = fmaf(x[i], y[i], sum);
    sum = group_sum(sum);
    if (threadIdx.x % 32 == 0) s.total[threadIdx.x / 32] = sum * s.before[C - 1];
  }

  // The gradient of the log decay, after all that it sums. Z's rows take the place of W's.
  __device__ __forceinline__ void differentiate_decay(int head) {
    const int t = threadIdx.x;
    __syncthreads();
    if (t < C) {    // row t: its sums before each column
      float sum = 0.f;
      for (int j = 0; j <= t; ++j) {
        const float z = s.w[t][j] * s.qk[t][j] - s.x[t][j] * s.kk[t][j];
        s.w[t][j] = sum;
        sum += z;
      }
    }
    __syncthreads();
    if (t >= count) return;
    float far = 0.f, near = 0.f, past = 0.f, future = 0.f;
    for (int i = 0; i < kChunkThreads / 32; ++i) far += s.total[i];
    for (int i = C - 1; i >= t; --i) near += s.w[i][t], past += s.r1[i];
    for (int j = 0; j < t; ++j) future += s.r2[j];
    *out_heads_at<float>(p.d_log_decay, n, span.seq.first + begin + t, head) = (near + past) + (future + far);
  }

  // d += sign f o (a S) for a state S of the head; `dot` += its rows times those of x.
  template <typename A, typename X>
  __device__ __forceinline__ void add_product(float (&d)[1][kR][kN], float (&dot)[kR], const float *state, const float *f, float sign, const A &a,
                                              const X &x) {
    float y[1][kR][kN] = {};
    multiply<1, kR, kN, C, KK>(y, s, c.head_v, a, [&](int v, int col) { return col < c.head_k ? state[v * c.head_k + col] : 0.f; });
    each([&](int r, int j, int row, int col) {
      const float value = sign * f[row] * y[0][r][j];
      dot[r] = fmaf(value, x(row, col), dot[r]);
      d[0][r][j] += value;
    });
  }
  __device__ __forceinline__ void store_dots(float *to, const float (&dot)[kR]) const {
#pragma unroll
    for (int r = 0; r < kR; ++r) {
      const float sum = row_sum(dot[r]);
      if (threadIdx.x % 16 == 0) to[threadIdx.x / 16 * kR + r] = sum;
    }
  }

  // What a value head adds to dq and dk.
  __device__ __forceinline__ void differentiate_head(int head, float (&dq)[1][kR][kN], float (&dk)[1][kR][kN]) {
    const float *before = state(plan.states, head), *after = state(plan.d_states, head);
    const auto of_query = [&](int row, int col) { return query(row, col); };
    const auto of_key = [&](int row, int col) { return key(row, col); };
    float r1[kR] = {}, r2[kR] = {};
    add_product(dq, r1, before, s.before, 1.f, [&](int, int row, int v) { return input(p.d_o, head, c.head_v, row, v); }, of_query);
    add_product(dk, r1, before, s.before, -1.f, [&](int, int row, int v) { return d_value(head, row, v); }, of_key);
    add_product(dk, r2, after, s.after, 1.f, [&](int, int row, int v) { return update(head, row, v); }, of_key);
    store_dots(s.r1, r1);
    store_dots(s.r2, r2);
    multiply<1, kR, kN, C, KK>(dq, s, C, [&](int, int row, int j) { return s.w[row][j]; }, [&](int j, int col) { return key(j, col); });
    multiply<1, kR, kN, C, KK>(dk, s, C, [&](int, int row, int i) { return s.w[i][row]; }, [&](int i, int col) { return query(i, col); });
    multiply<1, kR, kN, C, KK>(dk, s, C, [&](int, int row, int i) { return -s.x[i][row] - s.x[row][i]; }, [&](int i, int col) { return key(i, col); });
  }

  // Through the norm, x^ = r x: dx = r (dx^ - x^ (x^ . dx^)). `d` is the gradient of what q or k is multiplied to.
  __device__ __forceinline__ void store(const gdn_heads &to, const gdn_heads &from, float (&d)[1][kR][kN], bool queries) const {
    float dot[kR] = {};
    const auto unit = [&](int row, int col) { return queries ? input(from, key_head, c.head_k, row, col) * s.factor[row].z : key(row, col); };
    if (c.l2norm) {
      each([&](int r, int j, int row, int col) { dot[r] = fmaf(unit(row, col), d[0][r][j], dot[r]); });
#pragma unroll
      for (int r = 0; r < kR; ++r) dot[r] = row_sum(dot[r]);
    }
    each([&](int r, int j, int row, int col) {
      if (row >= count || col >= c.head_k) return;
      const float norm = queries ? s.factor[row].z * c.scale : s.factor[row].x;
      const float along = c.l2norm ? unit(row, col) * dot[r] : 0.f;
      out_heads_at<T>(to, n, span.seq.first + begin + row, key_head)[col] = from_float<T>(norm * (d[0][r][j] - along), c.io_dtype);
    });
  }
};

template <typename T, int C, int KK>
__global__ void __launch_bounds__(kChunkThreads) chunk_gradients_kernel(const __grid_constant__ gdn_rule_backward_params p,
                                                                        const __grid_constant__ Plan plan) {
  using Block = ChunkBlock<T, C, KK>;
  extern __shared__ __align__(16) uint8_t raw_shared[];
  Block block(p, plan, *reinterpret_cast<typename Block::Shared *>(raw_shared));
  if (block.count <= 0) return;
  block.multiply_keys();
  float dq[1][Block::kR][Block::kN] = {}, dk[1][Block::kR][Block::kN] = {};
  const int each = p.common.num_v_heads / p.common.num_k_heads;
  for (int head = block.key_head * each; head < (block.key_head + 1) * each; ++head) {
    block.load_gates(head);
    block.multiply_values(head);
    block.differentiate_beta(head);
    block.differentiate_head(head, dq, dk);
    block.differentiate_decay(head);
  }
  block.store(p.d_q, p.q, dq, true);
  block.store(p.d_k, p.k, dk, false);
}

template <typename T, int C, int KK> int launch_chunks_as(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream) {
  const int64_t blocks = plan.chunks * p.common.num_k_heads;
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  static_assert(sizeof(ChunkShared<C, KK>) <= kLeastShared, "a shape for every card");
  return launch_allowed<chunk_gradients_kernel<T, C, KK>>(
      {dim3(static_cast<unsigned>(blocks)), dim3(kChunkThreads), static_cast<int64_t>(sizeof(ChunkShared<C, KK>)), stream}, optin, p, plan);
}

template <typename T> int launch_chunks(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream) {
  if (p.common.head_k >= kWideKeys) return launch_chunks_as<T, 32, 256>(p, plan, stream);
  return p.common.head_k <= 64 ? launch_chunks_as<T, 64, 64>(p, plan, stream) : launch_chunks_as<T, 64, 128>(p, plan, stream);
}

template <typename T> int launch_factors(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream) {
  const int64_t blocks = ceil_div(plan.tokens * p.common.num_k_heads, 8);
  if (blocks > kMaxBlocks) return GDN_BAD_LENGTH;
  return launch(factors_kernel<T>, {dim3(static_cast<unsigned>(blocks)), dim3(256), 0, stream}, p, plan);
}

template <typename T> int launch_borders(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream) {
  return launch_walk<T, kBorders>(p, plan, stream);
}

template <typename T> int launch_section(const gdn_rule_backward_params &p, const Plan &plan, cudaStream_t stream) {
  if (plan.tokens > 0)
    if (const int status = launch_walk<T, kForward>(p, plan, stream)) return status;
  if (const int status = launch_walk<T, kBackward>(p, plan, stream)) return status;
  return plan.tokens > 0 ? launch_chunks<T>(p, plan, stream) : GDN_OK;
}

}  // namespace backward
}  // namespace gdn
