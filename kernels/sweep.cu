// Eviction: `sample_ages` reports the ages of a sample of entries, from which the host derives a threshold,
// and `sweep` evicts from a stretch of buckets: entries that are at least that old, entries in slabs that are
// being drained, or pointers to host memory that is withdrawn. If the index may point at a table's rows in
// host memory (unified index: FLECHE section 3.3), an old row's slot is freed and its entry becomes a pointer
// to the row. The number of new pointers is limited.
//
// Both kernels run on the replacement stream (replace.cu), so no other kernel changes the index meanwhile;
// probes run beside them. An entry is evicted by one compare-exchange of its key to EMPTY, and the thread
// that succeeds reports it. No other thread changes the entry's location during the launch. The entry may
// have been used since its stamp was read: LRU is approximate.
#include "common.cuh"

struct SampleArgs {
    const Slot* index;
    u32* ages;     // count x SLOTS, output; ~0: no entry that may be evicted
    u64 buckets;
    u64 now;
    u64 draw;      // random seed that selects the buckets
    u32 count;     // buckets to sample
    u32 pointers;  // whether pointers may be evicted
};

// One thread per slot.
extern "C" __global__ void sample_ages(SampleArgs args) {
    const u64 slots = static_cast<u64>(args.count) * SLOTS;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < slots; i += gridDim.x * blockDim.x) {
        const u64 number = i / SLOTS;
        const u64 bucket = args.buckets <= args.count ? number : mix64(args.draw + number) % args.buckets;
        const Slot* slot = args.index + bucket * SLOTS + i % SLOTS;
        const u64 word = load(&slot->word);
        const bool counts = load(&slot->key) > TOMBSTONE && (args.pointers || !(word & 1));
        args.ages[i] = counts ? age(args.now, stamp_of(word)) : ~0u;
    }
}

// Which entries are victims: old ones; old ones with a row in the pool; those in slabs that are being
// drained; pointers to a range of locations.
enum { VICTIM_AGED, VICTIM_AGED_ROW, VICTIM_IN_SLABS, VICTIM_POINTER };

struct Evicted {
    u64 key;       // EMPTY: the entry had changed, and nothing was evicted
    u64 location;  // its previous location
    u64 moved;     // 1: the entry is now a pointer to host memory
};

// A table with rows in host memory at which the index may point. The rows are contiguous.
struct Pointable {
    u64 base;   // the key of a row is base + id
    u64 rows;
    u64 first;  // the location of row 0
    u64 words;  // per row
};

struct SweepArgs {
    Slot* index;
    const u32* draining;         // one bit per slab
    const Pointable* pointable;  // `pointables` tables, by ascending base
    Evicted* evicted;            // room for `most`; output
    u32* counters;               // evicted entries, new pointers, finished blocks; 0 between launches
    u32* report;                 // the length of `evicted`
    u64 buckets;
    u64 hand;                    // the first bucket of the stretch, which wraps around
    u64 now;
    u64 from, to;                // VICTIM_POINTER: locations in [from, to)
    u32 victims;                 // VICTIM_: which entries to evict
    u32 stretch;                 // number of buckets
    u32 threshold;               // least age of a victim
    u32 most;                    // entries to evict at most
    u32 slab_words;
    u32 pointables;
    u32 pointers;                // entries that become pointers at most
    u32 unused;
};

__device__ __forceinline__ bool is_victim(const SweepArgs& args, u64 word) {
    const u64 location = location_of(word);
    const bool points = location & 1, aged = age(args.now, stamp_of(word)) >= args.threshold;
    if (args.victims == VICTIM_AGED) return aged;
    if (args.victims == VICTIM_AGED_ROW) return aged && !points;
    if (args.victims == VICTIM_POINTER) return points && args.from <= location && location < args.to;
    const u64 slab = (location >> 1) / args.slab_words;
    return !points && args.draining[slab / 32] >> (slab % 32) & 1;
}

// The location of a key's row in host memory, or NOWHERE.
__device__ __forceinline__ u64 pointer_to(const SweepArgs& args, u64 key) {
    u32 low = 0, high = args.pointables;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (args.pointable[middle].base <= key) low = middle + 1;
        else high = middle;
    }
    if (low == 0) return NOWHERE;
    // The tables' key ranges do not overlap, so a key of another table is after this table's last row.
    const Pointable table = args.pointable[low - 1];
    const u64 id = key - table.base;
    return id < table.rows ? table.first + (id * table.words << 1) : NOWHERE;
}

// Replaces an entry by a pointer to host memory, if that is possible, or evicts it.
__device__ __forceinline__ Evicted evict(const SweepArgs& args, Slot* slot, u64 key, u64 stamp) {
    const u64 pointer = args.victims == VICTIM_AGED_ROW ? pointer_to(args, key) : NOWHERE;
    const bool may = pointer != NOWHERE && atomicAdd(args.counters + 1, 1u) < args.pointers;
    if (may && claim(slot, key)) return {key, publish(slot, key, pointer, stamp), 1};
    const bool unlinked = atomicCAS(&slot->key, key, EMPTY) == key;
    return {unlinked ? key : EMPTY, location_of(load(&slot->word)), 0};
}

// One thread per slot.
extern "C" __global__ void sweep(SweepArgs args) {
    const u64 slots = static_cast<u64>(args.stretch) * SLOTS;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < slots; i += gridDim.x * blockDim.x) {
        Slot* slot = args.index + (args.hand + i / SLOTS) % args.buckets * SLOTS + i % SLOTS;
        const u64 key = load(&slot->key), word = load(&slot->word);
        if (key <= TOMBSTONE || !is_victim(args, word) || load(args.counters) >= args.most) continue;
        const u32 number = atomicAdd(args.counters, 1u);
        if (number < args.most) args.evicted[number] = evict(args, slot, key, stamp_of(word));
    }
    if (!last_block(args.counters + 2) || threadIdx.x != 0) return;
    const u32 wanted = load(args.counters);
    args.report[0] = wanted < args.most ? wanted : args.most;
    store(args.counters, 0u);
    store(args.counters + 1, 0u);
}
