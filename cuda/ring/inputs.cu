// gdn_ring_inputs: copies the last inputs of the convolution between a ring and the plain state of gdn_conv.
#include "../common/host.cuh"
#include "../common/launch.cuh"

namespace gdn {
namespace ring {
namespace {

// Sizes in words, as wide as the alignment of all rows allows.
struct InputsParams {
  void *inputs, *conv_state;
  const uint32_t *spans, *in_slots, *out_slots;
  uint64_t inputs_stride, conv_stride;
  uint32_t in_count, out_count, words, rows, capacity;
  int32_t to_ring;
};

// One thread for each word of a sequence's window.
template <typename W> __global__ void inputs_kernel(const __grid_constant__ InputsParams p) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, n = blockIdx.y;
  if (i >= p.rows * p.words) return;
  const uint32_t age = i / p.words, word = i % p.words;    // the oldest row has age 0
  const uint32_t in = p.in_slots ? p.in_slots[n] : n, out = p.out_slots ? p.out_slots[n] : n;
  if (in >= p.in_count || out >= p.out_count) return;    // padding
  W *const state = static_cast<W *>(p.conv_state) + (out * p.conv_stride + i);
  const uint32_t span = p.spans[in];
  const uint32_t row = ((span >> 16) + (span & 0xffffu) + p.capacity - (p.rows - age)) % p.capacity;
  W *const ring =
      static_cast<W *>(p.inputs) + ((p.to_ring ? out : in) * p.inputs_stride + static_cast<uint64_t>(row) * p.words + word);
  if (p.to_ring) *ring = *state;
  else *state = *ring;
}

int check(const gdn_ring_inputs_params &p) {
  if (!valid_dtype(p.io_dtype)) return GDN_BAD_DTYPE;
  if (p.conv_width < 2 || p.conv_width > 8) return GDN_BAD_CONV_WIDTH;
  if (p.num_seqs < 0 || p.num_seqs > 65535 || p.channels < 0) return GDN_BAD_LENGTH;
  if (p.capacity <= p.conv_width || p.capacity > GDN_RING_CAPACITY) return GDN_BAD_LENGTH;
  if (static_cast<int64_t>(p.channels) * p.conv_width > kMaxBlocks) return GDN_BAD_LENGTH;
  if (p.inputs_stride < 0) return GDN_BAD_STRIDE;
  if (const int status = check_slots(p.in_slots)) return status;
  return check_slots(p.out_slots);
}

// Every row begins at a multiple of `bytes`.
bool rows_aligned(const gdn_ring_inputs_params &p, int64_t bytes) {
  const int64_t size = dtype_size(p.io_dtype);
  return aligned(p.inputs, bytes) && aligned(p.conv_state, bytes) && p.channels * size % bytes == 0 &&
         p.inputs_stride * size % bytes == 0 && p.out_slots.slot_stride * size % bytes == 0;
}

template <typename W> int launch_words(const gdn_ring_inputs_params &p, cudaStream_t stream) {
  const int64_t each = static_cast<int64_t>(sizeof(W)) / dtype_size(p.io_dtype);    // elements
  const auto count = [](const gdn_slots &s) { return static_cast<uint32_t>(s.num_slots < 0xffffffffLL ? s.num_slots : 0xffffffffLL); };
  const InputsParams device = {p.inputs, p.conv_state, p.spans, p.in_slots.slots, p.out_slots.slots,
                               static_cast<uint64_t>(p.inputs_stride / each),
                               static_cast<uint64_t>(p.out_slots.slot_stride / each), count(p.in_slots), count(p.out_slots),
                               static_cast<uint32_t>(p.channels / each), static_cast<uint32_t>(p.conv_width - 1),
                               static_cast<uint32_t>(p.capacity), p.to_ring};
  constexpr int kThreads = 128;
  const dim3 grid(static_cast<unsigned>(ceil_div(static_cast<int64_t>(device.rows) * device.words, kThreads)),
                  static_cast<unsigned>(p.num_seqs));
  return launch(inputs_kernel<W>, {grid, dim3(kThreads), 0, stream}, device);
}

}  // namespace
}  // namespace ring
}  // namespace gdn

extern "C" int gdn_ring_inputs(const gdn_ring_inputs_params *params, cudaStream_t stream) {
  using namespace gdn;
  if (!params) return GDN_NULL_POINTER;
  const gdn_ring_inputs_params &p = *params;
  if (const int status = ring::check(p)) return status;
  if (p.num_seqs == 0 || p.channels == 0) return GDN_OK;
  if (!p.inputs || !p.conv_state || !p.spans) return GDN_NULL_POINTER;
  if (ring::rows_aligned(p, 16)) return ring::launch_words<uint4>(p, stream);
  if (p.io_dtype == GDN_F32) return ring::launch_words<uint32_t>(p, stream);
  return ring::launch_words<uint16_t>(p, stream);
}
