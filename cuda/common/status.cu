// gdn_status_string.
#include "host.cuh"

extern "C" const char *gdn_status_string(int status) {
  switch (status) {
    case GDN_OK: return "success";
    case GDN_BAD_DTYPE: return "a dtype is none of f32, bf16, f16";
    case GDN_NULL_POINTER: return "a required pointer is null";
    case GDN_BAD_HEADS: return "the number of key heads does not divide the number of value heads, or one is not positive";
    case GDN_BAD_HEAD_DIM: return "a head size is outside 1..256";
    case GDN_BAD_LENGTH: return "a count is negative, or past what the grid or an index can hold";
    case GDN_BAD_CONV_WIDTH: return "the convolution width is outside 2..8";
    case GDN_BAD_ALGO: return "the requested kernel does not support this shape, alignment or device";
    case GDN_BAD_STRIDE: return "a stride is negative";
    case GDN_NO_PROFILE: return "built without GDN_PROFILE";
    case GDN_PROFILE_BUFFER:
      return "the profile buffer is not aligned to 16 bytes, or has no room for the warps of this launch";
    case GDN_BAD_WORKSPACE:
      return "the workspace is null, not aligned to 256 bytes or smaller than the launcher's _workspace function says";
  }
  if (status > GDN_CUDA_ERROR) {
    const char *s = cudaGetErrorString(static_cast<cudaError_t>(status - GDN_CUDA_ERROR));
    return s ? s : "unknown CUDA error";
  }
  return "unknown status";
}
