// The fused query (DESIGN.md section 4, query steps 1 to 3; FLECHE sections 3.1 and 3.2): every id of every table
// becomes a flat key, equal keys find each other, and the index is probed, in one launch.
//
// Lookups are the segments of a self-identified fusion (common.cuh): lookup i has a thread an id, rounded up to
// whole warps.
//
// **Deduplication.** Each thread claims its key in a scratch table of open addressing. A claim is one
// compare-exchange of a word {generation, occurrence}; the key stands in `keys[occurrence]`, written before. A
// word of an older generation is an empty slot, so the table is never cleared. Whoever finds its key claimed
// has that occurrence for its owner. Nobody waits: the owner's result need not be there yet, so a loser probes
// the index for itself, and only where it finds nothing does it refer to its owner, which numbers the miss.
// So every missing row is reported once. (Under a concurrent change of the index an owner may find what its
// loser did not, or the other way round: either row is the key's, and a miss is then fetched all the same.)
//
// **Probing.** Eight lanes read a bucket of eight slots at once, one line of memory, for each of their eight
// keys in turn. The lane that sees its key reads word, key and word again, as `Index::probe` of
// src/cache/index.rs does, and for the same reason: a slot changes hands under the reader, because replacement
// and eviction run on another stream. Each fence keeps two of those loads in order, as `Acquire` does there.
// Locations that are equal in both words are of one linking, since the batch's pin keeps its slot from being
// used anew. A slot whose key is TOMBSTONE is being changed: the probe passes it by.
//
// **Tags.** An index of narrow keys gives several rows one key. So keys find each other by the rows' own keys, and
// what the index has under a key is the lane's row only if it lies behind that row's own key. Another's row is a
// miss, counted as a collision. A place is where the row itself begins, so that no later kernel knows of
// tags. Where every key is its row's own, `narrow` is null and none of this reads anything.
// **The overlay.** A batch of a version whose changed rows are not merged into the index asks the version's overlay
// first (src/cache/device/version.rs), and what it finds there it does not look for in the index. The header
// names the overlay, so that the arguments are the same for every batch. Nobody writes an overlay while a
// batch may read it.
//
// **Host rows.** Entries of the unified index give a location in memory of the host, which the gather reads in
// place. Their owners are reported too, as rows that the pool might rather have.
//
// **The report.** The last block to finish writes the counts to pinned memory and leaves the counters at 0.
#include "common.cuh"

struct ProbeArgs {
    const BatchHeader* header;
    const ProbeColumn* columns;  // column_count
    const u32* scan;             // column_count + 1, in warps
    const NarrowColumn* narrow;  // column_count; null where the index has the rows' own keys
    const u64* ids;
    Slot* index;
    const u32* pool;     // for tags
    u64* scratch;        // scratch_mask + 1 words, at least two an occurrence
    u64* keys;           // by occurrence
    u32* owners;         // by occurrence: written
    u64* places;         // by occurrence: written
    u32* counts;         // by column what found nothing, then what found a host row, then what collided; 0 between launches
    BatchState* state;
    u32* misses;         // the owner's occurrence of each miss: written
    u32* pointed;        // the owner's occurrence of each row of the host: written
    u32* report;         // misses, rows of the host, then `counts`: written
    u64 buckets;
    u32 scratch_mask;
    u32 column_count;
};

__device__ __forceinline__ u32 owner_of(const ProbeArgs& args, u32 generation, u32 occurrence, u64 key) {
    store(args.keys + occurrence, key);
    __threadfence();  // the key before the claim
    const u64 mine = static_cast<u64>(generation) << 32 | occurrence;
    for (u64 at = scatter(key);; ++at) {
        u64* slot = args.scratch + (at & args.scratch_mask);
        u64 seen = load(slot);
        if (seen >> 32 != generation) {
            const u64 before = atomicCAS(slot, seen, mine);
            if (before == seen) return occurrence;
            seen = before;  // of this generation: no other is written now
        }
        const u32 owner = static_cast<u32>(seen);
        __threadfence();  // the claim before the key
        if (load(args.keys + owner) == key) return owner;
    }
}

// A stamp that is at most so many batches old is not renewed, so that rows that every batch asks for are not
// written in every batch: the rule and the number of `FRESH` in src/cache/index.rs.
constexpr u32 FRESH = 2;

enum Look { LOOK_ABSENT, LOOK_FOUND, LOOK_CHANGED };

// Reads one slot for a key, and stamps it where it is found and not fresh.
__device__ __forceinline__ Look look_at(Slot* slot, u64 key, u64 now, u64* location) {
    if (load(&slot->key) != key) return LOOK_ABSENT;
    __threadfence();
    const u64 word = load(&slot->word);
    __threadfence();
    if (load(&slot->key) != key) return LOOK_CHANGED;
    __threadfence();
    const u64 again = load(&slot->word);
    if (location_of(again) != location_of(word)) return LOOK_CHANGED;
    // Failing is fine: someone else stamped it, or it went.
    if (age(now, stamp_of(again)) > FRESH) atomicCAS(&slot->word, again, pack(location_of(again), now));
    *location = location_of(word);
    return LOOK_FOUND;
}

// The location of a key that the SLOTS lanes of a group share, or NOWHERE. The whole warp calls it.
__device__ __forceinline__ u64 find_as_group(const ProbeArgs& args, u64 key, u64 now) {
    const u32 lane = threadIdx.x % WARP, rank = lane % SLOTS, group = lane - rank;
    u64 location = NOWHERE;
    for (;;) {
        u32 changed = 0;
        for (u32 which = 0; which < 2; ++which) {
            u64 mine = NOWHERE;
            Look look = LOOK_ABSENT;
            if (key != EMPTY && location == NOWHERE)
                look = look_at(bucket_of(args.index, args.buckets, key, which) + rank, key, now, &mine);
            const u32 found = __ballot_sync(ALL_LANES, look == LOOK_FOUND) >> group & 0xffu;
            changed |= __ballot_sync(ALL_LANES, look == LOOK_CHANGED) >> group & 0xffu;
            const u64 theirs = __shfl_sync(ALL_LANES, mine, found ? __ffs(static_cast<int>(found)) - 1 : 0, SLOTS);
            if (found) location = theirs;
        }
        if (!__any_sync(ALL_LANES, location == NOWHERE && changed)) return location;
    }
}

// The location of each lane's key, or NOWHERE; EMPTY asks for nothing. The whole warp calls it.
__device__ __forceinline__ u64 find(const ProbeArgs& args, u64 key, u64 now) {
    const u32 rank = threadIdx.x % SLOTS;
    u64 location = NOWHERE;
    for (u32 turn = 0; turn < SLOTS; ++turn) {
        const u64 shared = __shfl_sync(ALL_LANES, key, turn, SLOTS);
        const u64 found = find_as_group(args, shared, now);
        if (rank == turn) location = found;
    }
    return location;
}

// The key in the index of a present id whose own key is `own`, and whether its row bears a tag.
__device__ __forceinline__ u64 index_key(const ProbeArgs& args, u32 segment, u64 own, u64 id, bool* tagged) {
    *tagged = false;
    if (!args.narrow) return own;
    const NarrowColumn narrow = args.narrow[segment];
    *tagged = narrow.tagged;
    return narrow.base | (narrow.tagged ? fold(id, narrow.bits) : id);
}

// Whether what lies at a location, found under a row's key, is another's row.
__device__ __forceinline__ bool is_other(const ProbeArgs& args, u64 location, u64 own) {
    __threadfence();  // the location before the tag
    return location & 1 || tag_at(args.pool, location) != own;
}

// Whether the batch's version has changed a row, and where it is then; NOWHERE where it is not. By its own key.
__device__ __forceinline__ bool is_changed(const BatchHeader& header, u64 own, u64* location) {
    if (!header.overlay) return false;
    for (u64 at = scatter(own);; ++at) {
        const Changed changed = header.overlay[at & header.overlay_mask];
        if (changed.key == EMPTY) return false;
        if (changed.key != own) continue;
        *location = changed.location;
        return true;
    }
}

// Numbers the lanes that ask for it, over the whole launch, and counts those that are counted. The whole warp
// calls it.
__device__ __forceinline__ u32 number_of(bool asks, u32* cursor, bool counted, u32* count) {
    const u32 lane = threadIdx.x % WARP;
    const u32 asking = __ballot_sync(ALL_LANES, asks), all = __ballot_sync(ALL_LANES, counted);
    u32 first = 0;
    if (lane == 0 && all) atomicAdd(count, static_cast<u32>(__popc(all)));
    if (lane == 0 && asking) first = atomicAdd(cursor, static_cast<u32>(__popc(asking)));
    return __shfl_sync(ALL_LANES, first, 0) + __popc(asking & lanes_before(lane));
}

// One warp's ids, of one column.
__device__ __forceinline__ void probe_warp(const ProbeArgs& args, const BatchHeader& header, u32 segment, u32 item) {
    const ProbeColumn column = args.columns[segment];
    const bool live = item < column.ids;
    const u32 occurrence = column.occurrences_at + item;
    const u64 id = live ? args.ids[column.ids_at + item] : 0;
    const bool present = live && id < column.rows;
    const u64 own = present ? column.base | id : EMPTY;
    bool tagged = false;
    const u64 key = present ? index_key(args, segment, own, id, &tagged) : EMPTY;
    const u32 owner = present ? owner_of(args, header.generation, occurrence, own) : occurrence;
    u64 changed = NOWHERE;
    const bool is_new = present && is_changed(header, own, &changed);
    const u64 found = find(args, is_new ? EMPTY : key, header.now & STAMP_MASK);
    // What the overlay names is the row's own, whatever the tag.
    const bool collided = tagged && !is_new && found != NOWHERE && is_other(args, found, own);
    const u64 slot = is_new ? changed : collided ? NOWHERE : found;
    const u64 location = tagged && slot != NOWHERE ? slot + (TAG_WORDS << 1) : slot;

    const bool owns = owner == occurrence;
    const bool missed = present && location == NOWHERE, reports = missed && owns;
    const u32 number = number_of(reports, &args.state->cursor, missed, args.counts + segment);
    if (args.narrow) {
        const u32 colliding = __ballot_sync(ALL_LANES, collided);
        if (threadIdx.x % WARP == 0 && colliding)
            atomicAdd(args.counts + 2 * args.column_count + segment, static_cast<u32>(__popc(colliding)));
    }
    if (reports) args.misses[number] = occurrence;
    const bool points = present && !missed && location & 1;
    if (__any_sync(ALL_LANES, points)) {
        u32* count = args.counts + args.column_count + segment;
        const u32 pointer = number_of(points && owns, &args.state->pointed, points, count);
        if (points && owns) args.pointed[pointer] = occurrence;
    }
    if (!live) return;
    args.owners[occurrence] = owner;
    args.places[occurrence] = !present ? AT_NOTHING : reports ? AT_MISS | number : missed ? AT_OWNER : location;
}

extern "C" __global__ void probe(ProbeArgs args) {
    u32* scan = dynamic_shared<u32>();
    for (u32 i = threadIdx.x; i < args.column_count + 1; i += blockDim.x) scan[i] = args.scan[i];
    __syncthreads();

    const BatchHeader header = *args.header;
    const u32 warps_a_block = blockDim.x / WARP, warps = scan[args.column_count];
    for (u32 warp = blockIdx.x * warps_a_block + threadIdx.x / WARP; warp < warps;
         warp += gridDim.x * warps_a_block) {
        const u32 segment = segment_of(scan, args.column_count, warp);
        probe_warp(args, header, segment, (warp - scan[segment]) * WARP + threadIdx.x % WARP);
    }

    if (!last_block(&args.state->blocks)) return;
    for (u32 i = threadIdx.x; i < (args.narrow ? 3 : 2) * args.column_count; i += blockDim.x)
        args.report[2 + i] = atomicExch(args.counts + i, 0u);
    if (threadIdx.x == 0) {
        const u32 misses = atomicExch(&args.state->cursor, 0u);
        args.report[0] = misses;
        args.report[1] = atomicExch(&args.state->pointed, 0u);
        args.state->misses = misses;
        args.state->copied = 0;
    }
}
