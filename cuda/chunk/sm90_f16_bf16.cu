// The kernel for sm_90a: f16 inputs, bf16 states.
#include "launch90.cuh"

template int gdn::chunk::launch_sm90<__half, __nv_bfloat16>(const gdn_rule_params &, const Schedule &, const Plan &, const Maps &, Pass,
          cudaStream_t);
