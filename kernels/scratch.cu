// Moves records (a row's weights and its optimizer's state) between the slots of a trainer's scratchpad and a
// dense buffer, in which they cross to the host or have come from there (ScratchPipe, section IV-C: Collect
// and Insert).
//
// Records of one table are a run: they lie end to end in the buffer, and each in its slot. One launch moves
// the runs of all tables, by FLECHE's self-identified fusion (section 3.2): a run is a segment with a thread
// a word, rounded up to whole warps, and `scan` is the prefix sum of the segments' warps. Neighbouring
// threads move neighbouring words of a record, so both sides are read and written in whole lines.
//
// The two structs below are `RecordRun` and `RecordArgs` of src/device/cuda/train_args.rs, field for field.
// The host has checked every slot and length, and nobody else has these slots or this buffer meanwhile.
#include "common.cuh"

struct RecordRun {
    u64 slots_at;   // the word of the scratchpad at which slot 0 of these records' size begins
    u64 staged_at;  // the word of the buffer at which the run begins
    u32 list_at;    // where its slots begin in the list
    u32 rows;
    u32 words;      // of a record, at least 1
    u32 unused;
};

struct RecordArgs {
    const RecordRun* runs;  // run_count
    const u32* scan;        // run_count + 1, in warps
    const u32* list;        // slots
    u32* scratch;
    u32* staged;
    u32 run_count;
    u32 unused;
};

// Calls `move` with each word's place in the scratchpad and in the buffer.
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

// From the slots to the buffer: what leaves.
extern "C" __global__ void take_records(RecordArgs args) {
    each_word(args, [](const u32* slot, u32* staged) { *staged = *slot; });
}

// From the buffer to the slots: what comes in.
extern "C" __global__ void put_records(RecordArgs args) {
    each_word(args, [](u32* slot, const u32* staged) { *slot = *staged; });
}
