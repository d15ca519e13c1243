// GDN_RECURRENT for bf16 inputs.
#include "any.cuh"

template int gdn::recurrent::launch_any<__nv_bfloat16>(const gdn_rule_params &, cudaStream_t);
