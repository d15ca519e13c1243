// Tensor maps of q, k, v and o.
#pragma once

#include <cuda.h>

#include "../gdn.h"

namespace gdn {
namespace chunk {

// How the copy engine sees q, k, v and o: boxes of 64 elements of a head by 64 tokens, zero outside of the tensor. Coordinates:
// element, head, token, sequence; packed tokens are one sequence.
struct Maps {
  CUtensorMap q, k, v, o;
};

int make_maps(const gdn_rule_params &p, Maps *maps);

}  // namespace chunk
}  // namespace gdn
