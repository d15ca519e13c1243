// The kernels with mma.sync for bf16 inputs.
#include "launch80.cuh"

template int gdn::chunk::launch_prepare<__nv_bfloat16>(const gdn_rule_params &, const Schedule &, Record *, cudaStream_t);
template int gdn::chunk::launch_sm80<__nv_bfloat16>(const gdn_rule_params &, const Schedule &, const Plan &, Pass, cudaStream_t);
