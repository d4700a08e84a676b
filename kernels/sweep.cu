// Eviction (DESIGN.md section 4): the ages of a sample of the entries, from which the host takes a threshold, and
// the sweep that unlinks what is at least so old, or what lies in slabs that are being emptied.
//
// Both run on the replacement stream (replace.cu), so no other kernel links or unlinks meanwhile; probes go on
// beside them. Unlinking is one compare-exchange of a key to EMPTY: whoever succeeds reports the entry, whose
// location nobody changes any more. The entry may have been used since its stamp was read: LRU is approximate.
#include "common.cuh"

struct SampleArgs {
    const Slot* index;
    u32* ages;    // count x SLOTS: written, ~0 for a slot without an entry
    u64 buckets;
    u64 now;
    u64 draw;     // chooses the buckets
    u64 count;    // buckets to sample
};

// A thread a slot.
extern "C" __global__ void sample_ages(SampleArgs args) {
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < args.count * SLOTS; i += gridDim.x * blockDim.x) {
        const u64 number = i / SLOTS;
        const u64 bucket = args.buckets <= args.count ? number : scatter(args.draw + number) % args.buckets;
        const Slot* slot = args.index + bucket * SLOTS + i % SLOTS;
        const bool live = load(&slot->key) > TOMBSTONE;
        args.ages[i] = live ? age(args.now, stamp_of(load(&slot->word))) : ~0u;
    }
}

struct Evicted {
    u64 key;  // EMPTY where the place was taken in vain
    u64 location;
};

struct SweepArgs {
    Slot* index;
    const u32* draining;  // a bit a slab; null where age decides
    Evicted* evicted;     // most: written
    u32* counters;        // entries put out, blocks that are done; 0 between launches
    u32* report;          // how many of `evicted` are written
    u64 buckets;
    u64 hand;             // the first bucket of the stretch, which goes round
    u64 now;
    u32 stretch;          // buckets
    u32 threshold;        // the least age that goes
    u32 most;             // entries to put out at most
    u32 slab_words;
};

__device__ __forceinline__ bool goes(const SweepArgs& args, u64 word) {
    if (!args.draining) return age(args.now, stamp_of(word)) >= args.threshold;
    if (word & 1) return false;  // a host row lies in no slab
    const u64 slab = (location_of(word) >> 1) / args.slab_words;
    return args.draining[slab / 32] >> (slab % 32) & 1;
}

// A thread a slot.
extern "C" __global__ void sweep(SweepArgs args) {
    const u64 slots = static_cast<u64>(args.stretch) * SLOTS;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < slots; i += gridDim.x * blockDim.x) {
        Slot* slot = args.index + (args.hand + i / SLOTS) % args.buckets * SLOTS + i % SLOTS;
        const u64 key = load(&slot->key);
        if (key <= TOMBSTONE || !goes(args, load(&slot->word)) || load(args.counters) >= args.most) continue;
        const u32 number = atomicAdd(args.counters, 1u);
        if (number >= args.most) continue;
        const bool unlinked = atomicCAS(&slot->key, key, EMPTY) == key;
        args.evicted[number] = {unlinked ? key : EMPTY, location_of(load(&slot->word))};
    }
    if (!last_block(args.counters + 1) || threadIdx.x != 0) return;
    const u32 wanted = atomicExch(args.counters, 0u);
    args.report[0] = wanted < args.most ? wanted : args.most;
}
