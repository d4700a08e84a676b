// Eviction (DESIGN.md section 4): the ages of a sample of the entries, from which the host takes a threshold, and
// the sweep that unlinks what is at least so old, or what lies in slabs that are being emptied, or pointers that
// are withdrawn. Where a row's table may be pointed at (FLECHE section 3.3), an old row gives up its slot and
// stays in the index with a location in memory of the host, as long as there may be more such pointers.
//
// Both run on the replacement stream (replace.cu), so no other kernel links or unlinks meanwhile; probes go on
// beside them. Unlinking is one compare-exchange of a key to EMPTY: whoever succeeds reports the entry, whose
// location nobody changes any more. The entry may have been used since its stamp was read: LRU is approximate.
#include "common.cuh"

struct SampleArgs {
    const Slot* index;
    u32* ages;     // count x SLOTS: written, ~0 for a slot without an entry that may go
    u64 buckets;
    u64 now;
    u64 draw;      // chooses the buckets
    u32 count;     // buckets to sample
    u32 pointers;  // whether pointers may go
};

// A thread a slot.
extern "C" __global__ void sample_ages(SampleArgs args) {
    const u64 slots = static_cast<u64>(args.count) * SLOTS;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < slots; i += gridDim.x * blockDim.x) {
        const u64 number = i / SLOTS;
        const u64 bucket = args.buckets <= args.count ? number : scatter(args.draw + number) % args.buckets;
        const Slot* slot = args.index + bucket * SLOTS + i % SLOTS;
        const u64 word = load(&slot->word);
        const bool counts = load(&slot->key) > TOMBSTONE && (args.pointers || !(word & 1));
        args.ages[i] = counts ? age(args.now, stamp_of(word)) : ~0u;
    }
}

enum { VICTIM_AGED, VICTIM_AGED_ROW, VICTIM_IN_SLABS, VICTIM_POINTER };

struct Evicted {
    u64 key;       // EMPTY where the place was taken in vain
    u64 location;  // where it was
    u64 moved;     // 1 where the key stays, and is found in memory of the host
};

// A table whose rows may be pointed at, one after the other in memory of the host.
struct Pointable {
    u64 base;   // its keys are base + id
    u64 rows;   // for ids below
    u64 first;  // the location of row 0
    u64 words;  // of a row
};

struct SweepArgs {
    Slot* index;
    const u32* draining;         // a bit a slab
    const Pointable* pointable;  // pointables, by ascending base
    Evicted* evicted;            // most: written
    u32* counters;               // entries put out, pointers made, blocks that are done; 0 between launches
    u32* report;                 // how many of `evicted` are written
    u64 buckets;
    u64 hand;                    // the first bucket of the stretch, which goes round
    u64 now;
    u64 from, to;                // pointers at locations from `from` and below `to` are withdrawn
    u32 victims;                 // VICTIM_
    u32 stretch;                 // buckets
    u32 threshold;               // the least age that goes
    u32 most;                    // entries to put out at most
    u32 slab_words;
    u32 pointables;
    u32 pointers;                // to make at most
    u32 unused;
};

__device__ __forceinline__ bool goes(const SweepArgs& args, u64 word) {
    const u64 location = location_of(word);
    const bool points = location & 1, aged = age(args.now, stamp_of(word)) >= args.threshold;
    if (args.victims == VICTIM_AGED) return aged;
    if (args.victims == VICTIM_AGED_ROW) return aged && !points;
    if (args.victims == VICTIM_POINTER) return points && args.from <= location && location < args.to;
    const u64 slab = (location >> 1) / args.slab_words;
    return !points && args.draining[slab / 32] >> (slab % 32) & 1;
}

// Where a key's row lies in memory of the host, or NOWHERE.
__device__ __forceinline__ u64 pointer_to(const SweepArgs& args, u64 key) {
    u32 low = 0, high = args.pointables;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (args.pointable[middle].base <= key) low = middle + 1;
        else high = middle;
    }
    if (low == 0) return NOWHERE;
    // Blocks of keys do not overlap, so a key of another table is past this one's rows.
    const Pointable table = args.pointable[low - 1];
    const u64 id = key - table.base;
    return id < table.rows ? table.first + (id * table.words << 1) : NOWHERE;
}

// Takes the entry out of its slot of the pool, or out of the index.
__device__ __forceinline__ Evicted put_out(const SweepArgs& args, Slot* slot, u64 key, u64 stamp) {
    const u64 pointer = args.victims == VICTIM_AGED_ROW ? pointer_to(args, key) : NOWHERE;
    const bool may = pointer != NOWHERE && atomicAdd(args.counters + 1, 1u) < args.pointers;
    if (may && claim(slot, key)) return {key, give(slot, key, pointer, stamp), 1};
    const bool unlinked = atomicCAS(&slot->key, key, EMPTY) == key;
    return {unlinked ? key : EMPTY, location_of(load(&slot->word)), 0};
}

// A thread a slot.
extern "C" __global__ void sweep(SweepArgs args) {
    const u64 slots = static_cast<u64>(args.stretch) * SLOTS;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < slots; i += gridDim.x * blockDim.x) {
        Slot* slot = args.index + (args.hand + i / SLOTS) % args.buckets * SLOTS + i % SLOTS;
        const u64 key = load(&slot->key), word = load(&slot->word);
        if (key <= TOMBSTONE || !goes(args, word) || load(args.counters) >= args.most) continue;
        const u32 number = atomicAdd(args.counters, 1u);
        if (number < args.most) args.evicted[number] = put_out(args, slot, key, stamp_of(word));
    }
    if (!last_block(args.counters + 2) || threadIdx.x != 0) return;
    store(args.counters + 1, 0u);
    const u32 wanted = atomicExch(args.counters, 0u);
    args.report[0] = wanted < args.most ? wanted : args.most;
}
