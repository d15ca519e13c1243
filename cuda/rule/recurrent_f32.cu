// GDN_RECURRENT for f32 inputs.
#include "recurrent_any.cuh"

template int gdn::recurrent::launch_any<float>(const gdn_rule_params &, cudaStream_t);
