// The kernels with mma.sync for f16 inputs.
#include "launch80.cuh"

template int gdn::chunk::launch_prepare<__half>(const gdn_rule_params &, const Schedule &, Record *, cudaStream_t);
template int gdn::chunk::launch_sm80<__half>(const gdn_rule_params &, const Schedule &, const Plan &, Pass, cudaStream_t);
