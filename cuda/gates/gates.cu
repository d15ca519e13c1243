// gdn_ready_gates and gdn_ready_gates_backward: the gates of the rule by themselves.
//
//   g = -exp(A_log) softplus(a + dt)      da = -exp(A_log) sigmoid(a + dt) dg      dA_log = sum of dg g      ddt = sum of da
//   beta = m sigmoid(b)                   db = dbeta m sigmoid(b) sigmoid(-b)
#include "../common/convert.cuh"
#include "../common/host.cuh"
#include "../common/launch.cuh"
#include "../common/math.cuh"
#include "../common/sum.h"

namespace gdn {
namespace gates {

constexpr int kHeads = 32, kRows = 8;    // of a block
constexpr int64_t kLeastTokens = 16, kMostTiles = 2048;    // tokens of a tile at least, tiles at most

// Tokens of a tile, which a block sums, and tiles. Both follow from the number of tokens alone.
struct Tiles {
  int64_t tokens, each, count;
};
inline Tiles tiles_of(const gdn_ready_gates_params &p) {
  const int64_t tokens = p.num_seqs * p.tokens_per_seq, share = ceil_div(tokens, kMostTiles);
  const int64_t each = share > kLeastTokens ? share : kLeastTokens;
  return {tokens, each, ceil_div(tokens, each)};
}

struct Token {
  int64_t n, t;
  __device__ __forceinline__ int64_t offset(const gdn_heads &x, int head) const {
    return n * x.seq_stride + t * x.token_stride + head * x.head_stride;
  }
};

// Runs fn(token) for the tokens of this thread in the block's tile.
template <typename F> __device__ __forceinline__ void each_token(const gdn_ready_gates_params &p, const Tiles &tiles, const F &fn) {
  const int64_t begin = blockIdx.x * tiles.each, end = min(begin + tiles.each, tiles.tokens);
  for (int64_t i = begin + threadIdx.y; i < end; i += kRows) {
    const int64_t n = p.num_seqs == 1 ? 0 : i / p.tokens_per_seq;
    fn(Token{n, i - n * p.tokens_per_seq});
  }
}

__global__ void __launch_bounds__(kHeads * kRows)
    gates_kernel(const __grid_constant__ gdn_ready_gates_params p, const __grid_constant__ Tiles tiles) {
  const int head = blockIdx.y * kHeads + threadIdx.x;
  if (head >= p.heads) return;
  const float rate = -expf(p.a_log[head]), dt_bias = p.dt_bias[head];
  float *log_decays = static_cast<float *>(const_cast<void *>(p.log_decay.ptr)), *betas = static_cast<float *>(const_cast<void *>(p.beta.ptr));
  each_token(p, tiles, [&](const Token &at) {
    log_decays[at.offset(p.log_decay, head)] = log_decay(load_any(p.a.ptr, at.offset(p.a, head), p.gate_dtype), dt_bias, rate);
    betas[at.offset(p.beta, head)] = p.beta_scale * sigmoid(load_any(p.b.ptr, at.offset(p.b, head), p.gate_dtype));
  });
}

// `partial`: [2, tiles, heads], what the tile adds to d_a_log and to d_dt_bias.
__global__ void __launch_bounds__(kHeads * kRows)
    gates_backward_kernel(const __grid_constant__ gdn_ready_gates_backward_params p, const __grid_constant__ Tiles tiles, float *partial) {
  __shared__ float parts[2][kRows][kHeads];
  const int head = blockIdx.y * kHeads + threadIdx.x;
  float d_a_log = 0.f, d_dt_bias = 0.f;
  if (head < p.gates.heads) {
    const float rate = -expf(p.gates.a_log[head]), dt_bias = p.gates.dt_bias[head];
    const float *d_log_decays = static_cast<const float *>(p.d_log_decay.ptr), *d_betas = static_cast<const float *>(p.d_beta.ptr);
    each_token(p.gates, tiles, [&](const Token &at) {
      const uint32_t raw_a = raw_load_any(p.gates.a.ptr, at.offset(p.gates.a, head), p.gates.gate_dtype);
      const uint32_t raw_b = raw_load_any(p.gates.b.ptr, at.offset(p.gates.b, head), p.gates.gate_dtype);
      const float dg = d_log_decays[at.offset(p.d_log_decay, head)], d_beta = d_betas[at.offset(p.d_beta, head)];
      const float a = raw_to_float(raw_a, p.gates.gate_dtype) + dt_bias, b = raw_to_float(raw_b, p.gates.gate_dtype);
      // A gate so large that nothing is left of the state has no gradient, though its decay or rate is infinite.
      const float da = dg != 0.f ? rate * sigmoid(a) * dg : 0.f, db = d_beta * (p.gates.beta_scale * sigmoid(b) * sigmoid(-b));
      store_any(p.d_a.ptr, at.offset(p.d_a, head), p.gates.gate_dtype, da);
      store_any(p.d_b.ptr, at.offset(p.d_b, head), p.gates.gate_dtype, db);
      if (dg != 0.f) d_a_log = fmaf(dg, rate * softplus(a), d_a_log);
      d_dt_bias += da;
    });
  }
  parts[0][threadIdx.y][threadIdx.x] = d_a_log, parts[1][threadIdx.y][threadIdx.x] = d_dt_bias;
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half)
      for (int i = 0; i < 2; ++i) parts[i][threadIdx.y][threadIdx.x] += parts[i][threadIdx.y + half][threadIdx.x];
  }
  if (threadIdx.y == 0 && head < p.gates.heads)
    for (int i = 0; i < 2; ++i) partial[(i * tiles.count + blockIdx.x) * p.gates.heads + head] = parts[i][0][threadIdx.x];
}

int check(const gdn_ready_gates_params &p) {
  if (!valid_dtype(p.gate_dtype)) return GDN_BAD_DTYPE;
  if (p.num_seqs < 0 || p.tokens_per_seq < 0 || p.heads < 0 || p.heads > kHeads * 65535) return GDN_BAD_LENGTH;
  for (const gdn_heads *x : {&p.a, &p.b, &p.log_decay, &p.beta})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  return GDN_OK;
}

int check(const gdn_ready_gates_backward_params &p) {
  if (const int status = check(p.gates)) return status;
  for (const gdn_heads *x : {&p.d_log_decay, &p.d_beta, &p.d_a, &p.d_b})
    if (!valid_strides(*x)) return GDN_BAD_STRIDE;
  return GDN_OK;
}

LaunchConfig grid(const gdn_ready_gates_params &p, const Tiles &tiles, cudaStream_t stream) {
  return {dim3(static_cast<unsigned>(tiles.count), static_cast<unsigned>(ceil_div(p.heads, kHeads))), dim3(kHeads, kRows), 0, stream};
}

int64_t workspace_of(const gdn_ready_gates_params &p) { return 2 * tiles_of(p).count * p.heads * static_cast<int64_t>(sizeof(float)); }

}  // namespace gates
}  // namespace gdn

extern "C" int gdn_ready_gates(const gdn_ready_gates_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_ready_gates_params &p = *params;
  if (const int status = gates::check(p)) return status;
  const gates::Tiles tiles = gates::tiles_of(p);
  if (tiles.tokens == 0 || p.heads == 0) return GDN_OK;
  if (!p.a.ptr || !p.b.ptr || !p.log_decay.ptr || !p.beta.ptr || !p.a_log || !p.dt_bias) return GDN_NULL_POINTER;
  return launch(gates::gates_kernel, gates::grid(p, tiles, stream), p, tiles);
}

extern "C" int gdn_ready_gates_backward_workspace(const gdn_ready_gates_backward_params *params, int64_t *bytes) {
  using namespace gdn;
  if (!params || !bytes) return GDN_NULL_POINTER;
  if (const int status = gates::check(*params)) return status;
  *bytes = gates::workspace_of(params->gates);
  return GDN_OK;
}

extern "C" int gdn_ready_gates_backward(const gdn_ready_gates_backward_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_ready_gates_backward_params &p = *params;
  if (const int status = gates::check(p)) return status;
  const gates::Tiles tiles = gates::tiles_of(p.gates);
  if (p.gates.heads == 0) return GDN_OK;
  if (!p.d_a_log || !p.d_dt_bias) return GDN_NULL_POINTER;
  float *partial = static_cast<float *>(p.workspace);
  if (tiles.tokens > 0) {
    for (const gdn_heads *x : {&p.gates.a, &p.gates.b, &p.d_log_decay, &p.d_beta, &p.d_a, &p.d_b})
      if (!x->ptr) return GDN_NULL_POINTER;
    if (!p.gates.a_log || !p.gates.dt_bias) return GDN_NULL_POINTER;
    if (const int status = check_workspace(p.workspace, p.workspace_bytes, gates::workspace_of(p.gates))) return status;
    if (const int status = launch(gates::gates_backward_kernel, gates::grid(p.gates, tiles, stream), p, tiles, partial)) return status;
  }
  if (const int status = sum_rows(partial, tiles.count, p.gates.heads, p.d_a_log, stream)) return status;
  return sum_rows(partial + tiles.count * p.gates.heads, tiles.count, p.gates.heads, p.d_dt_bias, stream);
}
