// The kernel for sm_90a: bf16 inputs, bf16 states.
#include "launch90.cuh"

template int gdn::chunk::launch_sm90<__nv_bfloat16, __nv_bfloat16>(const gdn_rule_params &, const Schedule &, const Plan &, const Maps &, Pass,
          cudaStream_t);
