// candle-gdn: a sparse mixture of experts, with a shared expert where there is one. The rules of gdn.h hold here too:
// one parameter struct and a stream, nothing allocated, nothing awaited, statuses of gdn_status; a launch can be
// captured.
//
// Of E experts a token takes the k with the largest logits, with the softmax of all E as weights:
//   p = softmax(router x);  w_e = p_e, or p_e / (the sum of the k chosen)
//   y = sum over chosen e of w_e mlp_e(x) + sigmoid(shared_gate x) mlp_shared(x)
//   mlp(x) = down (silu(gate x) * (up x))
// Of equal logits the lower expert is taken; a NaN counts as the largest, and makes all weights of its token NaN.
#ifndef CANDLE_GDN_MOE_H
#define CANDLE_GDN_MOE_H

#include "gdn.h"
#include "gdn_quantized.h"
#include "gdn_scaled.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GDN_MOE_FEW_TOKENS 128    // that GDN_MOE_FEW takes at most, where a block may have 227 KB of shared memory; in 99 KB at least 64
#define GDN_MOE_EXPERTS 1024   // at most
#define GDN_MOE_TOP_K 16       // at most
#define GDN_MOE_PACKED_TOKENS 16      // that packed experts take at most,
#define GDN_MOE_PACKED_INPUTS 65536   // and of x as many numbers in all

typedef enum gdn_moe_algo {
  GDN_MOE_AUTO = 0,      // few up to 48 tokens, with weights in e4m3 as many as it takes; more: many
  GDN_MOE_FEW = 1,       // few tokens: the weights of the chosen experts stream once through registers
  GDN_MOE_MANY = 2       // many: rows sorted by expert, then products of tiles
} gdn_moe_algo;

// All rows of weights are contiguous. hidden, inner and shared_inner are multiples of 64; x and the weights are aligned
// to 16 bytes, and the stride of x is a multiple of 8 (GDN_BAD_ALGO otherwise).
typedef struct gdn_moe_params {
  const void *x;               // [tokens, hidden], io_dtype
  const void *router;          // [router_parts, num_experts, hidden] in bf16, and the router is the sum of the parts; with a
                               // shared expert one more row of each, its gate
  const void *gate_up;         // [num_experts, 2 inner, hidden], io_dtype: the gate's rows, then up's
  const void *down;            // [num_experts, hidden, inner], io_dtype
  const void *shared_gate_up;  // [2 shared_inner, hidden], io_dtype
  const void *shared_down;     // [hidden, shared_inner], io_dtype
  gdn_scales gate_up_scales, down_scales, shared_gate_up_scales, shared_down_scales;    // none, or of all the four above,
                               // which are then in e4m3; rows are counted over all experts. Numbers are taken as they are;
                               // GDN_MOE_MANY rounds each to io_dtype where experts have more than 20 rows on average, or shared memory has no room
  int32_t quantized;           // not 0: all the four are packed as gdn_quantized_pack() does, aligned to 128, each of its own type; the gates and
                               // ups `paired`. For few tokens alone. hidden, inner and shared_inner are what these types take
  int32_t gate_up_type, down_type, shared_gate_up_type, shared_down_type;    // gdn_quantized_type
  void *y;                     // written: [tokens, hidden], io_dtype; must not overlap x
  void *workspace;             // gdn_moe_workspace() bytes of device memory, aligned to 256. Its contents mean nothing
  int64_t workspace_bytes;     // before and after
  int64_t x_stride, y_stride;  // elements from token to token
  int32_t tokens, hidden, num_experts, top_k;
  int32_t inner;
  int32_t shared_inner;        // 0: no shared expert
  int32_t io_dtype;            // GDN_BF16 or GDN_F16; sums are f32
  int32_t router_parts;        // 1 where bf16 holds the router, up to 3, which hold any in f32; products and sums are f32
  int32_t normalise;           // the k weights sum to one
  int32_t algo;                // gdn_moe_algo
  int32_t overlap;             // GDN_OVERLAP, which calls of more than 1024 tokens ignore; read before the wait: the
                               // router's and the shared expert's weights. Its own kernels overlap one another in any case, but with -1, which is for measurements
} gdn_moe_params;
int gdn_moe(const gdn_moe_params *params, cudaStream_t stream);
// How many bytes of workspace gdn_moe needs for these parameters; follows from sizes alone.
int gdn_moe_workspace(const gdn_moe_params *params, int64_t *bytes);

#ifdef __cplusplus
}
#endif

#endif  // CANDLE_GDN_MOE_H
