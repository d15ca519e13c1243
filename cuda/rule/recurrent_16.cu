// GDN_RECURRENT for inputs of 16 bits.
#include "recurrent_any.cuh"

template int gdn::recurrent::launch_any<gdn::Any16>(const gdn_rule_params &, cudaStream_t);
