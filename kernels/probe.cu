// The fused query (FLECHE sections 3.1 and 3.2): in one launch, every id of every table becomes a flat key,
// equal keys are deduplicated, and the index is probed.
//
// Lookups are the segments of a fused launch (common.cuh): a lookup has one thread per id, rounded up to
// whole warps.
//
// **Deduplication.** Each thread claims its key in a scratch hash table with open addressing. A claim is one
// compare-exchange of a word {generation, occurrence}. Before it, the thread stores the key in
// `keys[occurrence]`. A word of an older generation counts as a free slot, so the table is never cleared. The
// occurrence that claims a key is the owner of all occurrences of the key. No thread waits for an owner's
// result: each one probes the index itself. Only if it finds nothing, it refers to its owner, which numbers
// the miss. So each missing row is reported once. (If the index changes meanwhile, an owner may find a row
// that another occurrence does not find, or vice versa. Both rows are right, and the miss is fetched anyway.)
//
// **Probing.** Eight lanes read a bucket of eight slots at once, one line of memory, for each of their eight
// keys; the loads of all keys wait for memory together. This first look at the keys only selects a slot and
// needs no order. Replacement and eviction run on another stream, so a slot may change while it is read. So
// the lane whose key it is reads word, key and word again, in this order, as `Index::probe` of
// src/cache/index.rs does. If the key is still the same and both words have the same location, it is the
// key's location: while the batch is pinned, no location in the pool is linked a second time, so both words
// are of one linking L. By rule 1 of common.cuh, the key is L's or a later one. By rule 2, the last word is
// that key's or a later one; but it is L's, so the key is L's. (A location in host memory has one key only,
// as long as the memory is registered.) Otherwise the warp searches again. A slot whose key is TOMBSTONE is
// skipped.
//
// **Tags.** In an index of narrow keys several rows share a key. Therefore ids are deduplicated by the rows'
// full keys, and an entry is the wanted row only if its tag equals the row's full key. Another row's entry is
// a miss, counted as a collision. Places point to the first word after the tag, so later kernels need not
// know about tags. If every key is a full key, `narrow` is null and there are no tags.
//
// **The overlay.** If a version's changed rows are not merged into the index, its batches search the
// version's overlay first (src/cache/gpu/version.rs), and the index only for keys that the overlay does not
// have. The header has the overlay's address, so the kernel's arguments are the same for every batch. An
// overlay is not written while a batch may read it.
//
// **Host rows.** A location in the unified index may be in host memory (FLECHE section 3.3); the gather reads
// the row there. The probe also reports the owners of such rows, as candidates for a copy in the pool.
//
// **The report.** The last block writes the counts to pinned memory and resets the counters.
#include "common.cuh"

struct ProbeArgs {
    const BatchHeader* header;
    const ProbeColumn* columns;  // column_count elements
    const u32* scan;             // column_count + 1 elements: prefix sum of the segments' warps
    const NarrowColumn* narrow;  // column_count elements; null if the index has full keys
    const u64* ids;
    Slot* index;
    const u32* pool;  // for tags
    u64* scratch;     // scratch_mask + 1 words, at least two per occurrence
    u64* keys;        // by occurrence
    u32* owners;      // by occurrence; output
    u64* places;      // by occurrence; output
    u32* counts;      // by column: misses, then host rows, then collisions; 0 between launches
    BatchState* state;
    u32* misses;      // by miss: the owner's occurrence; output
    u32* pointed;     // by host row: the owner's occurrence; output
    u32* report;      // misses, host rows, then `counts`; output
    u64 buckets;
    u32 scratch_mask;
    u32 column_count;
};

// The owner of a key: the occurrence that claimed it first.
__device__ __forceinline__ u32 owner_of(const ProbeArgs& args, u32 generation, u32 occurrence, u64 key) {
    store(args.keys + occurrence, key);
    __threadfence();  // orders the key before its claim
    const u64 mine = static_cast<u64>(generation) << 32 | occurrence;
    for (u64 at = mix64(key);; ++at) {
        u64* slot = args.scratch + (at & args.scratch_mask);
        u64 seen = load(slot);
        if (seen >> 32 != generation) {
            const u64 before = atomicCAS(slot, seen, mine);
            if (before == seen) return occurrence;
            seen = before;  // has this generation: no other one is written during this launch
        }
        const u32 owner = static_cast<u32>(seen);
        __threadfence();  // orders the load of the claim before that of its key
        if (load(args.keys + owner) == key) return owner;
    }
}

// A stamp at most this many batches old is not renewed, so that not every batch writes the stamps of the
// hottest rows. Equals `FRESH` of src/cache/index.rs.
constexpr u32 FRESH = 2;

// The location of a slot that had the key a moment ago, or NOWHERE if the slot changes. Renews the stamp
// unless it is fresh.
__device__ __forceinline__ u64 read_slot(Slot* slot, u64 key, u64 now) {
    const u64 word = load(&slot->word);
    __threadfence();  // orders the word before the key (rule 1), and before the row and its tag
    if (load(&slot->key) != key) return NOWHERE;
    __threadfence();  // orders the key before the word (rule 2)
    const u64 again = load(&slot->word);
    if (location_of(again) != location_of(word)) return NOWHERE;
    // If this fails, another thread has stamped the slot or linked another entry. Both are harmless.
    if (age(now, stamp_of(again)) > FRESH) atomicCAS(&slot->word, again, pack(location_of(again), now));
    return location_of(word);
}

// The slot with each lane's key, or null. A lane without a key passes EMPTY. Called by the whole warp.
//
// SLOTS lanes read both buckets of each other's keys. All loads come before the first use of one, so that
// they wait for memory together.
__device__ __forceinline__ Slot* slot_of(const ProbeArgs& args, u64 key) {
    const u32 lane = threadIdx.x % WARP, rank = lane % SLOTS, group = lane - rank;
    u64 seen[SLOTS][2];
    for (u32 turn = 0; turn < SLOTS; ++turn) {
        const u64 wanted = __shfl_sync(ALL_LANES, key, turn, SLOTS);
        for (u32 which = 0; which < 2; ++which) {
            Slot* slot = bucket_of(args.index, args.buckets, wanted, which) + rank;
            seen[turn][which] = wanted == EMPTY ? TOMBSTONE : load(&slot->key);
        }
    }
    Slot* slot = nullptr;
    for (u32 turn = 0; turn < SLOTS; ++turn) {
        const u64 wanted = __shfl_sync(ALL_LANES, key, turn, SLOTS);
        for (u32 which = 0; which < 2; ++which) {
            const u32 found = __ballot_sync(ALL_LANES, seen[turn][which] == wanted) >> group & 0xffu;
            if (rank != turn || !found || slot) continue;
            slot = bucket_of(args.index, args.buckets, key, which) + (__ffs(static_cast<int>(found)) - 1);
        }
    }
    return slot;
}

// The location of each lane's key, or NOWHERE. A lane without a key passes EMPTY. Called by the whole warp.
__device__ __forceinline__ u64 find(const ProbeArgs& args, u64 key, u64 now) {
    u64 location = NOWHERE;
    for (;;) {
        Slot* slot = slot_of(args, location == NOWHERE ? key : EMPTY);
        if (slot) location = read_slot(slot, key, now);
        if (!__any_sync(ALL_LANES, slot && location == NOWHERE)) return location;
    }
}

// The index key of a row whose full key is `full`, and whether the row has a tag.
__device__ __forceinline__ u64 index_key(const ProbeArgs& args, u32 segment, u64 full, u64 id, bool* tagged) {
    *tagged = false;
    if (!args.narrow) return full;
    const NarrowColumn narrow = args.narrow[segment];
    *tagged = narrow.tagged;
    return narrow.base | (narrow.tagged ? fold(id, narrow.bits) : id);
}

// Whether the row at a location is not the one with this full key.
__device__ __forceinline__ bool is_other(const ProbeArgs& args, u64 location, u64 full) {
    return location & 1 || tag_at(args.pool, location) != full;
}

// Whether the overlay has a row, by its full key. Sets its location, which is NOWHERE if the row is not
// cached.
__device__ __forceinline__ bool is_changed(const BatchHeader& header, u64 full, u64* location) {
    if (!header.overlay) return false;
    for (u64 at = mix64(full);; ++at) {
        const Changed changed = header.overlay[at & header.overlay_mask];
        if (changed.key == EMPTY) return false;
        if (changed.key != full) continue;
        *location = changed.location;
        return true;
    }
}

// Gives each asking lane a number that is unique in the launch. Adds the number of counted lanes to `count`.
// Called by the whole warp.
__device__ __forceinline__ u32 number_of(bool asks, u32* cursor, bool counted, u32* count) {
    const u32 lane = threadIdx.x % WARP;
    const u32 asking = __ballot_sync(ALL_LANES, asks), all = __ballot_sync(ALL_LANES, counted);
    u32 first = 0;
    if (lane == 0 && all) atomicAdd(count, static_cast<u32>(__popc(all)));
    if (lane == 0 && asking) first = atomicAdd(cursor, static_cast<u32>(__popc(asking)));
    return __shfl_sync(ALL_LANES, first, 0) + __popc(asking & lanes_before(lane));
}

// Probes the ids of one warp, all of one column.
__device__ __forceinline__ void probe_warp(const ProbeArgs& args, const BatchHeader& header, u32 segment,
                                           u32 item) {
    const ProbeColumn column = args.columns[segment];
    const bool live = item < column.ids;
    const u32 occurrence = column.occurrences_at + item;
    const u64 id = live ? args.ids[column.ids_at + item] : 0;
    const bool present = live && id < column.rows;
    const u64 full = present ? column.base | id : EMPTY;
    bool tagged = false;
    const u64 key = present ? index_key(args, segment, full, id, &tagged) : EMPTY;
    const u32 owner = present ? owner_of(args, header.generation, occurrence, full) : occurrence;
    u64 changed = NOWHERE;
    const bool is_new = present && is_changed(header, full, &changed);
    const u64 found = find(args, is_new ? EMPTY : key, header.now & STAMP_MASK);
    // The overlay is searched by full key, so its rows need no check of the tag.
    const bool collided = tagged && !is_new && found != NOWHERE && is_other(args, found, full);
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
    const u64 missing = reports ? AT_MISS | number : AT_OWNER;
    args.places[occurrence] = !present ? AT_NOTHING : missed ? missing : location;
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
    for (u32 i = threadIdx.x; i < (args.narrow ? 3 : 2) * args.column_count; i += blockDim.x) {
        args.report[2 + i] = load(args.counts + i);
        store(args.counts + i, 0u);
    }
    if (threadIdx.x == 0) {
        const u32 misses = load(&args.state->cursor);
        args.report[0] = misses;
        args.report[1] = load(&args.state->pointed);
        args.state->misses = misses;
        store(&args.state->cursor, 0u);
        store(&args.state->pointed, 0u);
        store(&args.state->copied, 0u);
    }
}
