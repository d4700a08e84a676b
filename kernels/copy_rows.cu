// The decoupled copy (FLECHE section 3.3): while the host fetches a batch's misses, the batch's hits are
// copied from the pool and from host rows to the batch's own buffer.
//
// Launched only if a probe reported misses. Warps divide the occurrences as in the probe. A warp copies the
// rows of its lanes one after the other, with all lanes on one row. Only owners' rows are copied (probe.cu),
// and other occurrences then refer to their owner. Each warp reserves space for all its rows with one atomic
// operation. Rows that do not fit stay where they are, and the gather reads them there. A thread changes only
// the places of its own occurrences.
#include "common.cuh"

struct CopyArgs {
    const ProbeColumn* columns;  // column_count elements
    const u32* scan;             // column_count + 1 elements: prefix sum of the segments' warps
    const u32* owners;
    u64* places;        // by occurrence; input and output
    BatchState* state;
    const u32* pool;
    const u32* host;    // base address of locations in host memory
    u32* buffer;        // capacity words; output
    u32 column_count;
    u32 capacity;       // at most 2^31
};

// Copies the rows of one warp's occurrences.
__device__ __forceinline__ void copy_warp(const CopyArgs& args, u32 segment, u32 item) {
    const ProbeColumn column = args.columns[segment];
    const u32 lane = threadIdx.x % WARP, words = column.row_words;
    const u32 occurrence = column.occurrences_at + item;
    const bool live = item < column.ids;
    const u64 place = live ? args.places[occurrence] : AT_NOTHING;
    const bool hit = kind_of(place) == AT_LOCATION, owns = hit && args.owners[occurrence] == occurrence;
    const u32 copying = __ballot_sync(ALL_LANES, owns);
    const u32 needed = static_cast<u32>(__popc(copying)) * words;
    u32 first = 0;
    if (lane == 0 && needed) {
        // If the buffer is full, nothing is added, so that the counter does not overflow.
        u32* copied = &args.state->copied;
        first = load(copied) < args.capacity ? atomicAdd(copied, needed) : args.capacity;
    }
    first = __shfl_sync(ALL_LANES, first, 0);
    const bool room = first < args.capacity && needed <= args.capacity - first;

    u32 to = first;
    for (u32 rest = room ? copying : 0; rest; rest &= rest - 1, to += words) {
        const u32 turn = static_cast<u32>(__ffs(static_cast<int>(rest))) - 1;
        const u64 theirs = __shfl_sync(ALL_LANES, place, turn);
        const u32* row = row_of(theirs, args.pool, args.host);
        for (u32 word = lane; word < words; word += WARP) args.buffer[to + word] = row[word];
    }
    if (hit && !owns) args.places[occurrence] = AT_OWNER;
    if (owns && room) {
        const u32 rank = static_cast<u32>(__popc(copying & lanes_before(lane)));
        args.places[occurrence] = AT_COPY | (first + words * rank);
    }
}

extern "C" __global__ void copy_rows(CopyArgs args) {
    u32* scan = dynamic_shared<u32>();
    for (u32 i = threadIdx.x; i < args.column_count + 1; i += blockDim.x) scan[i] = args.scan[i];
    __syncthreads();
    const u32 warps_a_block = blockDim.x / WARP, warps = scan[args.column_count];
    for (u32 warp = blockIdx.x * warps_a_block + threadIdx.x / WARP; warp < warps;
         warp += gridDim.x * warps_a_block) {
        const u32 segment = segment_of(scan, args.column_count, warp);
        copy_warp(args, segment, (warp - scan[segment]) * WARP + threadIdx.x % WARP);
    }
}
