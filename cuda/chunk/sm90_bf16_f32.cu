// The kernel for sm_90a: bf16 inputs, f32 states.
#include "launch90.cuh"

template int gdn::chunk::launch_sm90<__nv_bfloat16, float>(const gdn_rule_params &, const Schedule &, const Plan &, const Maps &, Pass,
          cudaStream_t);
