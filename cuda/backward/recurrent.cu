// GDN_RECURRENT of gdn_rule_backward: how sequences are cut, the workspace, and the launches.
#include "rule.h"

#include <math.h>

#include "../common/convert.cuh"
#include "recurrent_plan.h"

namespace gdn {
namespace backward {
namespace {

// Hands out parts of the workspace, each aligned to 256 bytes; without one it counts.
struct Carve {
  uint8_t *at;
  int64_t used = 0;
  template <typename T> void part(T **to, int64_t count) {
    *to = at ? reinterpret_cast<T *>(at + used) : nullptr;
    used += ceil_div(count * static_cast<int64_t>(sizeof(T)), 256) * 256;
  }
};

int64_t lay_out(const gdn_common &c, Plan *plan, void *workspace) {
  const int64_t head = static_cast<int64_t>(c.head_v) * c.head_k * c.num_v_heads;
  Carve carve = {static_cast<uint8_t *>(workspace)};
  carve.part(&plan->factors, plan->tokens * c.num_k_heads);
  for (float **x : {&plan->states, &plan->d_states}) carve.part(x, plan->chunks * head);
  for (float **x : {&plan->values, &plan->d_values}) carve.part(x, plan->rows * c.num_v_heads * c.head_v);
  carve.part(&plan->borders, (plan->sections - 1) * c.seqs.num_seqs * head);
  carve.part(&plan->carry, plan->sections > 1 ? c.seqs.num_seqs * head : 0);
  return carve.used;
}

// Sequences in one section, or in about as many sections as a section has chunks.
Plan cut(const gdn_common &c, bool whole) {
  Plan plan = {};
  const gdn_sequences &s = c.seqs;
  const int64_t longest = max_tokens(s);
  plan.chunk = c.head_k >= kWideKeys ? 32 : 64;
  const int64_t chunks = ceil_div(longest, plan.chunk);
  plan.tokens = s.cu_seqlens ? s.total_tokens : longest * s.num_seqs;
  plan.sections = 1, plan.section_tokens = static_cast<int32_t>(longest);
  plan.by_rows = whole && s.cu_seqlens;
  if (!whole && chunks > 1) {
    const int64_t each = static_cast<int64_t>(ceil(sqrt(static_cast<double>(chunks))));
    plan.section_tokens = static_cast<int32_t>(each * plan.chunk), plan.sections = static_cast<int32_t>(ceil_div(chunks, each));
  }
  plan.rows = plan.by_rows ? s.total_tokens : static_cast<int64_t>(plan.section_tokens) * s.num_seqs;
  plan.chunks = plan.by_rows ? s.total_tokens / plan.chunk + s.num_seqs : ceil_div(plan.section_tokens, plan.chunk) * s.num_seqs;
  if (longest == 0) plan.tokens = plan.rows = plan.chunks = 0;
  return plan;
}

Plan make_plan(const gdn_rule_backward_params &p) {
  Plan whole = cut(p.common, true), parts = cut(p.common, false);
  return p.recompute && lay_out(p.common, &parts, nullptr) < lay_out(p.common, &whole, nullptr) ? parts : whole;
}

template <typename T> int launch_all(const gdn_rule_backward_params &p, Plan plan, cudaStream_t stream) {
  if (plan.tokens > 0)
    if (const int status = launch_factors<T>(p, plan, stream)) return status;
  if (plan.sections > 1)
    if (const int status = launch_borders<T>(p, plan, stream)) return status;
  for (plan.section = plan.sections - 1; plan.section >= 0; --plan.section)
    if (const int status = launch_section<T>(p, plan, stream)) return status;
  return GDN_OK;
}

}  // namespace
}  // namespace backward

int64_t recurrent_backward_workspace(const gdn_rule_backward_params &p) {
  backward::Plan plan = backward::make_plan(p);
  return backward::lay_out(p.common, &plan, nullptr);
}

int launch_recurrent_backward(const gdn_rule_backward_params &p, cudaStream_t stream) {
  backward::Plan plan = backward::make_plan(p);
  const int64_t bytes = backward::lay_out(p.common, &plan, p.workspace);
  if (const int status = check_workspace(p.workspace, p.workspace_bytes, bytes)) return status;
  return p.common.io_dtype == GDN_F32 ? backward::launch_all<float>(p, plan, stream) : backward::launch_all<Any16>(p, plan, stream);
}

}  // namespace gdn
