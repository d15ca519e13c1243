// The host's decisions for a call of the chunk form, the kernels' parameters made of them, and the launchers.
#pragma once

#include "../common/profile.cuh"
#include "segments.h"

namespace gdn {
namespace chunk {

// Where segments begin.
struct Borders {
  int32_t first_chunks, segment_chunks;    // of the first segment, and of the others
};

// How sequences are cut.
struct Cuts {
  int32_t segments;    // of a sequence at most
  int32_t longest;     // chunks of a sequence at most
  Borders planned;     // for heads that forget nothing
  // Sequences of more than `long_tokens`, at most `slots` of them, begin first, and no others are cut. Not mixed: each sequence
  // has a slot, and may be cut.
  bool mixed;
  int32_t slots, long_tokens;
};

struct Schedule : Cuts {
  int32_t tile_rows;            // value rows of a block of the scan
  int32_t first_rows;           // the same of the first pass, where there is more than one segment
  int32_t places;               // blocks that process several heads each; 0: one head a block
  int64_t chunks;               // records of a value head
  int64_t record_bytes, transfer_bytes;
  int64_t border_bytes = 0;     // Borders and warm-ups, where the device chooses them
  int64_t split_bytes;          // with places: for heads split in two
  PassCosts costs;

  int64_t bytes() const { return record_bytes + transfer_bytes + border_bytes + split_bytes; }
};

int make_schedule(const gdn_rule_params &p, bool sm90, Schedule *s);

struct Record;    // layout.cuh
struct Maps;      // maps.h

// With more heads than multiprocessors a block, a `place`, processes several. Either every places-th of them, or the interval from
// place T to (place + 1) T of all jobs in a row, T = jobs / places, so that all places are busy to the end and not only in whole
// rounds (McNaughton's rule): a place first runs the part of a head after its begin, then whole heads, then the part of a head
// before its end, whose other part the next place ran first.
struct Rounds {
  int32_t jobs, places;
  bool split;              // heads are split (the second way)
  uint32_t *flags;         // split: eight a place: a warp's rows of its first part are stored
  float *states;           // split: [rows of a block, head_k] a place
};

// The kernels' parameters.
struct Plan : Cuts {
  int32_t v_tiles;          // blocks a head
  bool keep_state;          // a sequence without tokens need not copy its state
  const Record *records;
  float *transfers;         // context parallelism: see context.cuh
  // Chosen on the device, as it depends on how much heads forget (borders.cuh); null where `planned` stands.
  Borders *borders;
  int32_t *warm_ups;        // [slots, num_v_heads]: chunks in which a head forgets a state, about; 0: more than a segment's. Then the
                            // chunks of their sequences
  Rounds rounds;
  GDN_PROFILED(profile::Target profile;)
};

// What a block does with its stretch of chunks.
enum Pass {
  kWhole,      // o and the final state: of a sequence in one segment, or of those after the first
  kSeveral,     // of sequences in one segment, several for a block, which is then a place
  kFirst,      // of the first segment, while
  kTransfer    // what the others add to a state and make of one is found (context.cuh)
};

// The kernels of one pass. A translation unit for each combination of types, so that they compile side by side; all that is of
// sm_90a alone, or of mma.sync alone, is in one of them.
template <typename T, typename ST>
int launch_sm90(const gdn_rule_params &p, const Schedule &s, const Plan &plan, const Maps &maps, Pass pass, cudaStream_t stream);
template <typename T> int launch_sm80(const gdn_rule_params &p, const Schedule &s, const Plan &plan, Pass pass, cudaStream_t stream);

// The records of all chunks, for launch_sm80.
template <typename T> int launch_prepare(const gdn_rule_params &p, const Schedule &s, Record *records, cudaStream_t stream);

// Where segments begin (borders.cuh).
int launch_borders(const gdn_rule_params &p, const Schedule &s, const Plan &plan, int places, cudaStream_t stream);

// The states between segments (context.cuh).
int launch_combine(const gdn_rule_params &p, const Plan &plan, cudaStream_t stream);

}  // namespace chunk
}  // namespace gdn
