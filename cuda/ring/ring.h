// The launchers of this folder by input type, each in a translation unit of its own.
#pragma once

#include "../gdn.h"

namespace gdn {
namespace ring {

struct Params;
struct StepParams;

template <typename T>
int launch_as(const Params &params, int num_seqs, int state_dtype, int algo, cudaStream_t stream);

template <typename T>
int launch_step_as(const StepParams &params, int num_seqs, int state_dtype, int algo, bool overlap,
                   cudaStream_t stream);

}  // namespace ring
}  // namespace gdn
