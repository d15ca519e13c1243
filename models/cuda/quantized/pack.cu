// gdn_quantized_pack, gdn_quantized_size and gdn_quantized_rows.
#include "common/convert.cuh"
#include "common/launch.cuh"
#include "layout.cuh"

namespace gdn {
namespace quantized {
namespace {

constexpr int kPackWarps = 4;

struct PackArgs {
  const uint8_t *from;
  uint8_t *to;
  int32_t outputs, tiles, units, paired;
};

__device__ __forceinline__ uint32_t bytes2(const uint8_t *p) { return p[0] | p[1] << 8; }

// A number of 8 bits, as unpack() gives it but in Q6_K not times 4; its block at `p`.
template <int TYPE> __device__ __forceinline__ uint32_t number(const uint8_t *p, int i) {
  if constexpr (TYPE == GDN_Q8_0) {
    return p[2 + i];    // of 32, after an f16 scale
  } else if constexpr (TYPE == GDN_Q4_K) {    // of 256, after d, dmin and 12 bytes of scales
    return p[16 + i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
  } else {    // of 256: 128 bytes of nibbles, 64 of two bits, 16 scales and d
    const int half = i / 128, quarter = i % 128 / 32, l = i % 32;
    const uint32_t lower = p[64 * half + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
    const uint32_t upper = p[128 + 32 * half + l] >> (2 * quarter) & 3;
    return (lower | upper << 4) ^ 32;
  }
}

// ggml's bytes of a block and its inputs.
template <int TYPE> constexpr int kBlockBytes = TYPE == GDN_Q8_0 ? 34 : TYPE == GDN_Q4_K ? 144 : 210;
template <int TYPE> constexpr int kBlockInputs = TYPE == GDN_Q8_0 ? 32 : 256;

// Scale and minimum of 32 inputs in Q4_K, six bits each.
__device__ __forceinline__ uint32_t six_bits(const uint8_t *p, int block) {
  const uint8_t *s = p + 4;
  if (block < 4) return (s[block] & 63) | (s[block + 4] & 63) << 6;
  const uint32_t scale = (s[block + 4] & 15) | s[block - 4] >> 6 << 4, minimum = s[block + 4] >> 4 | s[block] >> 6 << 4;
  return scale | minimum << 6;
}

// A warp packs a unit.
template <int TYPE> __global__ void pack_kernel(const __grid_constant__ PackArgs a) {
  using F = Format<TYPE>;
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kPackWarps + threadIdx.x / 32;
  if (unit >= static_cast<int64_t>(a.tiles) * a.units) return;
  const int tile = static_cast<int>(unit / a.units), first_input = static_cast<int>(unit % a.units) * F::kInputs;
  const int64_t row_blocks = static_cast<int64_t>(a.units) * (F::kInputs / kBlockInputs<TYPE>);
  uint8_t *to = a.to + unit * F::kBytes;
  // The block of an input of row g or g + 8; null past the last row.
  const auto block_of = [&](int row, int input) -> const uint8_t * {
    const int32_t packed = tile * kTile + g + 8 * row;
    if (packed >= a.outputs) return nullptr;
    const int64_t output = unpaired(packed, a.paired);
    return a.from + (output * row_blocks + (first_input + input) / kBlockInputs<TYPE>)*kBlockBytes<TYPE>;
  };
  const auto at = [&](int chunk, int product, int k, int byte) -> uint32_t {
    const int input = chunk * kChunk + 32 * t + 8 * product + 4 * (k / 2) + byte;
    const uint8_t *p = block_of(k % 2, input);
    return p ? number<TYPE>(p, (first_input + input) % kBlockInputs<TYPE>) : 0;
  };
  for (int c = 0; c < kChunksOf<TYPE>; ++c)
    for (int k = 0; k < 4; ++k)
      for (int byte = 0; byte < 4; ++byte) {
        uint32_t n[4];
        for (int i = 0; i < 4; ++i) n[i] = at(c, i, k, byte);
        uint8_t *here = to + lane * 16 + 4 * k + byte;
        if constexpr (TYPE == GDN_Q8_0) {
          for (int i = 0; i < 4; ++i) here[i * 512] = n[i];
        } else {
          for (int j = 0; j < 2; ++j) here[(2 * c + j) * 512] = (n[2 * j] & 15) | (n[2 * j + 1] & 15) << 4;
          if constexpr (TYPE == GDN_Q6_K)
            here[(4 + c) * 512] = n[0] >> 4 | n[1] >> 4 << 2 | n[2] >> 4 << 4 | n[3] >> 4 << 6;
        }
      }
  if constexpr (TYPE == GDN_Q8_0) {
    uint32_t scales = 0;
    for (int row = 0; row < 2; ++row)
      if (const uint8_t *p = block_of(row, 32 * t)) scales |= bytes2(p) << 16 * row;
    reinterpret_cast<uint32_t *>(to + F::kScalesAt)[lane] = scales;
  } else if constexpr (TYPE == GDN_Q4_K) {
    const uint8_t *block = block_of(t / 2, 0);
    const uint32_t factor = block ? bytes2(block + t % 2 * 2) : 0;
    for (int c = 0; c < 2; ++c) {
      uint32_t word = (factor >> 8 * c & 255) << 24;
      for (int row = 0; row < 2; ++row)
        if (const uint8_t *p = block_of(row, 0)) word |= six_bits(p, 4 * c + t) << 12 * row;
      reinterpret_cast<uint32_t *>(to + F::kScalesAt)[2 * lane + c] = word;
    }
  } else {
    uint32_t factors = 0;
    for (int row = 0; row < 2; ++row) {
      const uint8_t *p = block_of(row, 0);
      for (int c = 0; c < 2; ++c)
        for (int i = 0; i < 2; ++i)
          to[F::kScalesAt + lane * 8 + 4 * c + 2 * row + i] = p ? p[192 + 8 * c + 2 * t + i] : 0;
      if (p) factors |= bytes2(p + 208) << 16 * row;
    }
    if (t == 0) reinterpret_cast<uint32_t *>(to + F::kFactorsAt)[g] = factors;
  }
}

struct RowsArgs {
  const uint8_t *w;
  const uint32_t *ids;
  void *y;
  int64_t y_stride;
  int32_t rows, outputs, tiles, units, inputs, paired;
};

// A warp writes what it has to of a unit: all 16 rows, by way of shared memory so that a row's numbers leave together, or with ids one.
template <typename T, int TYPE> __global__ void rows_kernel(const __grid_constant__ RowsArgs a) {
  using F = Format<TYPE>;
  constexpr int kRow = kChunk + 16 / sizeof(T);    // numbers from row to row: without conflicts
  __shared__ __align__(16) T room[kPackWarps][kTile * kRow];
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kPackWarps + threadIdx.x / 32;
  T *warp_room = room[threadIdx.x / 32];
  if (at >= static_cast<int64_t>(a.ids ? a.rows : a.tiles) * a.units) return;
  const int64_t from = at / a.units, u = at % a.units;
  const int64_t id = a.ids ? a.ids[from] : 0, tile = a.ids ? id / kTile : from;
  const bool zeros = id >= a.outputs;
  const uint8_t *unit = a.w + ((zeros ? 0 : tile) * a.units + u) * F::kBytes;
  uint2 record = {};
  uint32_t factors = 0;
  if constexpr (TYPE == GDN_Q8_0) record.x = reinterpret_cast<const uint32_t *>(unit + F::kScalesAt)[lane];
  else record = reinterpret_cast<const uint2 *>(unit + F::kScalesAt)[lane];
  if constexpr (TYPE == GDN_Q6_K) factors = reinterpret_cast<const uint32_t *>(unit + F::kFactorsAt)[g];
  const Scales<TYPE> scales = scales_of<TYPE>(record, factors);
#pragma unroll
  for (int c = 0; c < kChunksOf<TYPE>; ++c) {
    uint32_t words[16];
    unpack<TYPE>(c, [&](int j) { return reinterpret_cast<const uint4 *>(unit + j * 512)[lane]; }, words);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (a.ids && !zeros && id % kTile != g + 8 * row) continue;
      if (zeros && (g | row)) continue;
      T *y = a.ids ? static_cast<T *>(a.y) + from * a.y_stride + u * F::kInputs + c * kChunk + 32 * t : warp_room + (g + 8 * row) * kRow + 32 * t;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float n = static_cast<float>(static_cast<int8_t>(words[4 * i + row + j / 4 * 2] >> 8 * (j % 4)));
          v[j] = n * scales.scale[c][row][i * F::kGroups / 4];
          if constexpr (F::kMinima) v[j] -= scales.minimum[c][row];
          if (zeros) v[j] = 0.f;
        }
        constexpr int kPack = 16 / sizeof(T);
#pragma unroll
        for (int j = 0; j < 8; j += kPack) store_pack<T, kPack>(y + 8 * i + j, *reinterpret_cast<const float(*)[kPack]>(v + j));
      }
    }
    if (a.ids) continue;
    __syncwarp();
    constexpr int kPerRow = kChunk * sizeof(T) / 16;
    for (int i = lane; i < kTile * kPerRow; i += 32) {
      const int row = i / kPerRow, piece = i % kPerRow * (16 / sizeof(T));
      const int64_t output = tile * kTile + row;
      if (output >= a.rows) break;
      T *y = static_cast<T *>(a.y) + unpaired(static_cast<int32_t>(output), a.paired) * a.y_stride + u * F::kInputs + c * kChunk + piece;
      *reinterpret_cast<uint4 *>(y) = *reinterpret_cast<const uint4 *>(warp_room + row * kRow + piece);
    }
    __syncwarp();
  }
}

int check(int type, int64_t outputs, int64_t inputs, int64_t paired) {
  if (!valid_type(type)) return GDN_BAD_DTYPE;
  if (outputs < 0 || inputs < 1 || outputs > (1 << 30) || inputs > (1 << 29)) return GDN_BAD_LENGTH;
  if (paired < 0) return GDN_BAD_LENGTH;
  if (paired && (paired % 8 || outputs % (2 * paired))) return GDN_BAD_ALGO;
  return inputs % extent(type).unit_inputs ? GDN_BAD_ALGO : GDN_OK;
}

int pack(const gdn_quantized_pack_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_quantized_pack_params &p = *params;
  if (const int status = check(p.type, p.outputs, p.inputs, p.paired)) return status;
  if (p.outputs == 0) return GDN_OK;
  if (!p.from || !p.to) return GDN_NULL_POINTER;
  if (!aligned(p.to, 128)) return GDN_BAD_ALGO;
  return with_type(p.type, [&](auto type) {
    constexpr int kType = decltype(type)::value;
    PackArgs args = {static_cast<const uint8_t *>(p.from), static_cast<uint8_t *>(p.to), p.outputs,
                     static_cast<int32_t>(ceil_div(p.outputs, kTile)), p.inputs / Format<kType>::kInputs, p.paired};
    const int64_t blocks = ceil_div(static_cast<int64_t>(args.tiles) * args.units, kPackWarps);
    if (blocks > kMaxBlocks) return static_cast<int>(GDN_BAD_LENGTH);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(blocks));
    config.block = dim3(32 * kPackWarps);
    config.stream = stream;
    return launch(pack_kernel<kType>, config, args);
  });
}

int rows(const gdn_quantized_rows_params *params, cudaStream_t stream) {
  if (!params) return GDN_NULL_POINTER;
  const gdn_quantized_rows_params &p = *params;
  if (!valid_dtype(p.dtype)) return GDN_BAD_DTYPE;
  if (const int status = check(p.type, p.outputs, p.inputs, p.paired)) return status;
  if (p.paired && (p.ids || p.rows != p.outputs)) return GDN_BAD_ALGO;
  if (p.rows < 0 || (!p.ids && p.rows > p.outputs)) return GDN_BAD_LENGTH;
  if (p.y_stride < 0) return GDN_BAD_STRIDE;
  if (p.rows == 0) return GDN_OK;
  if ((!p.w && p.outputs > 0) || !p.y) return GDN_NULL_POINTER;
  const int64_t pitch = p.y_stride * dtype_size(p.dtype), width = p.inputs * dtype_size(p.dtype);
  if (!aligned(p.w, 128) || !aligned(p.y, 16) || pitch % 16) return GDN_BAD_ALGO;
  // All ids are past the last row. The kernel reads the first row for such an id, and there is none.
  if (p.outputs == 0) return cuda_status(cudaMemset2DAsync(p.y, p.rows > 1 ? pitch : width, 0, width, p.rows, stream));
  return with_type(p.type, [&](auto type) {
    constexpr int kType = decltype(type)::value;
    RowsArgs args = {static_cast<const uint8_t *>(p.w), p.ids, p.y, p.y_stride, p.rows, p.outputs,
                     static_cast<int32_t>(ceil_div(p.rows, kTile)), p.inputs / Format<kType>::kInputs, p.inputs, p.paired};
    const int64_t blocks = ceil_div(static_cast<int64_t>(p.ids ? p.rows : args.tiles) * args.units, kPackWarps);
    if (blocks > kMaxBlocks) return static_cast<int>(GDN_BAD_LENGTH);
    LaunchConfig config;
    config.grid = dim3(static_cast<unsigned>(blocks));
    config.block = dim3(32 * kPackWarps);
    config.stream = stream;
    return with_dtype(p.dtype, [&](auto dtype) { return launch(rows_kernel<typename decltype(dtype)::type, kType>, config, args); });
  });
}

}  // namespace
}  // namespace quantized
}  // namespace gdn

extern "C" int gdn_quantized_pack(const gdn_quantized_pack_params *params, cudaStream_t stream) {
  return gdn::quantized::pack(params, stream);
}

extern "C" int gdn_quantized_size(const gdn_quantized_pack_params *params, int64_t *bytes) {
  if (!params || !bytes) return GDN_NULL_POINTER;
  if (const int status = gdn::quantized::check(params->type, params->outputs, params->inputs, params->paired)) return status;
  const gdn::quantized::Extent e = gdn::quantized::extent(params->type);
  *bytes = gdn::ceil_div(params->outputs, gdn::quantized::kTile) * (params->inputs / e.unit_inputs) * e.unit_bytes;
  return GDN_OK;
}

extern "C" int gdn_quantized_rows(const gdn_quantized_rows_params *params, cudaStream_t stream) {
  return gdn::quantized::rows(params, stream);
}
