// The launchers of this folder, for the chooser in ../rule.
#pragma once

#include "../gdn.h"

namespace gdn {

constexpr int kDecode128Tokens = 16;

// Whether GDN_DECODE_128 takes checked parameters.
bool decode_128_takes(const gdn_rule_params &p);
int launch_decode_128(const gdn_rule_params &p, cudaStream_t stream);

}  // namespace gdn
