// The kernel for sm_90a: f16 inputs, f32 states.
#include "launch90.cuh"

template int gdn::chunk::launch_sm90<__half, float>(const gdn_rule_params &, const Schedule &, const Plan &, const Maps &, Pass,
          cudaStream_t);
