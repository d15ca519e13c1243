// The contest's two definitions on gdn_rule, as flashinfer-bench calls them through tvm-ffi: the inputs, then the outputs
// to write. Nothing here waits for the GPU, and memory comes from the caller's allocator, in the order of its stream, so that
// both can be captured in a CUDA graph.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <initializer_list>

#include "cuda/common/launch.cuh"
#include "cuda/gdn.h"

namespace {

using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

constexpr int64_t HK = 4, HV = 8, D = 128;
constexpr double kDefaultScale = 0.08838834764831845;    // 128^-0.5
constexpr DLDataType kF32 = {kDLFloat, 32, 1}, kBf16 = {kDLBfloat, 16, 1}, kI64 = {kDLInt, 64, 1}, kByte = {kDLUInt, 8, 1};

void check(const char *what, int status) {
  if (status != GDN_OK) TVM_FFI_THROW(RuntimeError) << what << ": " << gdn_status_string(status);
}

void expect(const char *name, const TensorView &x, DLDevice device, DLDataType type, std::initializer_list<int64_t> shape) {
  const bool placed = x.device().device_type == kDLCUDA && x.device().device_id == device.device_id;
  if (placed && x.dtype() == type && x.ndim() == static_cast<int32_t>(shape.size()) &&
      std::equal(shape.begin(), shape.end(), x.shape().begin()) && x.IsContiguous())
    return;
  TVM_FFI_THROW(ValueError) << name << ": expected a contiguous tensor of " << type << tvm::ffi::Shape(shape)
                            << " on the GPU of q, got " << x.dtype() << tvm::ffi::Shape(x.shape());
}

template <typename T> T *address(const TensorView &x) {
  return reinterpret_cast<T *>(static_cast<char *>(x.data_ptr()) + x.byte_offset());
}

// Of [sequence, token, head, ..], or of packed tokens [token, head, ..].
gdn_heads heads(const TensorView &x, bool packed) {
  const int token = packed ? 0 : 1;
  return {address<void>(x), packed ? 0 : x.stride(0), x.stride(token), x.stride(token + 1)};
}

struct Arguments {
  const TensorView &q, &k, &v, &state, &A_log, &a, &dt_bias, &b;
  double scale;
  const TensorView &output, &new_state;
};

// What both definitions have in common.
gdn_rule_params rule(const Arguments &x, int64_t sequences, bool packed) {
  const DLDevice device = x.q.device();
  expect("state", x.state, device, kF32, {sequences, HV, D, D});
  expect("A_log", x.A_log, device, kF32, {HV});
  expect("dt_bias", x.dt_bias, device, kF32, {HV});
  expect("new_state", x.new_state, device, kF32, {sequences, HV, D, D});
  gdn_rule_params p = {};
  p.q = heads(x.q, packed);
  p.k = heads(x.k, packed);
  p.v = heads(x.v, packed);
  p.o = heads(x.output, packed);
  gdn_common &c = p.common;
  c.a = heads(x.a, packed);
  c.b = heads(x.b, packed);
  c.a_log = address<float>(x.A_log);
  c.dt_bias = address<float>(x.dt_bias);
  c.state_in = address<void>(x.state);
  c.state_out = address<void>(x.new_state);
  c.in_slots = c.out_slots = {nullptr, sequences, HV * D * D};
  c.seqs.num_seqs = static_cast<int32_t>(sequences);
  c.num_k_heads = HK;
  c.num_v_heads = HV;
  c.head_k = c.head_v = D;
  c.io_dtype = c.gate_dtype = GDN_BF16;
  c.state_dtype = GDN_F32;
  c.scale = static_cast<float>(x.scale == 0. ? kDefaultScale : x.scale);
  c.beta_scale = 1.f;
  return p;
}

cudaStream_t current_stream(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device.device_id));
}

__global__ void narrow(const int64_t *from, uint32_t *to, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) to[i] = static_cast<uint32_t>(from[i]);
}

void decode(TensorView q, TensorView k, TensorView v, TensorView state, TensorView A_log, TensorView a, TensorView dt_bias,
            TensorView b, double scale, TensorView output, TensorView new_state) {
  const DLDevice device = q.device();
  const int64_t n = q.size(0);
  expect("q", q, device, kBf16, {n, 1, HK, D});
  expect("k", k, device, kBf16, {n, 1, HK, D});
  expect("v", v, device, kBf16, {n, 1, HV, D});
  expect("a", a, device, kBf16, {n, 1, HV});
  expect("b", b, device, kBf16, {n, 1, HV});
  expect("output", output, device, kBf16, {n, 1, HV, D});
  gdn_rule_params p = rule({q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state}, n, false);
  p.common.seqs.tokens_per_seq = 1;    // no kernel for one token needs a workspace
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  check("gdn_rule", gdn_rule(&p, current_stream(device)));
}

void prefill(TensorView q, TensorView k, TensorView v, TensorView state, TensorView A_log, TensorView a, TensorView dt_bias,
             TensorView b, TensorView cu_seqlens, double scale, TensorView output, TensorView new_state) {
  const DLDevice device = q.device();
  const int64_t tokens = q.size(0), bounds = cu_seqlens.size(0);
  expect("q", q, device, kBf16, {tokens, HK, D});
  expect("k", k, device, kBf16, {tokens, HK, D});
  expect("v", v, device, kBf16, {tokens, HV, D});
  expect("a", a, device, kBf16, {tokens, HV});
  expect("b", b, device, kBf16, {tokens, HV});
  expect("cu_seqlens", cu_seqlens, device, kI64, {std::max<int64_t>(bounds, 1)});
  expect("output", output, device, kBf16, {tokens, HV, D});
  gdn_rule_params p = rule({q, k, v, state, A_log, a, dt_bias, b, scale, output, new_state}, bounds - 1, true);
  // How long the longest sequence is only the GPU knows.
  p.common.seqs.max_tokens_per_seq = p.common.seqs.total_tokens = static_cast<int32_t>(tokens);

  // One allocation: the workspace, which follows from sizes alone, followed by cu_seqlens as gdn_rule takes it.
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  p.common.seqs.cu_seqlens = address<uint32_t>(cu_seqlens);
  check("gdn_rule_workspace", gdn_rule_workspace(&p, &p.workspace_bytes));
  const int64_t narrowed = (p.workspace_bytes + 255) / 256 * 256;
  const Tensor room = Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {narrowed + bounds * int64_t{sizeof(uint32_t)}}, kByte, device);
  p.workspace = room.data_ptr();
  uint32_t *cu = reinterpret_cast<uint32_t *>(static_cast<char *>(room.data_ptr()) + narrowed);
  p.common.seqs.cu_seqlens = cu;

  const cudaStream_t stream = current_stream(device);
  gdn::LaunchConfig config;
  config.block = dim3(256);
  config.grid = dim3(static_cast<unsigned>((bounds + 255) / 256));
  config.stream = stream;
  check("cu_seqlens", gdn::launch(narrow, config, address<const int64_t>(cu_seqlens), cu, static_cast<int>(bounds)));
  check("gdn_rule", gdn_rule(&p, stream));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prefill, prefill);
