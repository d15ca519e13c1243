// GDN_RECURRENT for f16 inputs.
#include "any.cuh"

template int gdn::recurrent::launch_any<__half>(const gdn_rule_params &, cudaStream_t);
