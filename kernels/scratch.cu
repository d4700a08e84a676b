// Moves records (a row's weights and its optimizer's state) between the slots of a trainer's scratchpad and a
// contiguous staging buffer, which is copied from or to the host (ScratchPipe, section IV-C: Collect and
// Insert).
//
// The records of one table are a run: contiguous in the buffer, and each in its slot of the scratchpad. One
// launch moves the runs of all tables, by self-identified fusion (FLECHE section 3.2): a run is a segment
// with one thread per word, rounded up to whole warps, and `scan` is the prefix sum of the segments' warps.
// Neighbouring threads move neighbouring words of a record, so accesses are coalesced on both sides.
//
// The two structs below equal `RecordRun` and `RecordArgs` of src/trainer/pipeline/gpu/args.rs, field by
// field. The host checks every slot and length, and nothing else uses these slots or this buffer meanwhile.
#include "common.cuh"

struct RecordRun {
    u64 slots_at;   // word of the scratchpad where slot 0 of this record size begins
    u64 staged_at;  // word of the buffer where the run begins
    u32 list_at;    // index of its first slot in `list`
    u32 rows;
    u32 words;      // per record, at least 1
    u32 unused;
};

struct RecordArgs {
    const RecordRun* runs;  // run_count elements
    const u32* scan;        // run_count + 1 elements: prefix sum of the segments' warps
    const u32* list;        // slot numbers
    u32* scratch;
    u32* staged;
    u32 run_count;
    u32 unused;
};

// Calls `move` with the address of each word in the scratchpad and in the buffer.
template <class Move> __device__ __forceinline__ void each_word(const RecordArgs& args, Move move) {
    u32* scan = dynamic_shared<u32>();
    for (u32 i = threadIdx.x; i < args.run_count + 1; i += blockDim.x) scan[i] = args.scan[i];
    __syncthreads();

    const u32 warps_a_block = blockDim.x / WARP, warps = scan[args.run_count];
    const u32 first = blockIdx.x * warps_a_block + threadIdx.x / WARP;
    for (u32 warp = first; warp < warps; warp += gridDim.x * warps_a_block) {
        const u32 segment = segment_of(scan, args.run_count, warp);
        const RecordRun run = args.runs[segment];
        const u32 item = (warp - scan[segment]) * WARP + threadIdx.x % WARP;
        const u32 row = item / run.words, word = item % run.words;
        if (row >= run.rows) continue;
        const u64 slot = args.list[run.list_at + row];
        move(args.scratch + run.slots_at + slot * run.words + word, args.staged + run.staged_at + item);
    }
}

// Collect: from the slots to the buffer.
extern "C" __global__ void take_records(RecordArgs args) {
    each_word(args, [](const u32* slot, u32* staged) { *staged = *slot; });
}

// Insert: from the buffer to the slots.
extern "C" __global__ void put_records(RecordArgs args) {
    each_word(args, [](u32* slot, const u32* staged) { *slot = *staged; });
}
