// gdn_moe: checks, and where things lie in the workspace.
#include "common/convert.cuh"
#include "common/host.cuh"
#include "../quantized/layout.cuh"
#include "args.h"

namespace gdn {
namespace moe {
namespace {

constexpr int64_t kAlign = 256;

// For more tokens 16-bit weights go by tiles: where many tokens choose the same experts, groups of kGroup rows would read these several
// times. Bytes would cost more there, to be made numbers of.
constexpr int kFewIn16Bits = 48;

bool may_be_few(const gdn_moe_params &p) {
  const int most = p.gate_up_scales.ptr ? GDN_MOE_FEW_TOKENS : kFewIn16Bits;
  return p.algo == GDN_MOE_FEW || (p.algo == GDN_MOE_AUTO && p.tokens <= most);
}

// The device may have too little shared memory for the sums of so many tokens: then GDN_MOE_AUTO takes the way of many.
int choose_algo(const gdn_moe_params &p, bool *few) {
  *few = may_be_few(p);
  if (!*few || p.quantized) return GDN_OK;
  int optin = 0;
  if (const int status = shared_limit(&optin)) return status;
  *few = down_shared_bytes(p.tokens, p.top_k + (p.shared_inner > 0)) <= optin;
  return *few || p.algo == GDN_MOE_AUTO ? GDN_OK : GDN_BAD_ALGO;
}

int check_sizes(const gdn_moe_params &p) {
  if (p.io_dtype != GDN_BF16 && p.io_dtype != GDN_F16) return GDN_BAD_DTYPE;
  if (p.tokens < 0 || p.hidden < 1 || p.num_experts < 1 || p.num_experts > GDN_MOE_EXPERTS || p.top_k < 1 ||
      p.top_k > GDN_MOE_TOP_K || p.top_k > p.num_experts || p.inner < 1 || p.shared_inner < 0 ||
      p.router_parts < 1 || p.router_parts > 3)
    return GDN_BAD_LENGTH;
  // Rows, and the bytes of half an expert, are counted in 32 bits.
  const int64_t widest = p.inner > p.shared_inner ? p.inner : p.shared_inner;
  const int64_t rows = static_cast<int64_t>(p.tokens) * (p.top_k + 1);
  if (rows > (1 << 30) || widest * p.hidden > (1 << 29)) return GDN_BAD_LENGTH;
  if (p.hidden % 64 || p.inner % 64 || p.shared_inner % 64) return GDN_BAD_ALGO;
  if (p.quantized) {
    if (!may_be_few(p) || p.tokens > GDN_MOE_PACKED_TOKENS || static_cast<int64_t>(p.tokens) * p.hidden > GDN_MOE_PACKED_INPUTS) return GDN_BAD_ALGO;
    const int types[] = {p.gate_up_type, p.down_type, p.shared_gate_up_type, p.shared_down_type};
    const int inputs[] = {p.hidden, p.inner, p.hidden, p.shared_inner};
    for (int i = 0; i < (p.shared_inner > 0 ? 4 : 2); ++i) {
      if (!quantized::valid_type(types[i])) return GDN_BAD_DTYPE;
      if (inputs[i] % quantized::extent(types[i]).unit_inputs) return GDN_BAD_ALGO;
    }
  }
  if (p.algo < GDN_MOE_AUTO || p.algo > GDN_MOE_MANY || (p.algo == GDN_MOE_FEW && p.tokens > GDN_MOE_FEW_TOKENS))
    return GDN_BAD_ALGO;
  return GDN_OK;
}

// The bytes of workspace, and where its parts begin: at `base`, or for the size alone at null.
int64_t lay_out(const gdn_moe_params &p, bool few, char *base, Args *args) {
  int64_t bytes = 0;
  const auto part = [&](auto &to, int64_t size) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(base + bytes);
    bytes += ceil_div(size, kAlign) * kAlign;
  };
  const int64_t tokens = p.tokens, pairs = tokens * p.top_k, rows = pairs + (p.shared_inner > 0 ? tokens : 0);
  args->scored = p.num_experts + (p.shared_inner > 0);
  args->h_stride = p.inner > p.shared_inner ? p.inner : p.shared_inner;
  args->splits = score_splits(p);
  args->logits_stride = ceil_div(args->scored, 8) * 8;
  args->split_stride = tokens * args->logits_stride;
  part(args->logits, args->splits * args->split_stride * 4);
  part(args->h, rows * args->h_stride * dtype_size(p.io_dtype));
  if (few) {
    part(args->table, sizeof(Table));
  } else {
    const int each = tile_rows(pairs, p.num_experts);
    part(args->chosen, pairs * 4);
    part(args->weights, tokens * (p.top_k + 1) * 4);
    part(args->counts, ceil_div(tokens, choose_tokens(p.tokens)) * p.num_experts * 4);
    part(args->row_of_choice, pairs * 4);
    part(args->token_of_row, pairs * 4);
    part(args->tiles, (pairs / each + p.num_experts + ceil_div(tokens, each)) * static_cast<int64_t>(sizeof(Tile)));
    part(args->tile_count, 4 * 4);
    part(args->rows, rows * p.hidden * dtype_size(p.io_dtype));
  }
  return bytes;
}

int64_t shared_gate_up_bytes(const gdn_moe_params &p) {
  const int64_t numbers = int64_t{2} * p.shared_inner * p.hidden;
  if (!p.quantized) return numbers * (p.gate_up_scales.ptr ? 1 : 2);
  if (p.shared_inner == 0) return 0;
  const quantized::Extent unit = quantized::extent(p.shared_gate_up_type);
  return numbers / (quantized::kTile * unit.unit_inputs) * unit.unit_bytes;
}

// One call of the kernels; the parameters are checked.
int run_tokens(const gdn_moe_params &p, cudaStream_t stream) {
  Args args = {};
  bool few = false;
  if (const int status = choose_algo(p, &few)) return status;
  const int64_t bytes = lay_out(p, few, static_cast<char *>(p.workspace), &args);
  if (!p.workspace || !aligned(p.workspace, kAlign) || p.workspace_bytes < bytes) return GDN_BAD_WORKSPACE;
  args.x = p.x;
  args.router = p.router;
  args.router_parts = p.router_parts;
  args.gate_up = p.gate_up;
  args.down = p.down;
  args.shared_gate_up = p.shared_gate_up;
  args.shared_down = p.shared_down;
  args.y = p.y;
  args.x_stride = p.x_stride;
  args.y_stride = p.y_stride;
  args.tokens = p.tokens;
  args.hidden = p.hidden;
  args.experts = p.num_experts;
  args.top_k = p.top_k;
  args.inner = p.inner;
  args.shared_inner = p.shared_inner;
  args.normalise = p.normalise != 0;
  args.shared_lines = static_cast<int32_t>(shared_gate_up_bytes(p) / 128);
  args.gate_up_scales = scale_args(p.gate_up_scales);
  args.down_scales = scale_args(p.down_scales);
  args.shared_gate_up_scales = scale_args(p.shared_gate_up_scales);
  args.shared_down_scales = scale_args(p.shared_down_scales);
  const bool bf16 = p.io_dtype == GDN_BF16;
  if (few) return bf16 ? run_few<__nv_bfloat16>(p, args, stream) : run_few<__half>(p, args, stream);
  return bf16 ? run_many<__nv_bfloat16>(p, args, stream) : run_many<__half>(p, args, stream);
}

int run(const gdn_moe_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_moe_params &p = *params;
  if (const int status = check_sizes(p)) return status;
  if (p.x_stride < 0 || p.y_stride < 0) return GDN_BAD_STRIDE;
  if (p.tokens == 0) return GDN_OK;
  if (!p.x || !p.y || !p.gate_up || !p.down || !p.router ||
      (p.shared_inner > 0 && (!p.shared_gate_up || !p.shared_down)))
    return GDN_NULL_POINTER;
  for (const void *pointer : {p.x, p.gate_up, p.down, p.shared_gate_up, p.shared_down, p.router})
    if (!aligned(pointer, 16)) return GDN_BAD_ALGO;
  if (p.quantized)
    for (const void *pointer : {p.gate_up, p.down, p.shared_gate_up, p.shared_down})
      if (!aligned(pointer, 128)) return GDN_BAD_ALGO;
  if (p.x_stride % 8) return GDN_BAD_ALGO;
  for (const gdn_scales &scales : {p.gate_up_scales, p.down_scales, p.shared_gate_up_scales, p.shared_down_scales})
    if (const int status = check_scales(scales)) return status;
  // All of the weights are in e4m3 or none.
  const bool scaled = p.gate_up_scales.ptr;
  if (scaled && p.quantized) return GDN_BAD_ALGO;
  if (scaled != (p.down_scales.ptr != nullptr)) return GDN_NULL_POINTER;
  if (p.shared_inner > 0 &&
      (scaled != (p.shared_gate_up_scales.ptr != nullptr) || scaled != (p.shared_down_scales.ptr != nullptr)))
    return GDN_NULL_POINTER;
  int tokens = p.tokens;    // of a call of the kernels
  if (p.quantized) {
    int optin = 0;
    if (const int status = shared_limit(&optin)) return status;
    tokens = packed_tokens(p, optin);
    if (tokens < 1) return GDN_BAD_ALGO;
  }
  gdn_moe_params part = p;
  for (int first = 0; first < p.tokens; first += tokens) {
    part.tokens = p.tokens - first < tokens ? p.tokens - first : tokens;
    part.x = static_cast<const char *>(p.x) + first * p.x_stride * dtype_size(p.io_dtype);
    part.y = static_cast<char *>(p.y) + first * p.y_stride * dtype_size(p.io_dtype);
    if (const int status = run_tokens(part, stream)) return status;
  }
  return GDN_OK;
}

}  // namespace
}  // namespace moe
}  // namespace gdn

extern "C" int gdn_moe(const gdn_moe_params *params, cudaStream_t stream) { return gdn::moe::run(params, stream); }

extern "C" int gdn_moe_workspace(const gdn_moe_params *params, int64_t *bytes) {
  if (!params || !bytes) return GDN_NULL_POINTER;
  if (const int status = gdn::moe::check_sizes(*params)) return status;
  // What any device may need: see choose_algo().
  *bytes = 0;
  for (const bool few : {false, true}) {
    gdn::moe::Args args = {};
    if (!few && params->algo == GDN_MOE_FEW) continue;
    if (few && !gdn::moe::may_be_few(*params)) continue;
    const int64_t needed = gdn::moe::lay_out(*params, few, nullptr, &args);
    if (needed > *bytes) *bytes = needed;
  }
  return GDN_OK;
}
